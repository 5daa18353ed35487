"""Authentication by a method of MQTT 5: AUTH packets at CONNECT, and again while the client is connected."""

from __future__ import annotations

from typing import Any

import pytest

from smqrt.auth.identity import Identity
from smqrt.broker.deferred import Deferred
from smqrt.broker.sessions import SessionState
from smqrt.broker.state import AuthStep, Hooks
from smqrt.errors import CloseReason
from tests.broker.mqtt.memory_devices import DeviceHub, MemoryDevice
from tests.conformance.mqtt_script import data_of

LIMITS = "21 00 14 27 00 10 00 00 22 00 0a"
CONNECT = "10: M V 02 00 00 { 15 'X' 16 'one' } 'a'"


def ask(data: bytes) -> AuthStep:
    return AuthStep(0x18, data)


STEPS = {b"one": ask(b"two?"), b"two": AuthStep(0, b"done"), b"no": AuthStep(0x87, text="no"), b"": AuthStep(0)}


class Method:
    """A hook that knows the answers; they come later if `is_late`."""

    def __init__(self, is_late: bool = False) -> None:
        self.is_late = is_late
        self.asked: list[tuple[str, bytes]] = []
        self.late: list[tuple[Deferred[Any], AuthStep | None]] = []
        self.steps: dict[bytes, AuthStep] = dict(STEPS)

    def __call__(self, method: str, data: bytes, session: Any) -> Any:
        self.asked.append((method, data))
        step = self.steps.get(data)
        if not self.is_late:
            return step
        self.late.append((Deferred(), step))
        return self.late[-1][0]

    def answer(self) -> None:
        for deferred, step in self.late:
            deferred.resolve(step)
        self.late.clear()


def fed(device: MemoryDevice, method: Method, script: str) -> bytes:
    """What the client gets after it has sent packets."""
    device._splitter.feed(data_of(script, 5))
    while not device.session.closed and (packet := device._splitter.next()) is not None:
        device._splitter.only = 0
        waits = device.session.packet(*packet)
        assert waits is (method.is_late and bool(method.late))
        method.answer()
    return device.take()


def hub_with(method: Any, **hooks: Any) -> DeviceHub:
    return DeviceHub(Hooks(mqttauth=method, **hooks))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_client_that_has_to_answer(is_late: bool) -> None:
    """CONNACK has the method, and the data that come with success."""
    method = Method(is_late)
    device = hub_with(method).device()
    assert fed(device, method, CONNECT) == data_of("f0: 18 { 15 'X' 16 'two?' }", 5)
    assert device.session.state is SessionState.WAITING, "the deadline of the handshake applies"
    connack = f"20: 00 00 {{ {LIMITS} 15 'X' 16 'done' }}"
    assert fed(device, method, "f0: 18 { 15 'X' 16 'two' }") == data_of(connack, 5)
    assert method.asked == [("X", b"one"), ("X", b"two")]
    assert device.session.state is SessionState.CONNECTED


def test_success_at_once_and_without_data() -> None:
    method = Method()
    device = hub_with(method).device()
    assert fed(device, method, "10: M V 02 00 00 { 15 'X' } 'a'") == data_of(f"20: 00 00 {{ {LIMITS} 15 'X' }}", 5)
    assert method.asked == [("X", b"")]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("data", ["no", "unknown"])
def test_a_rejected_client(data: str, is_late: bool) -> None:
    """The hook rejects it, or has failed."""
    method = Method(is_late)
    device = hub_with(method).device()
    got = fed(device, method, f"{CONNECT} / f0: 18 {{ 15 'X' 16 '{data}' }}")
    connack = {"no": "20: 00 87 { 1f 'no' }", "unknown": "20: 00 87 P"}[data]
    assert got == data_of(f"f0: 18 {{ 15 'X' 16 'two?' }} / {connack}", 5)
    assert device.session.closed


@pytest.mark.parametrize(
    "packet",
    [
        "f0: 18 { 15 'Y' 16 'two' }",  # another method
        "f0: 19 { 15 'X' 16 'two' }",
        "f0: 00 { 15 'X' 16 'two' }",
        "f0:",
        "f0: 18 P",
        "c0:",
        "30: 't' P ~x",
        "10: M V 02 00 00 P 'a'",
    ],
)
def test_wrong_packets_before_connack(packet: str) -> None:
    device = hub_with(Method()).device()
    device.feed(data_of(CONNECT, 5))
    device.take()
    device.feed(data_of(packet, 5))
    assert device.take()[:4][2:] == b"\0\x82"
    assert device.session.closed


def test_disconnect_before_connack() -> None:
    left: list[Any] = []
    hub = hub_with(Method(), onvanish=left.append)
    device = hub.device()
    device.feed(data_of(f"{CONNECT} / e0:", 5))
    assert device.take() == data_of("f0: 18 { 15 'X' 16 'two?' }", 5)
    assert left == [device.session], "the hook has got this client, so the binding forgets it"
    assert hub.broker.stats.ends[CloseReason.CLIENT_DISCONNECT] == 1


def test_a_late_answer_of_the_client() -> None:
    device = hub_with(Method()).device()
    device.feed(data_of(CONNECT, 5))
    device.take()
    device.session.connect_timed_out()
    assert device.take() == data_of("20: 00 88 P", 5)


def test_without_the_hook() -> None:
    device = DeviceHub().device()
    device.feed(data_of(CONNECT, 5))
    assert device.take()[2:4] == b"\0\x8c"


