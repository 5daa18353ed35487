"""Credentials of a request: what a client gives to prove its user, by Basic (RFC 7617), Digest (RFC 7616) or a login
form (spec: bas-api §5)."""

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

_MAX_FIELD_BYTES = 4096  # of Authorization
_MAX_TEXT = 1024  # characters of a name or a password in a form: it is hashed, and a name is kept
_PARAMETER = re.compile(r'\b([A-Za-z]{1,16})[ \t]?=[ \t]?(?:"((?:[^"\\]|\\.)*)"|([^\s,"]{1,512}))')
_ESCAPE = re.compile(r"\\(.)")
_COUNT = re.compile(r"[0-9a-fA-F]{8}")
_WANTED = frozenset(("username", "realm", "nonce", "uri", "response", "cnonce", "nc", "qop"))

Hash = Callable[[bytes], str]


def _md5(data: bytes) -> str:
    return md5(data, usedforsecurity=False).hexdigest()


def _sha256(data: bytes) -> str:
    return sha256(data).hexdigest()


ALGORITHMS: dict[str, Hash] = {"SHA-256": _sha256, "MD5": _md5}
"""Of Digest, in the order in which they are offered."""


class Credentials(Protocol):
    """What a client gave.

    Attributes:
        kind: "basic", "digest" or "form".
        name: of the user.
        password: in clear text, None when it is hashed.
    """

    kind: ClassVar[str]
    name: str
    password: str | None

    def proves(self, account: Account, realm: str) -> bool:
        """Return whether this is a user with that account; takes the same time for every account."""

    def freshness(self, logins: Logins) -> State:
        """Return whether they are used for the first time, as far as one can tell."""

    def use(self, logins: Logins) -> bool:
        """Note that they were used for a login; return whether it was the first time."""

    def can_be_proven(self, account: Account) -> bool:
        """Return whether what the database stores is of the kind that the client's hash can be compared with."""


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
        """See `Credentials.freshness`: a password is good any number of times."""
        return State.GOOD

    def use(self, logins: Logins) -> bool:
        """See `Credentials.use`."""
        return True

    def can_be_proven(self, account: Account) -> bool:
        """See `Credentials.can_be_proven`."""
        return True


@dataclass(slots=True)
class FormClearText(ClearText):
    """The same from a form."""

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
        """See `Credentials.proves`. A page may hash the HA1 also where the database has the password."""
        by_password = self._is_of(account.password or "") and account.password is not None
        computed = ha1_of(self.name, realm, account.password or "")
        ha1 = account.ha1 or computed
        return self._is_of(ha1) and account.secret is not None or by_password

    def _is_of(self, secret: str) -> bool:
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
    """The answer to a challenge of Digest.

    Attributes:
        fields: the parameters by name.
        method: of the request.
        algorithm: "MD5" or "SHA-256".
        count: how often the client has used its nonce, with this request.
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
        """See `Credentials.can_be_proven`: an HA1 is of MD5."""
        return self.algorithm == "MD5" or account.password is not None or account.ha1 is None

    @property
    def nonce(self) -> str:
        """The nonce they were made with."""
        return self.fields["nonce"]


def _same_hash(given: str, expected: str) -> bool:
    return compare_digest(as_bytes(given.lower()), expected.encode("ascii"))


def basic_of(request: Request) -> Credentials | None:
    """Return the credentials of Basic in a request; None when there are none, or they are malformed."""
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
    """Return the credentials of Digest in a request; None when there are none, they are malformed, or for another URL,
    realm or algorithm."""
    scheme, _, text = (request.get("authorization") or "").partition(" ")
    if scheme.lower() != "digest" or len(text) > _MAX_FIELD_BYTES:
        return None
    text = text if text.isascii() else _text(text.encode("latin-1"))
    fields = _plain_parameters(text) or _parameters(text)
    if not _WANTED.issubset(fields):
        return None
    algorithm = fields.get("algorithm", "MD5").upper()
    is_ours = fields["realm"] == realm and fields["qop"] == "auth" and algorithm in ALGORITHMS
    count = fields["nc"]
    if not is_ours or not _COUNT.fullmatch(count) or not _is_target(fields["uri"], request):
        return None
    return Digest(fields["username"], fields, request.method, algorithm, int(count, 16))


def _is_target(uri: str, request: Request) -> bool:
    return uri == request.target or uri.partition("://")[2] == f"{request.host}{request.target}"


def _plain_parameters(text: str) -> dict[str, str] | None:
    """Read `name=value, name="value"` as nearly all clients write it; None when there is more to it."""
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
    return fields if _WANTED.issubset(fields) else None


def _parameters(text: str) -> dict[str, str]:
    """The same with commas and escapes in values, spaces around "=", and names in capitals; nothing when a name comes
    twice. What is neither is passed over: if it was meant for something, the answer is not proven."""
    found = _PARAMETER.findall(text)
    fields = {name.lower(): _ESCAPE.sub(r"\1", quoted or token) for name, quoted, token in found}
    return fields if len(fields) == len(found) else {}


def _text(data: bytes) -> str:
    """Names and passwords are UTF-8, of old clients Latin-1."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def form_of(request: Request, takes_clear_text: bool = True) -> Credentials | None:
    """Return what a login form sent: a POST with `ba_username`, to whatever URL; None when the request is none.

    Args:
        takes_clear_text: whether the password may come as it is; otherwise it is as good as wrong.

    Raises:
        HttpError: the body can't be read, or the name or the password is too long.
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
        raise HttpError(413, f"a name or a password of more than {_MAX_TEXT} characters")
    seed, seedkey = fields.get(b"ba_seed"), fields.get(b"ba_seedkey")
    if seed and seedkey and re.fullmatch(r"[0-9a-fA-F]{40}", password):
        return FormHash(name, password, seed, seedkey)
    return FormClearText(name, password) if takes_clear_text else FormHash(name, "", "", "")
