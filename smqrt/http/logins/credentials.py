"""Credentials of requests: Basic (RFC 7617), Digest (RFC 7616), login forms (spec: bas-api §5)."""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import md5, sha1, sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, ClassVar, Protocol

from smqrt.http.body import URLENCODED, media_type
from smqrt.http.headers import HttpError
from smqrt.http.logins.registry import BASIC, DIGEST, FORM, Logins
from smqrt.http.logins.tickets import State
from smqrt.http.logins.users import Account, as_bytes, ha1_of, proves_clear_text

if TYPE_CHECKING:
    from smqrt.http.message import Request

_MAX_FIELD_BYTES = 4096  # of an Authorization field
_MAX_TEXT = 1024  # characters of a name or a password in a form, because they are hashed and names are stored
_PARAMETER = re.compile(r'\b([A-Za-z]{1,16})[ \t]?=[ \t]?(?:"((?:[^"\\]|\\.)*)"|([^\s,"]{1,512}))')
_ESCAPE = re.compile(r"\\(.)")
_COUNT = re.compile(r"[0-9a-fA-F]{8}")
_REQUIRED = frozenset(("username", "realm", "nonce", "uri", "response", "cnonce", "nc", "qop"))

Hash = Callable[[bytes], str]


def _md5(data: bytes) -> str:
    return md5(data, usedforsecurity=False).hexdigest()


def _sha256(data: bytes) -> str:
    return sha256(data).hexdigest()


ALGORITHMS: dict[str, Hash] = {"SHA-256": _sha256, "MD5": _md5}
"""Algorithms of Digest, in the order in which they are offered."""


class Credentials(Protocol):
    """Credentials that a client sent.

    Attributes:
        kind: "basic", "digest" or "form".
        name: name of the user.
        password: password in clear text, None if it is hashed.
    """

    kind: ClassVar[str]
    name: str
    password: str | None

    def proves(self, account: Account, realm: str) -> bool:
        """Return whether the credentials match the account; takes the same time for every account."""

    def freshness(self, logins: Logins) -> State:
        """Return whether the credentials are new; a value of unknown origin counts as stale."""

    def use(self, logins: Logins) -> bool:
        """Record their use for a login; return whether it is the first use."""

    def can_be_proven(self, account: Account) -> bool:
        """Return whether the client's hash can be compared with the stored secret of the account."""


@dataclass(slots=True)
class ClearText:
    """A name and a password."""

    name: str
    password: str | None
    kind: ClassVar[str] = BASIC

    def proves(self, account: Account, realm: str) -> bool:
        """See `Credentials.proves`."""
        return proves_clear_text(account, self.name, realm, self.password or "")

    def freshness(self, logins: Logins) -> State:
        """See `Credentials.freshness`. A password may be used any number of times."""
        return State.GOOD

    def use(self, logins: Logins) -> bool:
        """See `Credentials.use`."""
        return True

    def can_be_proven(self, account: Account) -> bool:
        """See `Credentials.can_be_proven`."""
        return True


@dataclass(slots=True)
class FormClearText(ClearText):
    """A name and a password from a form."""

    kind: ClassVar[str] = FORM


@dataclass(slots=True)
class FormHash:
    """A name, and the SHA-1 of the secret and a seed, from a form."""

    name: str
    digest: str
    seed: str
    seedkey: str
    password: str | None = None
    kind: ClassVar[str] = FORM

    def proves(self, account: Account, realm: str) -> bool:
        """See `Credentials.proves`. A page may also hash the HA1 if the database has the password."""
        by_password = self._matches(account.password or "") and account.password is not None
        computed = ha1_of(self.name, realm, account.password or "")
        ha1 = account.ha1 or computed
        return self._matches(ha1) and account.secret is not None or by_password

    def _matches(self, secret: str) -> bool:
        return _same_hash(self.digest, sha1(as_bytes(secret + self.seed), usedforsecurity=False).hexdigest())

    def freshness(self, logins: Logins) -> State:
        """See `Credentials.freshness`."""
        return State.GOOD if logins.seeds.is_good(self.seed, self.seedkey) else State.STALE

    def use(self, logins: Logins) -> bool:
        """See `Credentials.use`."""
        return logins.seeds.use(self.seed, self.seedkey)

    def can_be_proven(self, account: Account) -> bool:
        """See `Credentials.can_be_proven`."""
        return True


