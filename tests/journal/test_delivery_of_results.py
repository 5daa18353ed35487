"""Results of pipelines reach every subscriber, as what the server itself publishes does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gevent
import pytest

from smqrt.broker import outbox
from smqrt.broker.outbox import Drop
from smqrt.broker.routes import Trace
from smqrt.journal import commit as commits
from smqrt.journal import writer
from smqrt.journal.files import HubAddress
from smqrt.journal.reader import Journal
from smqrt.journal.record import Flag
from smqrt.journal.settings import parse
from smqrt.journal.writer import JournalWriter
from smqrt.wire import smq as wire
from tests.cluster.engines import TcpEngine, pair
from tests.conftest import Served
from tests.smq.slow import stalled
from tests.support.applications import application
from tests.support.device import RAW, WS, Device, Site
from tests.support.waiting import wait_until

MakeSite = Callable[..., Site]


@pytest.fixture
def results(make_site: MakeSite, tmp_path: Path) -> Iterator[MakeSite]:
    """A factory of sites with a journal."""
    yield lambda **options: make_site(journal={"path": str(tmp_path / "journal")}, **options)
    writer.close_all()


def commit(site: Site, batch: int, *payloads: bytes, topic: bytes = b"out", subtopic: bytes | None = None) -> None:
    assert site.smq.journal.commit("q", batch, [(topic, subtopic, payload) for payload in payloads])


def payloads(device: Device) -> list[bytes]:
    """The payloads of what a client has got so far."""
    return [wire.unpack_publish(wire.frame(one))[3] for one in device.sync() if one[0] == wire.Type.PUBLISH]


def test_all_subscribers_get_them_whenever_they_come(results: MakeSite) -> None:
    site = results()
    first = site.device(b"first-one")
    first.subscribe(b"out")
    commit(site, 0, b"0")
    late = [site.device(b"late-%d" % number, kind) for number, kind in enumerate([RAW, WS, "tls", "wss"])]
    for one in late:
        one.subscribe(b"out")
    commit(site, 1, b"1a", b"1b")
    assert [payloads(one) for one in (first, *late)] == [[b"0", b"1a", b"1b"]] + [[b"1a", b"1b"]] * 4
    first.disconnect()
    commit(site, 2, b"2")
    assert [payloads(one) for one in late] == [[b"2"]] * 4
    for one in late[1:]:
        one.disconnect()
    commit(site, 3, b"3")
    assert payloads(late[0]) == [b"3"]


def test_rows_of_no_batch_reach_all_too(results: MakeSite) -> None:
    site = results()
    devices = [site.device(b"device-%d" % number, kind) for number, kind in enumerate([RAW, WS, RAW])]
    for one in devices:
        one.subscribe(b"out")
    site.smq.journal.publish([(b"out", b"below", b"x")])
    assert [payloads(one) for one in devices] == [[b"x"]] * 3


def test_a_subscriber_with_a_handler_of_the_server(results: MakeSite) -> None:
    site, got = results(), []
    site.smq.subscribe("out", lambda data, ptid, *_: got.append((data, ptid)))
    commit(site, 0, b"a", b"b")
    wait_until(lambda: len(got) == 2)
    assert got == [(b"a", 1), (b"b", 1)]


def test_they_are_last_values(results: MakeSite) -> None:
    site = results(lastvalue="out")
    commit(site, 0, b"old", b"new")
    device = site.device(b"device")
    device.subscribe(b"out")
    assert payloads(device) == [b"new"]


def test_ondrop_is_asked_and_drops_are_counted(results: MakeSite) -> None:
    dropped: list[tuple[bytes, int]] = []
    site = results(ondrop=lambda data, ptid, *_: dropped.append((data, ptid)))
    commit(site, 0, b"a", b"b")
    assert dropped == [(b"a", 1), (b"b", 1)]
    assert site.smq.drops()["unrouted"] == 2


def test_a_subscriber_that_ondrop_makes_gets_the_next_result(results: MakeSite) -> None:
    got: list[bytes] = []

    def subscribe(*_: object) -> None:
        site.smq.subscribe("out", lambda data, *_: got.append(data))

    site = results(ondrop=subscribe)
    commit(site, 0, b"a", b"b", b"c")
    wait_until(lambda: len(got) == 2)
    assert got == [b"b", b"c"]


def test_traces_and_counters_see_them(results: MakeSite) -> None:
    site = results()
    for number in range(3):
        site.device(b"device-%d" % number).subscribe(b"out")
    trace = Trace(site.state, None, b"out", lambda: None)
    trace.start()
    commit(site, 0, b"seen")
    trace.stop()
    (event,) = [one for one in trace.take() if one["event"] == "publish"]
    assert (event["payload"], event["subscribers"]) == ("seen", 3)
    topic = site.state.topic_table.by_name[b"out"]
    topic.count()
    assert (site.state.topic_table.traffic.messages, site.state.topic_table.traffic.copies) == (1, 3)


def test_a_result_without_a_subscriber_is_marked(results: MakeSite, tmp_path: Path) -> None:
    site = results()
    site.device(b"device").subscribe(b"heard")
    site.smq.journal.commit("q", 0, [(b"heard", None, b""), (b"out", None, b"")])
    journal = Journal(tmp_path / "journal")
    flags = {row.topic: Flag(row.flags) for row in journal.rows({}, journal.end())}
    assert (Flag.UNROUTED in flags["heard"], Flag.UNROUTED in flags["out"]) == (False, True)


def test_a_commit_waits_for_subscribers_with_policy_wait(results: MakeSite) -> None:
    site = results(slow="wait", budget=20_000)
    slow_one, quick = stalled(site, b"slow-one", topic=b"out"), site.device(b"quick-one")
    quick.subscribe(b"out")
    sent = [b"%06d" % number + bytes(694) for number in range(2000)]
    reading = gevent.spawn(lambda: [quick.receive()[13:19] for _ in range(2001)])
    committing = [gevent.spawn(commit, site, 0, *sent)]  # all of it may go out in one turn of the loop
    pressure = site.state.slow.pressure
    wait_until(lambda: pressure.topics, "publishers have to wait")
    sent.append(b"the next")
    committing.append(gevent.spawn(commit, site, 1, sent[-1]))
    gevent.sleep(0.05)
    assert not committing[1].ready()
    assert [slow_one.receive()[13:19] for _ in sent] == [payload[:6] for payload in sent]
    gevent.joinall(committing, raise_error=True)
    assert reading.get() == [payload[:6] for payload in sent]
    assert site.state.stats.drops[Drop.OVER_BUDGET] == 0


def test_a_commit_that_waits_is_not_overtaken(results: MakeSite) -> None:
    """Its pipeline may have given up on it, heard that it is stored already, and gone on with the next batch."""
    site = results(slow="wait")
    device = site.device(b"device")
    device.subscribe(b"out")
    session = site.state.uids[b"device"]
    pressure, topic = site.state.slow.pressure, site.state.topic_table.by_name[b"out"]
    pressure.add_local(session.outbox, topic.key)
    first = gevent.spawn(commit, site, 0, b"0")
    gevent.sleep(0.02)
    assert not site.smq.journal.commit("q", 0, [(b"out", None, b"0")]), "it is stored"
    others = [gevent.spawn(commit, site, batch, b"%d" % batch) for batch in range(1, 6)]
    others.append(gevent.spawn(site.smq.journal.publish, [(b"out", None, b"6")]))
    gevent.sleep(0.02)
    pressure.release(session.outbox)
    gevent.joinall([first, *others], raise_error=True)
    assert payloads(device) == [b"%d" % number for number in range(7)]


def test_a_subscriber_that_comes_while_a_commit_waits_gets_the_rest(results: MakeSite) -> None:
    site = results(slow="wait")
    device, late = site.device(b"device"), site.device(b"late-one")
    device.subscribe(b"out")
    device.subscribe(b"slow")
    session, pressure = site.state.uids[b"device"], site.state.slow.pressure
    pressure.add_local(session.outbox, site.state.topic_table.by_name[b"slow"].key)
    rows = [(topic, None, b"%d" % number) for number, topic in enumerate([b"out", b"slow", b"out"])]
    committing = gevent.spawn(site.smq.journal.commit, "q", 0, rows)
    wait_until(lambda: payloads(device) == [b"0"], "the first message")
    late.subscribe(b"out")
    pressure.release(session.outbox)
    committing.get()
    assert (payloads(device), payloads(late)) == ([b"1", b"2"], [b"2"])


def test_a_commit_does_not_wait_for_ever(results: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BEHIND_S", 0.2)
    site = results(slow="wait")
    site.device(b"device").subscribe(b"out")
    topic = site.state.topic_table.by_name[b"out"]
    session = site.state.uids[b"device"]
    site.state.slow.pressure.add_local(session.outbox, topic.key)
    commit(site, 0, b"a")
    assert outbox.Slow.WAIT is site.state.slow.of(topic.key)
    site.state.slow.pressure.release(session.outbox)


def test_subscribers_of_other_nodes_get_them(tmp_path: Path) -> None:
    engine = TcpEngine(tmp_path)
    try:
        one, other = pair(engine)
        clients = [place.client() for place in (one, other, other)]
        for client in clients[:2]:
            client.subscribe(b"out")
        engine.until(lambda: one.wanted_by(b"out"), "the other node's interest")
        settings = parse({"path": str(tmp_path / "journal"), "name": "n"}, tmp_path)
        assert settings
        journal: Any = JournalWriter(replace(settings), one.hub)
        journal.commit("q", 0, [(b"out", None, b"a")])
        engine.until(lambda: clients[1].data, "the first result arrives")
        clients[2].subscribe(b"out")
        clients[0].unsubscribe(b"out")
        journal.commit("q", 1, [(b"out", None, b"b")])
        engine.until(lambda: clients[2].data, "the second result arrives")
        assert [client.data for client in clients] == [[b"a"], [b"a", b"b"], [b"b"]]
        journal.close()
        rows = Journal(tmp_path / "journal")
        flags = [Flag(row.flags) for row in rows.rows({}, rows.end())]
        assert not any(Flag.UNROUTED in one for one in flags)
    finally:
        engine.close()


@pytest.mark.servers
def test_subscribers_of_other_workers_get_them(serve: Callable[..., Served], tmp_path: Path) -> None:
    preload = (
        f'smq = require "smq.hub".create{{name = "main", journal = {{path = "{tmp_path}/journal", name = "main"}}}}'
    )
    app = application(tmp_path / "app", preload, smq="<?lsp app.smq:connect(request) ?>")
    served = serve(app, "--workers", "2", "--hosts", "*")
    devices = []
    for number in range(6):
        device = Device(("127.0.0.1", served.port), [RAW, WS][number % 2]).start(target="/smq.lsp")
        devices.append(device.connect(b"device-%d" % number))
        devices[-1].subscribe(b"out")
    wait_until((tmp_path / "journal/token").exists, served.lines)
    token = (tmp_path / "journal/token").read_text().strip()
    address = HubAddress.of(f"{served.url}/rtl/journal/main", token)
    for batch in range(10):
        gevent.get_hub().threadpool.apply(commits.commit, (address, "q", batch, [(b"out", None, b"%d" % batch)]))
    expected = [b"%d" % batch for batch in range(10)]
    for device in devices:
        got: list[bytes] = []
        wait_until(lambda got=got, device=device: got.extend(payloads(device)) or got == expected, got)