def test_a_client_that_takes_only_small_packets() -> None:
    method = Method()
    method.steps[b"one"] = ask(bytes(200))
    device = hub_with(method).device()
    device.feed(data_of("10: M V 02 00 00 { 15 'X' 16 'one' 27 00 00 00 64 } 'a'", 5))
    assert device.take()[2:4] == b"\0\x95"


# ---- who the client is


def test_name_and_password_are_checked_too() -> None:
    """Without a user from the hook, the server's logins and `authenticate` decide as for other clients."""
    asked: list[bytes] = []

    def authenticate(credentials: bytes, session: Any) -> tuple[int, bytes]:
        asked.append(credentials)
        return (0 if credentials == b"ada:right" else 4), b""

    hub = hub_with(Method(), authenticate=authenticate)
    for password, code in (("right", b"\0\0"), ("wrong", b"\0\x87")):
        device = hub.device()
        device.feed(data_of(f"10: M V c2 00 00 {{ 15 'X' }} 'a' 'ada' '{password}'", 5))
        assert device.take()[2:4] == code
    assert asked == [b"ada:right", b"ada:wrong"]


@pytest.mark.parametrize("has_users", [False, True])
def test_the_hook_names_the_user(has_users: bool) -> None:
    """On a hub with users, it has to be one of them: otherwise no access control list would apply."""
    method = Method()
    method.steps |= {b"one": AuthStep(0, b"", "ada"), b"": AuthStep(0, b"", "eve")}
    known = {"ada": Identity("ada", ("staff",))}
    hooks: dict[str, Any] = {"authenticate": lambda *arguments: (3, b"")}
    if has_users:
        hooks["identify"] = lambda user, session: known.get(user)
    hub = hub_with(method, **hooks)
    device, other = hub.device(), hub.device()
    device.feed(data_of(CONNECT, 5))
    assert device.take()[2:4] == b"\0\0"
    identity = device.session.identity
    assert identity is not None
    assert (identity.user, identity.groups) == ("ada", ("staff",) if has_users else ())
    other.feed(data_of("10: M V 02 00 00 { 15 'X' } 'b'", 5))
    assert other.take()[2:4] == (b"\0\x87" if has_users else b"\0\0")


# ---- re-authentication


@pytest.fixture
def connected() -> tuple[MemoryDevice, Method, DeviceHub]:
    method = Method()
    hub = hub_with(method)
    device = hub.device()
    device.feed(data_of("10: M V 02 00 00 { 15 'X' } 'a'", 5))
    assert device.take()[2:4] == b"\0\0"
    return device, method, hub


Connected = tuple[MemoryDevice, Method, DeviceHub]


def test_re_authentication(connected: Connected) -> None:
    """Other packets may come meanwhile; a second time works too."""
    device, method, hub = connected
    for _ in range(2):
        got = fed(device, method, "f0: 19 { 15 'X' 16 'one' } / c0:")
        assert got == data_of("f0: 18 { 15 'X' 16 'two?' } / d0:", 5)
        assert fed(device, method, "f0: 18 { 15 'X' 16 'two' }") == data_of("f0: 00 { 15 'X' 16 'done' }", 5)
    hub.at(100)
    assert not device.session.closed, "the deadline was met"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_failed_re_authentication(connected: Connected, is_late: bool) -> None:
    device, method, hub = connected
    method.is_late = is_late
    assert fed(device, method, "f0: 19 { 15 'X' 16 'no' }") == data_of("e0: 87 { 1f 'no' }", 5)
    assert hub.broker.stats.ends[CloseReason.LOGIN_ENDED] == 1


def test_re_authentication_as_another_user(connected: Connected) -> None:
    device, method, _ = connected
    method.steps[b"one"] = AuthStep(0, b"", "eve")
    assert fed(device, method, "f0: 19 { 15 'X' 16 'one' }")[::2][:2] == b"\xe0\x87"


def test_a_re_authentication_has_a_deadline(connected: Connected) -> None:
    device, method, hub = connected
    fed(device, method, "f0: 19 { 15 'X' 16 'one' }")
    hub.at(3.9)
    assert not device.session.closed
    hub.at(4.0)
    assert device.session.closed
    assert device.take()[2:3] == b"\x87"


def test_many_re_authentications_share_a_timer(connected: Connected) -> None:
    device, method, hub = connected
    before = len(hub.later)
    for at in range(20):
        hub.at(at * 0.1)
        fed(device, method, "f0: 19 { 15 'X' 16 'one' }")
        if at < 19:
            fed(device, method, "f0: 18 { 15 'X' 16 'two' }")
    assert len(hub.later) == before + 1
    hub.at(4.0)
    assert not device.session.closed, "the last one has begun at 1.9"
    hub.at(5.9)
    assert device.session.closed


@pytest.mark.parametrize(
    "packet",
    [
        "f0: 18 { 15 'X' 16 'two' }",
        "f0: 19 { 15 'Y' }",
        "f0: 00 { 15 'X' }",
        "f0: 19 { 15 'X' 16 'one' } / f0: 19 { 15 'X' }",
    ],
)
def test_wrong_packets_of_a_connected_client(connected: Connected, packet: str) -> None:
    device, _, hub = connected
    device.feed(data_of(packet, 5))
    assert b"\x82" in device.take()[-80:]
    assert hub.broker.stats.ends[CloseReason.MQTT_PROTOCOL] == 1


def test_a_client_without_a_method_sends_auth() -> None:
    device = hub_with(Method()).device()
    device.feed(data_of("C a / f0: 19 { 15 'X' }", 5))
    assert b"\xe0" in device.take()
    assert device.session.closed
