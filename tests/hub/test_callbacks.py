"""Callbacks of a hub: their errors in the log, their answers, and former names of arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from smqrt import hub
from smqrt.broker.deferred import Deferred
from smqrt.broker.state import AuthStep
from smqrt.errors import CloseReason
from smqrt.hub import callbacks as module
from smqrt.hub.callbacks import CallbackHooks, Guard, calling_line, renamed, takes
from smqrt.wire import smq as wire
from tests.support import sites
from tests.support.device import RAW, Site, connect_packet, publish
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    "callback", ["authenticate", "permittop", "onconnect", "onpublish", "ondrop", "onmsg", "onclose"]
)
def test_the_log_names_the_callback_and_the_hub(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture, callback: str
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("on purpose")

    site = make_site(**{callback: fails})
    device = site.open(RAW).start().send(connect_packet())
    if callback == "authenticate":
        device.expect_end(wire.connack(6, 0))
    else:
        device.accepted()
        device.send(b"\x04news", publish(4711, device.etid, b"x"), publish(1, device.etid, b"x")).receive()
        device.expect_nothing()
        device.close()
    wait_until(lambda: caplog.records, "the log")
    assert f"error in {callback} of the hub made at {sites.__file__}:" in caplog.text
    assert "ValueError: on purpose" in caplog.text


class Hooked:
    """Hooks with these callbacks, called outside of the loop's greenlet.

    Attributes:
        session: the client of all calls.
    """

    def __init__(self, **callbacks: Callable[..., Any]) -> None:
        self.hooks: Any = CallbackHooks(callbacks, Guard("the hub of the test")).hooks()
        origin = SimpleNamespace(info=None, request=None, arg=None)
        self.session: Any = SimpleNamespace(
            origin=origin, seed=9, uid=b"uid-a1", info=b"", etid=5, identity=None, extra=None, topics=None, outbox=None
        )


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (0, (0, b"")),
        ((0, "ignored"), (0, b"")),
        (4, (4, b"")),
        ((4, "no"), (4, b"no")),
        ((4, b"\xff"), (4, b"\xff")),
        ((4, None), (4, b"")),
        (None, (6, b"")),
        (7, (6, b"")),
        (-1, (6, b"")),
        (True, (6, b"")),
        ("0", (6, b"")),
        ((0,), (6, b"")),
        ((0, 5), (6, b"")),
    ],
)
def test_only_a_code_accepts_a_client(
    answer: object, verdict: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    hooked = Hooked(authenticate=lambda credentials, info: answer)
    assert hooked.hooks.authenticate(b"", hooked.session) == verdict
    is_invalid = verdict[0] == 6 and answer is not None
    assert ("a code from 0 to 6, or a code and a reason, is needed" in caplog.text) is is_invalid


def test_a_refusal_is_an_answer_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def authenticate(credentials: bytes, info: hub.Info) -> int:
        raise hub.Refused(3, "wrong password")

    hooked = Hooked(authenticate=authenticate)
    assert hooked.hooks.authenticate(b"", hooked.session) == (3, b"wrong password")
    assert caplog.messages == []


def test_invalid_answers_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    hooked = Hooked(authenticate=lambda credentials, info: "yes")
    for _ in range(3):
        hooked.hooks.authenticate(b"", hooked.session)
    assert len(caplog.messages) == 1


def test_only_given_callbacks_are_hooks() -> None:
    found = Hooked(onconnect=print).hooks
    assert found.onconnect is not None
    assert found.log is not None
    assert found.authenticate is found.onpublish is found.onnode is None


@pytest.mark.parametrize(
    ("onclose", "has_reason"),
    [
        (lambda etid, sock, peer, err: None, False),
        (lambda etid, sock, peer, err, reason: None, True),
        (lambda etid, sock, peer, err, reason="": None, True),
        (lambda *given: None, True),
        (lambda etid, sock, peer, err, *, reason="": None, False),
        (None, False),
        (print, True),
    ],
)
def test_onclose_gets_the_reason_if_it_takes_it(onclose: Any, has_reason: bool) -> None:
    assert takes(onclose, 5) is has_reason
    if onclose is None or onclose is print:
        return
    told: list[tuple[Any, ...]] = []

    def call(*given: Any) -> None:
        told.append(given)
        onclose(*given)

    hooked = Hooked(onclose=call if has_reason else lambda etid, sock, peer, err: call(etid, sock, peer, err))
    hooked.hooks.onclose(hooked.session, CloseReason.SHUTDOWN)
    ((etid, *_, err),) = [given[:4] for given in told]
    assert (etid, err) == (5, CloseReason.SHUTDOWN.word or 0)
    assert told[0][4:] == ((CloseReason.SHUTDOWN.value,) if has_reason else ())


def test_onmqttgap_gets_the_node_if_it_takes_it() -> None:
    told: list[tuple[Any, ...]] = []
    for given in (lambda *found: told.append(found), lambda one, lost, peer: told.append((one, lost, peer))):
        hook = Hooked(onmqttgap=given).hooks.onmqttgap
        assert hook is not None
        hook("lamp", 3, None, None)
        hook(None, 5, None, 7)
    assert told == [("lamp", 3, None, None), (None, 5, None, 7), ("lamp", 3, None), (None, 5, None)]


def test_onconnect_frees_the_request() -> None:
    infos: list[hub.Info] = []
    hooked = Hooked(onconnect=lambda etid, info, peer: infos.append(info))
    hooked.hooks.onconnect(hooked.session)
    assert infos[0].uid == "uid-a1"
    assert hooked.session.origin is None


def batch(*texts: bytes) -> bytes:
    return b"".join(wire.publish_frame(7, 5, 0, text) for text in texts)


def test_onpublish_decides_over_each_message(caplog: pytest.LogCaptureFixture) -> None:
    def onpublish(data: bytes, ptid: int, tid: int, subtid: int, peer: hub.Peer) -> bool:
        if data == b"fails":
            raise ValueError("on purpose")
        return data != b"no"

    hooked = Hooked(onpublish=onpublish)
    whole = batch(b"yes", b"too")
    assert hooked.hooks.onpublish(whole, 7, 5, hooked.session) is whole, "nothing is copied"
    mixed = batch(b"yes", b"no", b"fails", b"too")
    assert hooked.hooks.onpublish(mixed, 7, 5, hooked.session) == whole
    assert "error in onpublish of the hub of the test" in caplog.text


def test_ondrop_gets_each_message() -> None:
    got: list[bytes] = []
    hooked = Hooked(ondrop=lambda data, ptid, tid, subtid, peer: got.append(data))
    hooked.hooks.ondrop(batch(b"a", b"b"), 7, 5, hooked.session)
    assert got == [b"a", b"b"]


# ---- errors


def test_a_guarded_call_returns_its_result_or_none(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("the hub of the test")
    assert guard.call("f", lambda value: value + 1, 1) == 2
    assert guard.call("f", lambda: 1 / 0) is None
    assert caplog.messages == ["error in f of the hub of the test"]


def test_a_call_of_the_loop_may_block(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = []

    def blocks() -> int:
        gevent.sleep(0)
        return 7

    def fails() -> None:
        gevent.sleep(0)
        raise ValueError("on purpose")

    guard = Guard("the hub of the test")
    for function in (blocks, fails):
        gevent.get_hub().loop.run_callback(lambda function=function: answers.append(guard.call("f", function)))
    wait_until(lambda: len(answers) == 2 and all(isinstance(one, Deferred) and one.done for one in answers))
    assert answers[0].result() == 7
    wait_until(lambda: caplog.messages == ["error in f of the hub of the test"])


# ---- former names


def test_a_former_name_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    @renamed(function="onchange", other="another")
    def observe(topic: str, onchange: int) -> tuple[str, int]:
        return topic, onchange

    old: Any = observe
    assert [old("a", function=1), old(topic="b", function=2), old("c", onchange=3)] == [("a", 1), ("b", 2), ("c", 3)]
    (record,) = caplog.records
    place, _, text = record.message.partition(": ")
    assert place.startswith(__file__ + ":")
    assert text == "the argument 'function' of smq.observe is deprecated: its name is 'onchange' now"


def test_the_calling_line_is_outside_of_the_package() -> None:
    file, _, line = calling_line().rpartition(":")
    assert file == __file__
    assert int(line) > 0
    assert not file.startswith(module._PACKAGE)


@pytest.mark.parametrize(
    ("answer", "step"),
    [
        ("more", AuthStep(0x18, b"more")),
        (b"", AuthStep(0x18, b"")),
        (True, AuthStep(0)),
        ((True, b"\xff"), AuthStep(0, b"\xff")),
        ((True, None, "ada"), AuthStep(0, b"", "ada")),
        (False, AuthStep(0x87)),
        ((False, "why"), AuthStep(0x87, text="why")),
        (None, AuthStep(0x8C, text="the hub does not have this authentication method")),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_answers_of_mqttauth(answer: Any, step: AuthStep, is_late: bool) -> None:
    assert asked(answer, is_late) == step


@pytest.mark.parametrize("answer", [1, (True, 5), (True, b"", 5), (True, b"", "u", 4), (), object()])
def test_invalid_answers_of_mqttauth_reject_the_client(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert asked(answer, False) == AuthStep(0x87)
    assert "mqttauth: " in caplog.text


def asked(answer: Any, is_late: bool) -> Any:
    """What the broker gets for an answer of the application."""
    deferred: Deferred[Any] = Deferred()
    hooks = CallbackHooks({"mqttauth": lambda *_: deferred if is_late else answer}, Guard("a hub")).hooks()
    session: Any = SimpleNamespace(extra=None, uid=b"a", info=b"", etid=0)
    assert hooks.mqttauth is not None
    found = hooks.mqttauth("method", b"", session)
    if not is_late:
        return found
    deferred.resolve(answer)
    return found.result()  # type: ignore[union-attr]
