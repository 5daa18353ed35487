"""Nodes of the last release and of this one in one cluster: what each sends the other, both ways."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import gevent
import pytest
import requests

from smqrt.cli.admin import AdminClient, AdminError
from smqrt.client import SmqClient
from smqrt.wire import smq
from smqrt.wire.smq import Type
from tests.cluster.commands import SOON, smqrt_cluster, status
from tests.cluster.nats.server import NatsServer
from tests.conftest import Served, free_port
from tests.server.restart.hot import HotServed, application
from tests.support import last_release
from tests.support.device import Device, publish
from tests.support.factory import Factory
from tests.support.last_release import Release, release
from tests.support.pki import Authority
from tests.support.waiting import wait_until

__all__ = ["release"]

pytestmark = pytest.mark.servers

PRELOAD = """
smq = require "smq.hub".create {
   name = "main", cluster = "chat", lastvalue = "state/#", observe = "cluster", budget = 65536, slow = "wait",
   MORE
}
smq:subscribe("ask", {onmsg = function(data, ptid) smq:publish("NAME:" .. data, ptid) end})
watching, data, nodes = 0, {}, {}
smq:observe("watched", function(count) watching = count end)
jobs = require "smq.mtl".server():open("jobs",
   function(node, up) nodes[tostring(node)] = up and true or nil end,
   function(text) data[#data + 1] = text end)
"""
SEEN = """<?lsp
local peers = {}
for _, peer in app.smq:peers(true) do
   if peer.uid ~= "SMQ server client" then peers[#peers + 1] = {peer.uid, peer.tid, peer.phantom == true} end
end
response:json {peers = peers, watching = app.watching, data = app.data, nodes = app.nodes}
?>"""
SEND = "<?lsp response:json {sent = app.jobs:send(request:data 'text')} ?>"
WAYS = ("the old one dials over TLS", "the new one dials over TLS", "through NATS")


class Pair(NamedTuple):
    """A node of each version, by `old` and `new`."""

    old: HotServed
    new: HotServed

    def both_ways(self) -> list[tuple[HotServed, HotServed]]:
        return [(self.old, self.new), (self.new, self.old)]


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest, release: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as ending:
        words = how_to_meet(request.param, folder, ending)
        start = ending.enter_context(Factory(HotServed, HotServed.end))
        apps = {name: make_app(folder / name, name) for name in ("old", "new")}
        old = start(apps["old"], *words["old"], cwd=release.folder, env=release.environment)
        new = start(apps["new"], *words["new"])
        wait_until(lambda: all(is_joined(one) for one in (old, new)), lambda: old.output + new.output)
        yield Pair(old, new)
        for one in (old, new):
            assert "Traceback" not in one.output, one.output
            assert len(row(one)["links"]) == 1
            assert row(one)["links_lost"] == 0, "the link that was made first has held"
            assert not any(row(one)["hubs"][0]["lost"].values())


def make_app(folder: Path, name: str, more: str = "") -> Path:
    preload = PRELOAD.replace("NAME", name).replace("MORE", more.replace("PATH", str(folder)))
    return application(folder / "app", preload, seen=SEEN, send=SEND)


def how_to_meet(way: str, folder: Path, ending: ExitStack) -> dict[str, list[object]]:
    """The options of each."""
    common: list[object] = ["--cluster-password", "of the test", "--cluster-ping-s", "0.2"]
    if way == "through NATS":
        server = NatsServer(folder)
        ending.callback(server.stop)
        return dict.fromkeys(("old", "new"), [*common, "--cluster-nodes", server.url])
    authority, address = Authority(folder), f"127.0.0.1:{free_port()}"
    dials = "old" if "old one" in way else "new"
    words = {}
    for name in ("old", "new"):
        cert, key = authority.pair(name)
        tls = ["--cluster-ca", authority.path, "--cluster-cert", cert, "--cluster-key", key]
        words[name] = [*common, *tls, "--cluster-nodes" if name == dials else "--cluster-listen", address]
    return words


def row(served: Served) -> Any:
    (found,) = requests.get(served.admin_url + "/api/v1/clusters", timeout=10).json()
    return found


def is_joined(served: Served, others: int = 1) -> bool:
    """Whether its hub knows all that the others have said."""
    (hub,) = row(served)["hubs"]
    return len(hub["nodes"]) == others and not hub["joining"]


def seen(served: Served) -> Any:
    return requests.get(served.url + "/seen.lsp", timeout=10).json()


def messages(device: Device) -> list[bytes]:
    """The payloads that have come so far."""
    return [packet[13:] for packet in device.sync() if packet[0] == Type.PUBLISH]


def flood(device: Device, tid: int, count: int) -> None:
    """Publish numbered messages of a kilobyte."""
    begin, rest = publish(tid, device.etid, b""), bytes(1000)
    for at in range(0, count, 100):
        frames = [smq.frame(b"%b%08d%b" % (begin, number, rest)) for number in range(at, at + 100)]
        device.send_bytes(b"".join(frames))
        gevent.sleep(0)  # whoever reads has its turn


def until_wanted(device: Device, tid: int, *subscribers: Device) -> None:
    """Publish until the nodes of all subscribers have told of their interest, and all have got the last message."""
    got: dict[Device, list[bytes]] = {one: [] for one in subscribers}
    tried = [b""]

    def all_have_some() -> bool:
        tried.append(b"try %d" % len(tried))
        device.publish(tid, tried[-1]).sync()
        for one in subscribers:
            got[one] += messages(one)
        return all(got.values())

    wait_until(all_have_some, "interest")
    for one in subscribers:
        while got[one][-1] != tried[-1]:
            got[one].append(one.receive()[13:])


def test_messages_of_all_kinds_arrive_once_and_in_order(pair: Pair) -> None:
    for here, there in pair.both_ways():
        publisher, reader = here.device(b"publisher"), there.device(b"reader")
        name = b"news of %d" % here.port
        topic = reader.subscribe(name)
        assert publisher.create(name) == topic, "a name has one number everywhere"
        sub = publisher.createsub(b"sport")
        assert reader.createsub(b"sport") == sub
        until_wanted(publisher, topic, reader)
        for number in range(200):
            publisher.publish(topic, b"%d" % number, sub * (number % 2))
            if number % 10 == 0:
                publisher.publish(reader.etid, b"to you %d" % number)
        due = []
        for number in range(200):
            due.append(publish(topic, publisher.etid, b"%d" % number, sub * (number % 2)))
            if number % 10 == 0:
                due.append(publish(reader.etid, publisher.etid, b"to you %d" % number))
        reader.expect(*due)
        reader.publish(publisher.etid, b"back")
        publisher.expect(publish(publisher.etid, reader.etid, b"back"))
        big = bytes(range(256)) * 240
        publisher.publish(topic, big)
        reader.expect(publish(topic, publisher.etid, big))
        reader.send(bytes((Type.UNSUBSCRIBE,)) + topic.to_bytes(4, "big")).expect_nothing()
        publisher.publish(topic, b"nobody wants it").publish(reader.etid, b"the last")
        reader.expect(publish(reader.etid, publisher.etid, b"the last"))
        for one in (publisher, reader):
            one.expect_nothing()
            one.close()


def test_servers_of_both_versions_are_asked_and_answer(pair: Pair) -> None:
    for here, _ in pair.both_ways():
        asking = here.device(b"asking")
        topic = asking.create(b"ask")
        asking.publish(topic, b"who")
        answers = [asking.receive() for _ in range(2)]
        assert {packet[13:] for packet in answers} == {b"old:who", b"new:who"}
        servers = {packet[13:16]: int.from_bytes(packet[5:9], "big") for packet in answers}
        assert len(set(servers.values())) == 2, "each by the ETID that it has at this node"
        asking.close()


def test_last_values_are_those_of_the_newest_message(pair: Pair) -> None:
    for here, there in pair.both_ways():
        name = b"state/%d" % here.port
        publishers = [one.device(b"publisher-%d" % one.port) for one in (here, there)]
        topic = publishers[0].create(name)
        assert publishers[1].create(name) == topic
        for at, value in ((0, b"first"), (1, b"second"), (0, b"third"), (1, b""), (0, b"fourth"), (0, b"")):
            publishers[at].publish(topic, value).sync()
            for one in (here, there):
                due = [value] * bool(value)
                wait_until(lambda one=one, name=name, due=due: given(one, name) == due, value)
        for one in publishers:
            one.close()


def given(served: HotServed, name: bytes) -> list[bytes]:
    """What a new subscriber gets."""
    late = served.device(b"newcomer")
    late.subscribe(name)
    got = messages(late)
    late.close()
    return got


def test_clients_of_the_other_node_are_listed_and_observed(pair: Pair) -> None:
    for here, there in pair.both_ways():
        observer, goes = here.device(b"observer"), there.device(b"leaver")
        due = [["leaver", goes.etid, True], ["observer", observer.etid, False]]
        wait_until(lambda here=here, due=due: sorted(seen(here)["peers"]) == due, [due, seen(here)])
        observer.send(bytes((Type.OBSERVE,)) + goes.etid.to_bytes(4, "big"))
        observer.expect_nothing()
        goes.close()
        observer.expect(bytes((Type.CHANGE,)) + goes.etid.to_bytes(4, "big") + bytes(4))
        again = there.device(b"observer")  # a take-over
        assert observer.until_end()[-1][0] == Type.DISCONNECT
        assert again.etid != observer.etid
        for one in (observer, again):
            one.close()
        wait_until(lambda here=here: not seen(here)["peers"])


def test_subscribers_of_both_nodes_are_counted(pair: Pair) -> None:
    devices = [one.device(b"watcher-%d-%d" % (one.port, number)) for one in pair for number in range(3)]
    for due, device in enumerate(devices, 1):
        device.subscribe(b"watched")
        wait_until(lambda due=due: [seen(one)["watching"] for one in pair] == [due, due], due)
    for device in devices:
        device.close()
    wait_until(lambda: [seen(one)["watching"] for one in pair] == [0, 0])


def test_channels_of_applications_are_joined(pair: Pair) -> None:
    wait_until(lambda: all(len(seen(one)["nodes"]) == 1 for one in pair))
    for here, there in pair.both_ways():
        before = list(seen(there)["data"])
        for number in range(20):
            assert requests.get(f"{here.url}/send.lsp?text={number}", timeout=10).json() == {"sent": 1}
        due = before + [str(number) for number in range(20)]
        wait_until(lambda there=there, due=due: seen(there)["data"] == due, due)


def test_the_state_of_the_cluster_is_correct(pair: Pair) -> None:
    for here, there in pair.both_ways():
        (link,) = row(here)["links"]
        assert link["node"] == row(there)["node"]
        shown = status(here)
        assert (shown.returncode, shown.stderr) == (0, ""), "the command is of this version, the server of either"


def test_commands_unknown_to_older_servers_are_reported(pair: Pair) -> None:
    client = AdminClient(pair.old.admin_url)
    with pytest.raises(AdminError, match="runs an older release without new. Upgrade it first"):
        client.post("new", on=True)
    with pytest.raises(AdminError, match="runs an older release without new. Upgrade it first"):
        client.get("new")


def test_publishers_ignore_slow_clients_of_other_versions(pair: Pair) -> None:
    """That is what the older one does not know. What comes meanwhile is kept beyond the budget, and nobody is lost."""
    count = 10_000
    for here, there in pair.both_ways():
        publisher, lazy, reader = here.device(b"publisher"), there.device(b"lazy-1"), here.device(b"reader")
        lazy.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 200_000)
        topic = reader.subscribe(b"flood")
        assert lazy.subscribe(b"flood") == topic
        until_wanted(publisher, topic, lazy, reader)
        reading = gevent.spawn(lambda reader=reader: [reader.receive() for _ in range(count)])
        flood(publisher, topic, count)
        assert [int(packet[13:21]) for packet in reading.get(timeout=60)] == list(range(count))
        wait_until(lambda there=there: looked(there, "lazy-1")["queued_bytes"] > 1 << 20)
        assert [int(lazy.receive()[13:21]) for _ in range(count)] == list(range(count))
        assert looked(there, "lazy-1")["dropped"] == 0
        for one in (publisher, lazy, reader):
            one.close()


def looked(served: Served, uid: str) -> Any:
    """What an operator sees of a client."""
    answer = requests.get(served.admin_url + "/api/v1/peers", params={"limit": 100}, timeout=10)
    (found,) = [one for one in answer.json()["items"] if one["uid"] == uid]
    return found


def test_without_history_the_tree_replaces_the_last_release(tmp_path: Path) -> None:
    last_release.unpack(tmp_path, "0" * 40)
    with pytest.warns(UserWarning, match="this tree without what is new on links stands for the last release"):
        found = last_release.found(tmp_path)
    for file, _, without in last_release.LEFT_OUT:
        assert without in (found.folder / "smqrt" / file).read_text()


def test_three_nodes_are_upgraded_and_one_goes_back(release: Release, tmp_path: Path) -> None:
    """Each client comes back to its node, and hears those of all others, whatever runs there."""
    ports = [(free_port(), f"127.0.0.1:{free_port()}") for _ in range(3)]
    words = ["--cluster-password", "s", "--cluster-nodes", ",".join(address for _, address in ports)]
    apps = [make_app(tmp_path / f"node{at}", f"node{at}", "persist = 'PATH/names.db'") for at in range(3)]
    with ExitStack() as ending:
        start = ending.enter_context(Factory(HotServed, HotServed.end))
        old = {"cwd": release.folder, "env": release.environment}

        def begin(at: int, is_old: bool) -> HotServed:
            own = [apps[at], "--port", ports[at][0], "--cluster-listen", ports[at][1], *words]
            found: HotServed = start(*own, **(old if is_old else {}))
            return found

        nodes = [begin(at, True) for at in range(3)]
        everybody = [Listener(node, ending) for node in nodes]
        all_are_joined(nodes)
        all_hear(everybody, "all are old")
        everybody[1].client.publish("kept", "state/a")
        everybody[1].client.publish("at first", "state/b")
        for node in nodes:
            wait_until(lambda node=node: given(node, b"state/b") == [b"at first"])
        for at, is_old in ((0, False), (1, False), (2, False), (1, True)):
            if is_old:  # what runs there is new, and knows how to drain
                drained = smqrt_cluster(nodes[at], "drain", str(row(nodes[at])["node"]))
                assert (drained.returncode, drained.stderr) == (0, "")
            assert nodes[at].stop() == 0
            for other in nodes[:at] + nodes[at + 1 :]:
                wait_until(lambda other=other, at=at: misses(other, ports[at][1]), other.lines)
            shown = status(nodes[at - 1])
            assert (shown.returncode, f"no link to {ports[at][1]}" in shown.stderr) == (1, True), shown
            newest = f"while node {at} is away".encode()
            everybody[at - 1].client.publish(newest, "state/b")
            wait_until(lambda at=at, newest=newest: given(nodes[at - 2], b"state/b") == [newest])
            nodes[at] = begin(at, is_old)
            all_are_joined(nodes)
            all_hear(everybody, f"node {at} is {'old' if is_old else 'new'}")
            for node in nodes:
                assert given(node, b"state/a") == [b"kept"]
                if not (is_old and node is nodes[at]):  # which goes on with what its file has
                    assert given(node, b"state/b") == [newest]


class Listener:
    """A client that comes back to its node whenever that is there.

    Attributes:
        heard: what it got of `news`.
    """

    def __init__(self, served: Served, ending: ExitStack) -> None:
        self.heard: list[bytes] = []
        self.client = ending.enter_context(SmqClient(served.url + "/smq.lsp", uid=f"of {served.port}", **SOON))
        self.client.subscribe("news", onmsg=lambda data, *_: self.heard.append(data))

    def heard_of(self, begin: bytes) -> list[bytes]:
        return [one for one in self.heard if one.startswith(begin)]


def all_hear(everybody: list[Listener], text: str) -> None:
    """Let each publish a hundred messages, and check that all get all of them, in order, and once."""
    numbers = range(len(everybody))
    marks = [b"%d is back: %b" % (number, text.encode()) for number in numbers]

    def know_each_other() -> bool:
        for one, mark in zip(everybody, marks, strict=True):
            one.client.publish(mark, "news")
        return all(one.heard_of(mark) for one in everybody for mark in marks)

    wait_until(know_each_other, [one.heard[-9:] for one in everybody])
    due = [[b"%d %b %d" % (number, text.encode(), count) for count in range(100)] for number in numbers]
    for one, data in zip(everybody, due, strict=True):
        for each in data:
            one.client.publish(each, "news")
    for one in everybody:
        for number in numbers:
            begin = b"%d %b " % (number, text.encode())
            wait_until(lambda one=one, begin=begin: len(one.heard_of(begin)) >= 100, begin)
            assert one.heard_of(begin) == due[number]


def all_are_joined(nodes: list[HotServed]) -> None:
    """Wait for what the manual says is to be waited for."""
    for node in nodes:
        wait_until(lambda node=node: is_joined(node, len(nodes) - 1), node.lines)
        wait_until(
            lambda node=node: not any(one["state"] == "not linked" for one in row(node)["addresses"]), node.lines
        )
    shown = status(nodes[0])
    assert (shown.returncode, "no link" in shown.stderr) == (0, False), shown


def misses(served: Served, address: str) -> bool:
    """Whether it says that it has no link to a node of its list."""
    return any(one["address"] == address and one["state"] == "not linked" for one in row(served)["addresses"])