@dataclass(slots=True)
class Digest:
    """The response to a Digest challenge.

    Attributes:
        fields: parameters by name.
        method: method of the request.
        algorithm: "MD5" or "SHA-256".
        count: number of requests with this nonce, including this one.
    """

    name: str
    fields: dict[str, str]
    method: str
    algorithm: str
    count: int
    password: str | None = None
    kind: ClassVar[str] = DIGEST

    def proves(self, account: Account, realm: str) -> bool:
        """See `Credentials.proves`."""
        fields, hashed = self.fields, ALGORITHMS[self.algorithm]
        by_password = hashed(as_bytes(f"{self.name}:{realm}:{account.password or ''}"))
        ha1 = account.ha1 if account.password is None and account.ha1 is not None else by_password
        ha2 = hashed(as_bytes(f"{self.method}:{fields['uri']}"))
        answer = ":".join((ha1, fields["nonce"], fields["nc"], fields["cnonce"], "auth", ha2))
        return _same_hash(fields["response"], hashed(as_bytes(answer))) and account.secret is not None

    def freshness(self, logins: Logins) -> State:
        """See `Credentials.freshness`."""
        return logins.nonces.state(self.nonce, self.count)

    def use(self, logins: Logins) -> bool:
        """See `Credentials.use`."""
        return logins.nonces.use(self.nonce, self.count)

    def can_be_proven(self, account: Account) -> bool:
        """See `Credentials.can_be_proven`. An HA1 is an MD5 hash."""
        return self.algorithm == "MD5" or account.password is not None or account.ha1 is None

    @property
    def nonce(self) -> str:
        """The nonce of the challenge."""
        return self.fields["nonce"]


def _same_hash(given: str, expected: str) -> bool:
    return compare_digest(as_bytes(given.lower()), expected.encode("ascii"))  # clients may send upper-case digits


def basic_of(request: Request) -> Credentials | None:
    """Return the Basic credentials of a request; None if they are missing or malformed."""
    scheme, _, text = (request.get("authorization") or "").partition(" ")
    if scheme.lower() != "basic" or len(text) > _MAX_FIELD_BYTES:
        return None
    try:
        data = b64decode(text.strip(), validate=True)
    except (Error, ValueError):
        return None
    name, colon, password = _text(data).partition(":")
    return ClearText(name, password) if colon else None


def digest_of(request: Request, realm: str) -> Digest | None:
    """Return the Digest credentials of a request.

    Return None if they are missing, malformed, or for another URL, realm or algorithm.
    """
    scheme, _, text = (request.get("authorization") or "").partition(" ")
    if scheme.lower() != "digest" or len(text) > _MAX_FIELD_BYTES:
        return None
    text = text if text.isascii() else _text(text.encode("latin-1"))
    fields = _plain_parameters(text)
    if not fields:
        # Commas and escapes in values, spaces around "=", names in capitals. Malformed parts are skipped: if such a
        # part matters, the response does not match.
        found = _PARAMETER.findall(text)
        fields = {name.lower(): _ESCAPE.sub(r"\1", quoted or token) for name, quoted, token in found}
        if len(fields) != len(found):
            return None  # a duplicate name
    if not _REQUIRED.issubset(fields):
        return None
    algorithm = fields.get("algorithm", "MD5").upper()
    is_ours = fields["realm"] == realm and fields["qop"] == "auth" and algorithm in ALGORITHMS
    count = fields["nc"]
    uri = fields["uri"]
    is_target = uri == request.target or uri.partition("://")[2] == f"{request.host}{request.target}"
    if not is_ours or not _COUNT.fullmatch(count) or not is_target:
        return None
    return Digest(fields["username"], fields, request.method, algorithm, int(count, 16))


def _plain_parameters(text: str) -> dict[str, str] | None:
    """Parse the simple form `name=value, name="value"` of nearly all clients; None for any other form."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if '"' in value:
            if value.count('"') != 2 or value[0] != '"' or value[-1] != '"' or "\\" in value:
                return None
            value = value[1:-1]
        if name in fields:
            return {}
        fields[name] = value
    return fields if _REQUIRED.issubset(fields) else None


def _text(data: bytes) -> str:
    """Decode a name or a password: UTF-8, or Latin-1 of old clients."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def form_of(request: Request, accepts_clear_text: bool = True) -> Credentials | None:
    """Return the credentials of a login form: a POST with `ba_username` to any URL; None for other requests.

    Args:
        request: the request.
        accepts_clear_text: whether a password in clear text is accepted; otherwise it counts as wrong.

    Raises:
        HttpError: the body cannot be read, or the name or the password is too long.
    """
    if request.method != "POST" or media_type(request) != URLENCODED or not request.has_body:
        return None
    fields: dict[bytes, str] = {}
    for field, value in request.raw_params():
        fields.setdefault(field, value.decode("utf-8", "surrogateescape"))
    name, password = fields.get(b"ba_username"), fields.get(b"ba_password", "")
    if name is None:
        return None
    if len(name) > _MAX_TEXT or len(password) > _MAX_TEXT:
        raise HttpError(413, f"The name or the password has more than {_MAX_TEXT} characters.")
    seed, seedkey = fields.get(b"ba_seed"), fields.get(b"ba_seedkey")
    if seed and seedkey and re.fullmatch(r"[0-9a-fA-F]{40}", password):
        return FormHash(name, password, seed, seedkey)
    return FormClearText(name, password) if accepts_clear_text else FormHash(name, "", "", "")  # matches no secret
