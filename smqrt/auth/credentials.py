"""Logins with JSON Web Tokens and with client certificates."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import gevent
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from smqrt.auth.identity import MAX_GROUPS, Identity, Method, name_fault
from smqrt.auth.users import read_file, read_private
from smqrt.crypto import tokens
from smqrt.crypto.tokens import VerifyKey
from smqrt.errors import ArgumentError, CryptoError, SmqrtError
from smqrt.settings.server_settings import AuthSettings

log = logging.getLogger("smqrt")

MAX_TOKEN_BYTES = 16 << 10
MIN_SECRET_BYTES = 32
"""A shorter secret can be guessed from a token, with a graphics card (RFC 7518 §3.2)."""
MAX_TRIED_KEYS = 8
"""Maximum number of keys that are tried for a token without a key name."""
MAX_JWKS_BYTES = 256 << 10
REFRESH_S = 300.0
"""Interval of fetches."""
RETRY_S = 60.0
"""Minimum interval between two fetches because of an unknown key, and interval after a failed fetch."""
MAX_FETCH_WAIT_S = 5.0
"""Maximum time that a login waits for a fetch."""

FetchDocument = Callable[[str, int], bytes]
"""`(url, max_bytes)` returns a document; blocks for at most a few seconds. Raises OSError or SmqrtError."""


class TokenError(SmqrtError):
    """A token was rejected; the client receives the text."""


class TokenKeys:
    """Keys that verify tokens: from files, and from the URL `auth.jwt_jwks`.

    Args:
        settings: the settings group `auth`.
        fetch: returns the document at a URL.
        changed: called when the first keys of the URL are received, or keys were removed.

    Attributes:
        fault: the error of the last fetch; empty when it succeeded.
    """

    def __init__(self, settings: AuthSettings, fetch: FetchDocument, changed: Callable[[], object]) -> None:
        self._settings, self._fetch, self._changed = settings, fetch, changed
        self._file_keys: list[VerifyKey] = []
        self._url_keys: list[VerifyKey] = []
        self.fault = ""
        self._fetched_s = float("-inf")
        self._fetching: gevent.Greenlet[..., None] | None = None
        self._refresher: gevent.Greenlet[..., None] | None = None

    def set_file_keys(self, found: list[VerifyKey]) -> None:
        """Replace the keys of files."""
        self._file_keys = found

    def for_token(self, header: Mapping[str, object]) -> list[VerifyKey]:
        """Return the keys for the header of a token; blocks while they are fetched."""
        found = self._matching(header)
        if not found and self._settings.jwt_jwks:
            self._fetch_if_due(RETRY_S)
            found = self._matching(header)
        return found[:MAX_TRIED_KEYS]

    def has(self, proof: str) -> bool:
        """Return whether a key is still used; true for all until the keys of the URL are fetched."""
        # Otherwise a restart of the server would end all logins with these keys.
        is_not_fetched = bool(self._settings.jwt_jwks) and not self._url_keys
        return is_not_fetched or any(key.proof == proof for key in (*self._file_keys, *self._url_keys))

    def _matching(self, header: Mapping[str, object]) -> list[VerifyKey]:
        algorithm, name = header.get("alg"), header.get("kid")
        allowed = [
            key
            for key in (*self._file_keys, *self._url_keys)
            if algorithm in key.algorithms and algorithm in self._settings.jwt_algorithms
        ]
        if not isinstance(name, str):
            return allowed
        # A key without a name may verify a token with any key name.
        return [key for key in allowed if key.name == name] or [key for key in allowed if key.name is None]

    # ---- the keys of the URL

    def start(self) -> None:
        """Start to fetch the keys periodically."""
        if self._settings.jwt_jwks and self._refresher is None:
            self._refresher = gevent.spawn(self._refresh)

    def stop(self) -> None:
        """Stop fetching."""
        for one in (self._refresher, self._fetching):
            if one is not None:
                one.kill(block=False)
        self._refresher = self._fetching = None

    def _refresh(self) -> None:
        while True:
            self._fetch_if_due(0.0)
            gevent.sleep(REFRESH_S if not self.fault else RETRY_S)

    def _fetch_if_due(self, interval_s: float) -> None:
        """Fetch the keys, unless that was done within `interval_s`; concurrent callers share one fetch."""
        if self._fetching is None:
            if time.monotonic() - self._fetched_s < interval_s:
                return
            self._fetched_s = time.monotonic()  # before the fetch, so that the interval applies to failed ones too
            self._fetching = gevent.spawn(self._fetch_keys)
        self._fetching.join(MAX_FETCH_WAIT_S)

    def _fetch_keys(self) -> None:
        url = self._settings.jwt_jwks or ""
        try:
            found = tokens.keys_of_set(self._fetch(url, MAX_JWKS_BYTES))
        except (SmqrtError, OSError) as error:
            if str(error) != self.fault:
                log.error("can't fetch the keys of tokens from %s: %s; see the setting auth.jwt_jwks", url, error)
            self.fault = str(error) or type(error).__name__
        else:
            if self.fault:
                log.warning("the keys of tokens can be fetched from %s again", url)
            removed = {key.proof for key in self._url_keys} - {key.proof for key in found}
            is_first, self._url_keys, self.fault = not self._url_keys, found, ""
            if removed or is_first:  # `has` was true for all keys before the first fetch
                self._changed()
        finally:
            self._fetching = None


def identity_of_token(token: bytes, keys: TokenKeys, settings: AuthSettings) -> Identity:
    """Return the identity of a token; may block while keys are fetched.

    Raises:
        TokenError: not a token, or not valid; the text has the reason.
    """
    if len(token) > MAX_TOKEN_BYTES:
        raise TokenError(f"the token has more than {MAX_TOKEN_BYTES >> 10} KiB")
    try:
        header = tokens.header_of(token)
    except CryptoError:
        raise TokenError("it is malformed") from None
    fault = f"unknown key, or an algorithm other than {', '.join(settings.jwt_algorithms)}"
    for key in keys.for_token(header):
        try:
            claims = tokens.claims(
                token,
                key,
                allowed=settings.jwt_algorithms,
                issuer=settings.jwt_issuer,
                audience=settings.jwt_audience,
                leeway_s=settings.jwt_leeway_s,
                required=settings.jwt_required,
            )
        except CryptoError as error:
            fault = str(error)
        else:
            return _identity_of_claims(claims, key, settings)
    raise TokenError(fault)


def _identity_of_claims(claims: Mapping[str, object], key: VerifyKey, settings: AuthSettings) -> Identity:
    user = _claim(claims, settings.jwt_user)
    if not isinstance(user, str):
        raise TokenError(f"the claim {settings.jwt_user}, which names the user, is not a string")
    if fault := name_fault(user):
        raise TokenError(fault)
    expires, expires_s = claims.get("exp"), None
    if settings.jwt_disconnect and isinstance(expires, int | float):
        try:
            expires_s = float(expires) + settings.jwt_leeway_s  # the same tolerance as for the login
        except OverflowError:
            raise TokenError("it is malformed") from None
    listed = _claim(claims, settings.jwt_groups)
    words: Sequence[object] = ()
    if isinstance(listed, str):  # separated by spaces or commas, as in the claim `scope`
        words = listed.replace(",", " ").split()
    elif isinstance(listed, list):
        words = listed
    groups = dict.fromkeys(word for word in words if isinstance(word, str) and name_fault(word) is None)
    return Identity(user, tuple(groups)[:MAX_GROUPS], Method.TOKEN, expires_s=expires_s, proof=key.proof)


def _claim(claims: Mapping[str, object], path: str) -> object:
    """Return a claim by its name, or by the names of nested objects: `realm_access.roles`."""
    if path in claims:
        return claims[path]
    found: object = claims
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


# ---- Settings of tokens


def accepts_tokens(settings: AuthSettings) -> bool:
    """Return whether the settings accept tokens."""
    return bool(settings.jwt_key or settings.jwt_secret or settings.jwt_jwks)


def check_token_settings(settings: AuthSettings) -> None:
    """Check the settings of tokens together.

    Raises:
        ArgumentError: an invalid combination.
    """
    if unknown := [name for name in settings.jwt_algorithms if name not in tokens.VERIFIABLE]:
        raise ArgumentError(f"auth.jwt_algorithms: {unknown[0]!r} is not one of {', '.join(tokens.VERIFIABLE)}")
    if not settings.jwt_jwks:
        return
    url = urlsplit(settings.jwt_jwks)
    is_loopback = url.hostname == "localhost"
    with suppress(ValueError):  # another host name
        is_loopback = ip_address(url.hostname or "").is_loopback
    if url.scheme != "https" and not (url.scheme == "http" and is_loopback):
        raise ArgumentError(f"auth.jwt_jwks must be an https URL, not {settings.jwt_jwks!r}")
    if not settings.jwt_issuer and not settings.jwt_audience:
        raise ArgumentError(
            "auth.jwt_jwks needs auth.jwt_issuer or auth.jwt_audience: otherwise tokens for other services are accepted"
        )


def key_paths(settings: AuthSettings) -> list[str]:
    """Return the paths of the files with keys."""
    return [path for path in (settings.jwt_key, settings.jwt_secret) if path]


def load_keys(settings: AuthSettings) -> list[VerifyKey]:
    """Read the files with keys; blocks.

    Raises:
        ArgumentError: a file can't be read or has no valid key.
    """
    found: list[VerifyKey] = []
    try:
        if settings.jwt_key:
            found += tokens.verify_keys(read_file(Path(settings.jwt_key)).encode())
    except CryptoError as error:
        raise ArgumentError(f"{settings.jwt_key}: {error}") from None
    if settings.jwt_secret:
        secret = read_private(Path(settings.jwt_secret)).rstrip("\r\n").encode()
        if len(secret) < MIN_SECRET_BYTES:
            raise ArgumentError(f"{settings.jwt_secret}: the secret needs at least {MIN_SECRET_BYTES} bytes")
        found.append(tokens.shared_key(secret))
    return found


# ---- Client certificates: user name by a template, and revocation

_FIELD = re.compile(r"\{(\w*)\}")
_SUBJECT = {
    "cn": NameOID.COMMON_NAME,
    "ou": NameOID.ORGANIZATIONAL_UNIT_NAME,
    "o": NameOID.ORGANIZATION_NAME,
    "c": NameOID.COUNTRY_NAME,
    "uid": NameOID.USER_ID,
    "serialnumber": NameOID.SERIAL_NUMBER,
}
_ALTERNATIVE: Mapping[str, Callable[[x509.SubjectAlternativeName], Iterable[object]]] = {
    "dns": lambda names: names.get_values_for_type(x509.DNSName),
    "email": lambda names: names.get_values_for_type(x509.RFC822Name),
    "uri": lambda names: names.get_values_for_type(x509.UniformResourceIdentifier),
    "ip": lambda names: names.get_values_for_type(x509.IPAddress),
}
FIELDS = (*_SUBJECT, *_ALTERNATIVE, "fingerprint")
"""The fields that a template may use."""


class CertificateError(SmqrtError):
    """A certificate was rejected; the client receives the text."""


class RevocationLists:
    """Revocation lists by their issuer.

    Args:
        lists: revocation lists of the authorities of client certificates.
    """

    def __init__(self, lists: Iterable[x509.CertificateRevocationList] = ()) -> None:
        self._lists = {_hash_of_name(found.issuer): found for found in lists}

    def has(self, proof: str) -> bool:
        """Return whether the certificate with this `Identity.proof` is revoked."""
        issuer, _, serial = proof.partition(":")
        found = self._lists.get(issuer)
        return found is not None and found.get_revoked_certificate_by_serial_number(int(serial, 16)) is not None


def load_lists(paths: Iterable[str]) -> RevocationLists:
    """Read files with revocation lists (PEM); blocks.

    Raises:
        ArgumentError: a file can't be read or is not valid.
    """
    end = "-----END X509 CRL-----"
    found = []
    for path in paths:
        try:
            parts = read_file(Path(path)).split(end)[:-1]
            found += [x509.load_pem_x509_crl((part + end).encode()) for part in parts]
        except ValueError:
            raise ArgumentError(f"{path}: not a revocation list") from None
    return RevocationLists(found)


def check_template(setting: str, template: str | None) -> None:
    """Check a template of a user or of groups.

    Raises:
        ArgumentError: an unknown field, or no field.
    """
    for name in _FIELD.findall(template or ""):
        if name not in FIELDS:
            raise ArgumentError(f"{setting}: unknown field {{{name}}}; use one of {', '.join(FIELDS)}")
    if template is not None and not _FIELD.search(template):
        raise ArgumentError(f"{setting} must have a field of the certificate, such as {{cn}}, not {template!r}")


def identity_of_certificate(der: bytes, user: str, groups: str | None) -> Identity:
    """Return the identity of a certificate that the TLS handshake has verified.

    Args:
        der: the certificate.
        user: template of the user name, such as `{cn}`.
        groups: template of the groups, comma-separated; None for none.

    Raises:
        CertificateError: a field of the template is missing, or not valid as a user name.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        name = _filled(user, certificate)
        listed = _filled(groups, certificate).split(",") if groups else []
    except ValueError:
        raise CertificateError("it is malformed") from None
    if fault := name_fault(name):
        raise CertificateError(fault)
    found = dict.fromkeys(group for group in map(str.strip, listed) if name_fault(group) is None)
    return Identity(
        name,
        tuple(found)[:MAX_GROUPS],
        Method.CERTIFICATE,
        expires_s=certificate.not_valid_after_utc.timestamp(),
        proof=f"{_hash_of_name(certificate.issuer)}:{certificate.serial_number:x}",
    )


def _filled(template: str, certificate: x509.Certificate) -> str:
    # Fields are replaced once, so that a value of the certificate is never used as a template.
    return _FIELD.sub(lambda match: _value(match[1], certificate), template)


def _value(name: str, certificate: x509.Certificate) -> str:
    values: list[object] = []
    if name == "fingerprint":
        return sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
    if name in _SUBJECT:
        values = [attribute.value for attribute in certificate.subject.get_attributes_for_oid(_SUBJECT[name])]
    else:
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            values = list(_ALTERNATIVE[name](names))
        except x509.ExtensionNotFound:
            values = []
    if len(values) != 1:  # with several, the order in the certificate would choose the user
        raise CertificateError(f"it has {'more than one' if values else 'no'} {name}")
    return str(values[0])


def _hash_of_name(name: x509.Name) -> str:
    return sha256(name.public_bytes()).hexdigest()
