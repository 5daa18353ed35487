"""Clients of a hub that needs users: who comes in, and what they may do there, over every transport."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

import gevent
import pytest

from smqrt.auth.identity import Action, Method
from smqrt.auth.service import IdentityService, LoginFailure, LoginRejected, PresentedCredentials
from smqrt.auth.users import new_hash
from smqrt.errors import CloseReason
from smqrt.server.mqtt import take_mqtt
from smqrt.smq.close_log import closes
from smqrt.wire import smq as wire
from smqrt.wire.smq import Type
from tests.auth.conftest import USERS, Guarded, user_line
from tests.conformance.mqtt_script import data_of
from tests.support.device import KINDS, RAW, RAW_HEADERS, WS, Device, connect_packet, publish
from tests.support.sites import patience
from tests.support.waiting import wait_until

__all__ = ["patience"]

ANN, BOB, EVE = b"ann:secret", b"bob:hunter2", b"eve:evil"
ACL = """\
allow @operators *               #
allow bob        read            news
allow bob        write,observe   desk/%u/+
allow *          onetoone        $server
allow bob        onetoone        bob
"""


def observe(tid: int) -> bytes:
    return bytes((Type.OBSERVE,)) + tid.to_bytes(4, "big")


def refused(device: Device, credentials: bytes, uid: bytes = b"device") -> tuple[int, bytes]:
    """Code and text of a Connack that refuses."""
    device.start().send(connect_packet(uid, credentials))
    packet = device.until_end()[0]
    assert packet[0] == Type.CONNACK
    assert packet[2:6] == b"\0\0\0\0"
    return packet[1], packet[6:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_comes_in_and_others_do_not(guard: Callable[..., Guarded], kind: str) -> None:
    guarded = guard(ACL)
    site = guarded.site
    ann = site.open(kind).start().connect(b"panel-1", credentials=ANN)
    identity = next(iter(site.state.clients())).identity
    assert (identity.user, identity.groups, identity.method) == ("ann", ("operators",), Method.PASSWORD)
    assert (identity.client_id, identity.address) == (b"panel-1", "127.0.0.1")
    for wrong in (b"ann:wrong", b"nobody:secret", b"ann", b":", b"\xff:\xff"):
        assert refused(site.open(kind), wrong) == (3, b"wrong user name or password")
    assert refused(site.open(kind), b"") == (3, b"no user name and password, and no token")
    ann.subscribe(b"anything")


@pytest.mark.parametrize("kind", KINDS)
def test_rules_hold_for_everything_a_client_can_do(guard: Callable[..., Guarded], kind: str) -> None:
    site = guard(ACL).site
    ann = site.open(kind).start().connect(b"ann-one", credentials=ANN)
    bob = site.open(kind).start().connect(b"bob-one", credentials=BOB)
    news, desk, other = ann.create(b"news"), ann.create(b"desk/bob/1"), ann.create(b"other")

    assert bob.subscribe(b"news") == news
    assert bob.ask(Type.SUBSCRIBE, b"other").denied
    assert bob.ask(Type.CREATE, b"news").denied  # which one needs to publish to it
    assert bob.create(b"desk/bob/1") == desk
    assert bob.ask(Type.CREATE, b"desk/ann/1").denied
    assert b"desk/ann/1" not in site.state.topic_table.by_name

    ann.subscribe(b"desk/bob/1")
    ann.subscribe(b"other")
    before = site.smq.drops()["denied"]
    bob.send(*[publish(tid, bob.etid, b"1") for tid in (other, desk, news)])
    bob.publish(ann.etid, b"direct").publish(bob.etid, b"to myself")
    assert bob.receive()[13:] == b"to myself"
    assert ann.receive()[1:5] == desk.to_bytes(4, "big")
    ann.expect_nothing()
    assert site.smq.drops()["denied"] == before + 3

    bob.send(observe(desk)).expect(wire.change(desk, 1))
    bob.send(observe(other)).expect(wire.change(other, 0))
    bob.send(observe(ann.etid)).expect(wire.change(ann.etid, 0))


def test_a_fragmented_message_does_not_bypass_the_limit(guard: Callable[..., Guarded]) -> None:
    site = guard(ACL).site
    ann = site.open().start().connect(b"ann-one", credentials=ANN)
    bob = site.open().start().connect(b"bob-one", credentials=BOB)
    tid = ann.subscribe(b"other")
    bob.send(publish(0, bob.etid, b"a", kind=Type.PUBFRAG), publish(tid, bob.etid, b"b", kind=Type.PUBFRAG)).sync()
    ann.expect_nothing()
    assert site.smq.drops()["denied"] == 1


def test_the_application_is_asked_after_the_rules(guard: Callable[..., Guarded]) -> None:
    asked: list[Any] = []

    def authenticate(credentials: bytes, info: Any) -> int:
        asked.append(info["uid"])
        return 0 if info["uid"] != "unwanted" else 6

    def permittop(topic: str, issub: bool, peer: Any) -> bool:
        asked.append(topic)
        return topic != "private"

    site = guard(ACL, authenticate=authenticate, permittop=permittop).site
    assert refused(site.open(), b"ann:wrong", b"wanted")[0] == 3
    assert refused(site.open(), ANN, b"unwanted")[0] == 6
    bob = site.open().start().connect(b"wanted", credentials=BOB)
    assert bob.ask(Type.SUBSCRIBE, b"other").denied
    ann = site.open().start().connect(b"second", credentials=ANN)
    assert ann.ask(Type.SUBSCRIBE, b"private").denied
    ann.subscribe(b"open")
    assert asked == ["unwanted", "wanted", "second", "private", "open"]


def test_a_hub_may_do_without(guard: Callable[..., Guarded]) -> None:
    site = guard(ACL, hub_auth=False).site
    device = site.device(b"device", credentials=b"whatever")
    device.subscribe(b"other")
    assert next(iter(site.state.clients())).identity is None


def test_basic_in_the_request_is_a_login_too(guard: Callable[..., Guarded]) -> None:
    site = guard(ACL).site
    header = f"Authorization: Basic {b64encode(ANN).decode()}\r\n"
    site.open().start(RAW_HEADERS + header).connect(b"one-one").subscribe(b"x")
    wrong = site.open().start(RAW_HEADERS + "Authorization: Basic %%%\r\n").send(connect_packet(b"two-two"))
    assert wrong.until_end()[0][1] == 3


def test_anonymous_clients_have_rules_of_their_own(guard: Callable[..., Guarded]) -> None:
    site = guard("allow anonymous read hall\nallow ann,bob * #", auth={"anonymous": True}).site
    nobody = site.device(b"nobody")
    nobody.subscribe(b"hall")
    assert nobody.ask(Type.SUBSCRIBE, b"attic").denied
    assert refused(site.open(), b"ann:wrong")[0] == 3  # who says a name has to prove it


def test_an_id_is_its_users(guard: Callable[..., Guarded]) -> None:
    """Who comes with the uid of another user's client would get its ETID, and what is sent there."""
    site = guard(ACL).site
    ann = site.open().start().connect(b"panel-1", credentials=ANN)
    assert refused(site.open(), EVE, b"panel-1") == (6, b"another user's client has this id")
    ann.expect_nothing()
    again = site.open().start().connect(b"panel-1", credentials=ANN)
    assert again.etid == ann.etid


