"""Fuzz targets of what a server reads besides the data path: proxies, files of operators, tokens, hot restart."""

from __future__ import annotations

import array
import base64
import contextlib
import hmac
import json
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from smqrt.auth import credentials, identity, users
from smqrt.auth.identity import Action, Identity, name_fault
from smqrt.crypto import tokens
from smqrt.errors import ArgumentError, CryptoError, StartError
from smqrt.http.forwarded import AUTO, FORWARDED, X_FORWARDED, Proxies
from smqrt.http.headers import BadRequest
from smqrt.server.restart import old_process
from smqrt.server.restart.new_process import TakeOver
from smqrt.server.restart.old_process import HandOver
from smqrt.settings.option_types import check
from smqrt.settings.server_settings import AuthSettings
from smqrt.settings.sources import Sources
from smqrt.smq.hub_registry import HubRegistry, hub_registry
from smqrt.transport.admission import TrustedNetworks
from smqrt.transport.listener import inherited
from smqrt.wire import proxy_protocol
from smqrt.workers.worker_rpc import ChannelError, FdChannel
from tests.fuzz.decoders import _pieces

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def outcome(call: Callable[[], T], error: type[E]) -> T | E:
    """What a call gives, or the error of that kind that it raises."""
    try:
        return call()
    except error as raised:
        return raised


# ---- proxies