REFUSALS: dict[str, tuple[dict[str, Any], bytes, bytes, str, str]] = {
    "a wrong password": ({}, b"ann:wrong", b"panel-2", "bad credentials: wrong user name or password", "auth.users"),
    "another user's id": ({}, EVE, b"panel-1", "another user's client has this id", ""),
    "too many": ({}, ANN, b"panel-2", "too many connections of this user", "limits.connections_per_user"),
    "the application": ({"authenticate": lambda *_: (6, "no")}, BOB, b"panel-2", "access denied: no", ""),
    "the words of the server by the application": (
        {"authenticate": lambda *_: (2, "too many connections of this user")},
        BOB,
        b"panel-2",
        "server unavailable: too many connections of this user",
        "",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_the_setting_that_changes_it(
    guard: Callable[..., Guarded], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """That of the server's login only when the login was refused."""
    options, credentials, uid, detail, setting = REFUSALS[name]
    site = guard(ACL, **options).site
    if not options:
        site.open().start().connect(b"panel-1", credentials=ANN)
        site.state.limits = replace(site.state.limits, connections_per_user=1)
    refused(site.open(), credentials, uid)
    closed = next(closes.newest_first())
    assert (closed.reason, closed.detail, closed.setting) == (CloseReason.REFUSED, detail, setting)
    line = next(message for message in reversed(caplog.messages) if message.startswith("closed: "))
    assert line.endswith(f": refused ({detail})" + (f"; see {setting}" if setting else ""))


def test_changes_reach_those_inside(guard: Callable[..., Guarded]) -> None:
    reasons: list[str] = []
    guarded = guard(ACL, onclose=lambda etid, sock, peer, err, reason: reasons.append(reason))
    site = guarded.site
    ann = site.open().start().connect(b"ann-one", credentials=ANN)
    bob = site.open(WS).start().connect(b"bob-one", credentials=BOB)
    news = ann.create(b"news")
    desk = bob.create(b"desk/bob/1")
    bob.subscribe(b"news")
    bob.send(observe(desk)).expect(wire.change(desk, 0))
    ann.subscribe(b"desk/bob/1")
    bob.expect(wire.change(desk, 1)).publish(desk, b"1")
    assert ann.receive()[13:] == b"1"

    assert guarded.change(acl="allow ann * #\nallow bob read other") is None
    bob.expect(wire.ack(Type.SUBACK, 0, b"news"), wire.change(desk, 0))
    bob.publish(desk, b"2").expect_nothing()
    ann.publish(news, b"x").expect_nothing()  # neither got it
    bob.expect_nothing()
    assert (bob.subscribe(b"other"), bob.ask(Type.SUBSCRIBE, b"news").denied)[1]

    guarded.change(acl=ACL)
    bob.publish(desk, b"3").sync()
    assert ann.receive()[13:] == b"3"
    assert bob.subscribe(b"news") == news

    guarded.change(users=USERS.replace(user_line("bob", "hunter2"), user_line("bob", "changed")))
    bob_end = bob.until_end()
    assert bob_end[0] == wire.disconnect(b"the password was changed")
    guarded.change(users=user_line("bob", "hunter2"))
    ann.expect_end(wire.disconnect(b"the user was removed"))
    wait_until(lambda: len(reasons) == 2, "both are gone")
    assert reasons == [CloseReason.LOGIN_ENDED.value] * 2


def test_groups_change_for_those_inside(guard: Callable[..., Guarded]) -> None:
    guarded = guard(ACL)
    ann = guarded.site.open().start().connect(b"ann-one", credentials=ANN)
    ann.subscribe(b"anything")
    guarded.change(users=user_line("ann", "secret", "guests"))
    ann.expect(wire.ack(Type.SUBACK, 0, b"anything"))


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("acl", "allow * raed x", "acl.txt:1: 'raed' is not an action. Did you mean read?"),
        ("users", "ann:secret", "users.txt:1: the hash of ann is not an argon2id hash; `smqrt passwd` creates one"),
        ("users", USERS + USERS, "users.txt:4: the user ann occurs twice"),
        ("users", "a+b:x", "users.txt:1: the user name must not have + # or /"),
        ("users", "ann", "users.txt:1: a line is 'name:hash'"),
    ],
)
def test_broken_files_change_nothing(guard: Callable[..., Guarded], file: str, text: str, fault: str) -> None:
    guarded = guard(ACL)
    ann = guarded.site.open().start().connect(b"ann-one", credentials=ANN)
    ann.subscribe(b"x")
    assert fault in (guarded.change(**{file: text}) or "")
    ann.expect_nothing()
    ann.publish(ann.create(b"x"), b"1")
    assert ann.receive()[13:] == b"1"
    guarded.site.open().start().connect(b"bob-one", credentials=BOB)


def test_an_emptied_list_denies_everything(guard: Callable[..., Guarded]) -> None:
    guarded = guard(ACL)
    ann = guarded.site.open().start().connect(b"ann-one", credentials=ANN)
    ann.subscribe(b"x")
    guarded.change(acl="")
    ann.expect(wire.ack(Type.SUBACK, 0, b"x"))
    assert ann.ask(Type.SUBSCRIBE, b"x").denied


def test_denials_are_counted_and_logged_with_the_line(
    guard: Callable[..., Guarded], caplog: pytest.LogCaptureFixture
) -> None:
    guarded = guard("deny bob read sec*\nallow * * #".replace("sec*", "secret/#"))
    bob = guarded.site.open().start().connect(b"bob-one", credentials=BOB)
    for _ in range(50):
        assert bob.ask(Type.SUBSCRIBE, b"secret/plan\x1b[2J").denied
    lines = [record.getMessage() for record in caplog.records if "bob" in record.getMessage()]
    assert len(lines) == 1
    assert "refused: bob (client id 'bob-one') from 127.0.0.1: read 'secret/plan\\x1b[2J'" in lines[0]
    assert f"{guarded.acl}:1 denies it; see the setting auth.acl" in lines[0]
    assert guarded.service.rights is not None
    assert guarded.service.rights.denied[Action.READ] == 50


def test_many_clients_are_looked_at_in_portions(guard: Callable[..., Guarded]) -> None:
    """Nobody waits for long while ten thousand subscriptions are looked at."""
    guarded = guard("allow bob read a/#\nallow ann * #")
    bob = guarded.site.open().start().connect(b"bob-one", credentials=BOB)
    ann = guarded.site.open().start().connect(b"ann-one", credentials=ANN)
    bob.send(*[b"\x04a/%d" % i for i in range(2000)]).sync()
    guarded.change(acl="allow ann * #")
    for _ in range(20):
        with gevent.Timeout(1):
            ann.sync()
    left = lambda: sum(len(one.topic_ids) for one in guarded.site.state.clients())  # noqa: E731
    wait_until(lambda: not left(), "no subscription is left")
    bob.sync()


def test_wrong_logins_are_slowed_down(guard: Callable[..., Guarded]) -> None:
    site = guard(ACL).site
    answers = [refused(site.open(RAW), b"ann:wrong%d" % i)[0] for i in range(12)]
    assert answers == [3] * 10 + [2] * 2
    assert refused(site.open(WS), b"ann:more") == (2, b"too many failed logins; try again later")
    site.open().start().connect(b"bob-one", credentials=BOB)  # others are not held up


def test_a_thousand_wrong_logins_delay_no_others(
    guard: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a name is known can't be told by the time, and who is inside notices nothing."""
    guarded = guard(users=USERS.replace(user_line("eve", "evil"), f"slow:{new_hash(b'slow', 2048)}\n"))
    monkeypatch.setattr(guarded.service.throttle, "take", lambda address, name: True)
    guarded.service._passwords.set_typical(new_hash(b"x", 2048))
    ann = guarded.site.open().start().connect(b"ann-one", credentials=ANN)
    took_s: dict[str, list[float]] = {"slow": [], "nobody": []}
    for at in range(40):
        for name, times in took_s.items():
            began_s = monotonic()
            with pytest.raises(LoginRejected):
                guarded.service.login(PresentedCredentials("192.0.2.1", name=name, password=b"wrong%d" % at))
            times.append(monotonic() - began_s)
    known_s, unknown_s = (sorted(times)[len(times) // 2] for times in took_s.values())
    assert 0.5 < known_s / unknown_s < 2

    crowd = [
        gevent.spawn(
            refusal_of, guarded.service, PresentedCredentials(f"192.0.2.{at % 250}", name=f"n{at}", password=b"wrong")
        )
        for at in range(1000)
    ]
    waits_s = []
    while not all(one.ready() for one in crowd):
        began_s = monotonic()
        ann.sync()
        waits_s.append(monotonic() - began_s)
    assert sorted(waits_s)[len(waits_s) // 2] < 0.1
    outcomes = {one.get() for one in crowd}
    assert outcomes == {LoginFailure.WRONG, LoginFailure.BUSY}
    assert guarded.service._passwords.waiting == 0


def refusal_of(service: IdentityService, shown: PresentedCredentials) -> LoginFailure:
    with pytest.raises(LoginRejected) as caught:
        service.login(shown)
    return caught.value.reason


def test_an_authentication_method_names_a_user_of_the_server(guard: Callable[..., Guarded]) -> None:
    """The access control list applies to this user; a name that is no user's is rejected."""
    guarded = guard(ACL, mqtt=True, mqttauth=lambda method, data, peer: (True, b"", data.decode()))
    guarded.site.server.take_mqtt = take_mqtt
    for name, code in (("bob", 0), ("nobody", 0x87)):
        device = guarded.site.open(RAW)
        device.send_bytes(data_of(f"10: M V 02 00 00 {{ 15 'X' 16 '{name}' }} 'a'", 5))
        while len(device.stream.data) < 4:
            assert device.more()
        assert device.stream.data[3] == code
        if not code:
            identity = next(iter(guarded.site.state.clients())).identity
            assert (identity.user, identity.method, identity.address) == ("bob", Method.PASSWORD, "127.0.0.1")
            assert identity.may(b"desk/bob/1", Action.WRITE)
            assert not identity.may(b"desk/ann/1", Action.WRITE)
        device.close()