def proxy_header(data: bytes) -> None:
    """A PROXY header: it is whole at one byte, refused for good from one byte on, or awaited until the last."""
    whole = _header(data)
    for cut in {*range(min(len(data), 130)), *range(130, len(data), len(data) // 32 + 1)}:
        found = _header(data[:cut])
        if isinstance(whole, proxy_protocol.ProxyHeader):
            assert found == (whole if cut >= whole.size_bytes else None), (cut, found, whole)
        else:
            assert found in (None, whole), (cut, found, whole)
            assert whole or not found
    if isinstance(whole, proxy_protocol.ProxyHeader) and whole.client:
        assert whole.client[0] == proxy_protocol.plain(ip_address(whole.client[0]))
        assert 0 <= whole.client[1] < 65536


def _header(data: bytes) -> proxy_protocol.ProxyHeader | bool | None:
    """False when it is refused."""
    try:
        return proxy_protocol.parse(data)
    except proxy_protocol.NoProxyHeader:
        return False


class _Asked:
    """A request as far as proxies look at it; `claims` is what was believed."""

    def __init__(self, headers: list[tuple[str, str]]) -> None:
        self.peer, self.headers = ("10.0.0.1", 5), headers
        self.claims: tuple[Any, ...] = (None, None, None, "")

    def has_any(self, names: frozenset[str]) -> bool:
        return any(name.lower() in names for name, _ in self.headers)

    def apply_claim(self, client: object, secure: object = None, host: object = None, prefix: str = "") -> None:
        self.claims = client, secure, host, prefix


_TRUSTED = TrustedNetworks(["10.0.0.0/8", "fd00::/8"])
_FAMILIES = (AUTO, X_FORWARDED, FORWARDED)


def forwarded(data: bytes) -> None:
    """Fields of proxies: what clients put in front changes nothing, and fields joined to one say the same."""
    family = _FAMILIES[(data[0] if data else 0) % 3]
    lines = data[1:].decode("latin-1").split("\n")
    headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    try:
        said = _said(headers, family)
    except BadRequest:
        return
    client, _, _, prefix = said
    assert prefix == "" or prefix.startswith("/")
    assert client is None or 0 <= client[1] < 65536
    assert _said(_joined(headers), family) == said
    if client is not None and not _TRUSTED.has(client[0]):
        forged = [("X-Forwarded-For", "6.6.6.6")] if family == X_FORWARDED else []
        forged += [("Forwarded", "for=6.6.6.6")] if family == FORWARDED else []
        with contextlib.suppress(BadRequest):  # scheme and host of another hop
            assert _said(forged + headers, family)[0] == client


def _said(headers: list[tuple[str, str]], family: str) -> tuple[Any, ...]:
    request = _Asked(headers)
    Proxies(_TRUSTED, family).apply(request)
    return request.claims


def _joined(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same with fields of one name in one line (RFC 9110 section 5.3)."""
    lines: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        lines[lower] = f"{lines[lower]}, {value}" if lower in lines else value
    return list(lines.items())


# ---- files of operators

_CLIENTS = (
    Identity("ann", ("ops", "dev"), client_id=b"c-1"),
    Identity("", (), client_id=b"a"),
    Identity("bob", (), client_id=b"+"),
)
_NAMES = (b"a", b"a/b", b"", b"$server", b"users/ann", b"a/ops/c-1", b"/", b"x/y/z", b"$x/a")
_FILTERS = ((b"a/#", (b"a", b"a/b", b"a/ops/c-1")), (b"+/b", (b"a/b", b"/b")), (b"#", (b"a", b"x/y/z")))


def access_list(data: bytes) -> None:
    """An access list: the tree decides as reading line after line does; a filter is allowed when all of its are."""
    text = data.decode("utf-8", "replace")
    rules = outcome(lambda: identity.parse(text, "list"), ArgumentError)
    if isinstance(rules, ArgumentError):
        assert re.match(r"list:\d+: ", str(rules))
        return
    for line in rules.lines:
        assert identity.parse("\n" * (line.number - 1) + str(line), "list").lines == (line,)
    names = {*_NAMES, *(line.pattern.replace(b"%u", b"ann").replace(b"+", b"x") for line in rules.lines[:8])}
    for client in _CLIENTS:
        for action in Action:
            for name in names:
                assert rules.decide(client, action, name) == _in_order(rules, client, action, name), (client, name)
            for topic_filter, fitting in _FILTERS:
                if rules.decide_filter(client, action, topic_filter).allowed:
                    assert all(rules.decide(client, action, name).allowed for name in fitting), topic_filter


def _in_order(rules: identity.Acl, client: Identity, action: Action, name: bytes) -> identity.Decision:
    """The first line that fits decides."""
    called = {client.user or "anonymous", "*", *(f"@{group}" for group in client.groups)}
    for line in rules.lines:
        if action in line.actions and not called.isdisjoint(line.who) and _fits(line.pattern, name, client, action):
            return identity.Decision(line.allows, line)
    return identity.Decision(action is Action.CREATE, None)


def _fits(pattern: bytes, name: bytes, client: Identity, action: Action) -> bool:
    wanted, levels = pattern.split(b"/"), name.split(b"/")
    if wanted[0] in (b"+", b"#") and name.startswith(b"$") and action is not Action.ONETOONE:
        return False
    if wanted[-1] == b"#":
        wanted = wanted[:-1]
        levels = levels[: len(wanted)] if len(levels) >= len(wanted) else []
        if not wanted:
            return True
    same = len(wanted) == len(levels)
    return same and all(one == b"+" or _stands_for(one, is_, client) for one, is_ in zip(wanted, levels, strict=True))


def _stands_for(template: bytes, level: bytes, client: Identity) -> bool:
    if b"%" not in template:
        return template == level
    for group in client.groups if b"%g" in template else ("",):
        values = {b"%u": client.user.encode(), b"%c": client.client_id, b"%g": group.encode(), b"%%": b"%"}
        used = [values[one] for one in re.findall(rb"%.", template)]
        is_safe = all(used) and not any(set(b"+#/") & set(value) for value in used)
        if is_safe and b"".join(values.get(one, one) for one in re.split(rb"(%.)", template)) == level:
            return True
    return False


def users_file(data: bytes) -> None:
    """A users file: each user is written as it is read, and one that is changed leaves the others as they are."""
    text = data.decode("utf-8", "replace")
    found = outcome(lambda: users.parse(text, "users"), ArgumentError)
    if isinstance(found, ArgumentError):
        assert re.match(r"users:\d+: ", str(found))
        names = "\n".join(line.partition(":")[0] for line in text.splitlines())
        digests = re.findall(r"\$[A-Za-z0-9+/]{20,}", str(found))
        assert all(digest in names for digest in digests), "an error shows a hash"
        return
    for name, user in found.items():
        assert users.parse(user.line, "users") == {name: user}
    other = users.User("ann", HASH, ("new",))
    assert users.parse(users.with_user(text, other, "ann"), "users") == found | {"ann": other}
    assert users.parse(users.with_user(text, None, "ann"), "users") == {k: v for k, v in found.items() if k != "ann"}


HASH = "$argon2id$v=19$m=65536,t=3,p=4$c29tZXNhbHRzb21lc2FsdA$YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXoxMjM0NTY"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir="/dev/shm")


def settings_file(data: bytes) -> None:
    """A smqrt.toml: settings that keep their rules, or sentences that name the file and a line that is there."""
    path = Path(_folder().name) / "smqrt.toml"
    path.write_bytes(data)
    most = data.count(b"\n") + data.count(b"\r") + 2
    found = outcome(Sources(file=path).read, StartError)
    if isinstance(found, StartError):
        assert str(found).startswith(str(path))
        assert all(int(line) <= most for line in re.findall(rf"^{re.escape(str(path))}, line (\d+)", str(found), re.M))
    else:
        check(found.settings)
        assert all(place.startswith(str(path)) for place in found.places.values())


def settings_environment(data: bytes) -> None:
    """Variables of the environment: settings that keep their rules, or sentences that begin with the variable."""
    text = data.replace(b"\0", b"").decode("utf-8", "surrogateescape")
    variables = dict(line.partition("=")[::2] for line in text.split("\n"))
    found = outcome(Sources(environment=variables).read, StartError)
    if isinstance(found, StartError):
        assert str(found).startswith(tuple(name for name in variables if name.startswith("SMQRT_")))
    else:
        check(found.settings)
        assert set(found.places.values()) <= set(variables)


# ---- tokens

_KEY = ec.derive_private_key(7, ec.SECP256R1())
_SECRET = b"a secret of more than thirty-two bytes"
JWKS = json.dumps({"keys": [json.loads(ECAlgorithm.to_jwk(_KEY.public_key())) | {"kid": "k", "use": "sig"}]}).encode()
CLAIMS = {"sub": "ann", "exp": 10**10, "nbf": 1, "iat": 2, "iss": "us", "aud": ["hub"], "groups": ["ops", "dev"]}
_AUTH = AuthSettings(
    jwt_issuer="us", jwt_audience="hub", jwt_algorithms=("ES256", "HS256"), jwt_secret="s", jwt_groups="groups"
)


@cache
def good_token() -> bytes:
    """A token that lets in; the same in each run, though ECDSA draws at random."""
    return jwt.encode(CLAIMS, _SECRET, "HS256", {"kid": "k"}).encode()


@cache
def _keys() -> credentials.TokenKeys:
    keys = credentials.TokenKeys(_AUTH, lambda *_: b"", lambda: None)
    keys.set_file_keys([*tokens.keys_of_set(JWKS), tokens.shared_key(_SECRET)])
    return keys


def token(data: bytes) -> None:
    """A token, by the first byte: as it came; or with these claims, or this head, and a signature that is right."""
    kind, data = (data[0] if data else 0) % 3, data[1:]
    shown = data if kind == 0 else _signed(b'{"alg":"HS256"}', data) if kind == 1 else _signed(data, _claims())
    try:
        found = credentials.identity_of_token(shown, _keys(), _AUTH)
    except credentials.TokenError:
        return
    assert name_fault(found.user) is None
    assert not any(map(name_fault, found.groups))
    assert kind or shown.rpartition(b".")[0] == good_token().rpartition(b".")[0], "a changed token lets in"


def _claims() -> bytes:
    return json.dumps(CLAIMS).encode()


def _signed(head: bytes, claims: bytes) -> bytes:
    text = b".".join(base64.urlsafe_b64encode(one).rstrip(b"=") for one in (head, claims))
    return text + b"." + base64.urlsafe_b64encode(hmac.digest(_SECRET, text, "sha256")).rstrip(b"=")


def key_set(data: bytes) -> None:
    """A set of keys (JWKS): public keys of allowed kinds, which refuse what another one has signed."""
    try:
        found = tokens.keys_of_set(data)
    except CryptoError:
        return
    for key in found:
        assert set(key.algorithms) <= set(tokens.VERIFIABLE)
        assert not isinstance(key.key, bytes), "a public secret"
        with contextlib.suppress(CryptoError):
            tokens.claims(
                good_token(), key, allowed=key.algorithms, issuer=None, audience=None, leeway_s=0, required=()
            )
            raise AssertionError("a token of another key is good")


# ---- hot restart


class _Socket:
    """The socket of a channel on which these pieces come, with descriptors at the first one."""

    def __init__(self, pieces: Iterator[bytes], fds: list[int]) -> None:
        self._pieces, self._fds = pieces, fds

    def recvmsg(self, *_: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        data = next(self._pieces, b"")
        fds, self._fds = self._fds if data else [], [] if data else self._fds
        numbers = array.array("i", fds).tobytes()
        return data, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if fds else [], 0, None

    def sendmsg(self, parts: list[memoryview], *_: object) -> int:
        return sum(map(len, parts))

    def sendall(self, data: bytes) -> None:
        pass

    def getsockopt(self, *_: int) -> bytes:
        return array.array("i", (os.getpid(), os.geteuid(), 0)).tobytes()

    def close(self) -> None:
        for fd in self._fds:  # the kernel closes those that were not taken
            os.close(fd)


def _channel(pieces: Iterator[bytes], fds: list[int]) -> FdChannel:
    channel = FdChannel(_pair()[0].dup())
    channel._sock.close()
    channel._sock = _Socket(pieces, fds)
    return channel


@cache
def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def restart_messages(data: bytes) -> None:
    """Messages with descriptors: in one piece or in many the same, and every descriptor is closed by somebody."""
    assert _heard(_pieces(data), len(data) % 4) == _heard(iter([data[1:]]), len(data) % 4)


def _heard(pieces: Iterator[bytes], count: int) -> list[object]:
    given = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    channel = _channel(pieces, list(given))
    found: list[object] = []
    try:
        while True:
            message, fds = channel.receive(None)
            found.append((message, len(fds)))
            for fd in fds:
                os.close(fd)
    except ChannelError as error:
        found.append(str(error))
    channel.close()
    assert not any(map(_is_open, given)), "a descriptor is left open"
    return found


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class _Old:
    """A server that is handed over, as far as a greeting goes."""

    http: Any = None
    is_successor = False

    def failed_applications(self) -> list[str]:
        return []

    def stop_pipelines(self) -> None:
        pass

    def start_pipelines(self) -> None:
        pass


def restart_old(data: bytes) -> None:
    """What a new process says first: the old one goes on to hand over, or says in a sentence why not."""
    channel = _channel(_pieces(data), [])
    attempt = HandOver(_Old(), channel, 1.0)
    of_process = old_process.hub_registry
    old_process.hub_registry = HubRegistry()  # hubs that other tests left are no work of this one's
    try:
        with contextlib.suppress(ChannelError):
            known = attempt._negotiate()
            assert attempt.pid > 0
            assert all(isinstance(key, str) for key in known)
    finally:
        old_process.hub_registry = of_process
        channel.close()


def restart_new(data: bytes) -> None:
    """What an old process says first: the new one is ready to take its place, or says in a sentence why not."""
    given = [os.open(os.devnull, os.O_RDONLY) for _ in range(len(data) % 3)]
    channel = _channel(_pieces(data), list(given))
    try:
        with contextlib.suppress(StartError):
            assert TakeOver(channel).pid > 0
    finally:
        channel.close()
        inherited.close()
        hub_registry.names, hub_registry.is_waiting = {}, False
        hub_registry.left()
    assert not any(map(_is_open, given)), "a descriptor is left open"
