"""`peers()` over workers and nodes, in Lua and Python, and the ETID of a uid that reconnects."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.conftest import Served, free_port
from tests.support.applications import application
from tests.support.device import Device
from tests.support.waiting import wait_until
from tests.workers.served import asked

pytestmark = pytest.mark.servers

Serve = Callable[..., Served]
Listed = list[list[object]]
LUA = """<?lsp local found, all = ba.json.encode, {}
for sock, peer in app.smq:peers(request:data "all" == "1") do
   all[#all + 1] = {peer.uid, peer.tid, peer.node or 0, peer.phantom == true, sock and true or false}
end
response:json({worker = mako.worker, peers = all}) ?>"""
PYTHON = """
from smqrt import hub
from smqrt.app import Directory, dir, worker

smq = hub.create(name="python")


def door(request, relpath):
    smq.connect(request)


def peers(request, relpath):
    found = [
        [peer.uid, peer.tid, peer.node, bool(peer.phantom), sock.peername() is not None or not peer.phantom]
        for sock, peer in smq.peers(phantoms="all" in request.query)
    ]
    request.response.json({"worker": worker.number, "peers": found})


for name, function in {"pydoor": door, "pypeers": peers}.items():
    directory = Directory(name)
    directory.setfunc(function)
    dir.insert(directory)
"""
SERVER = "SMQ server client"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An application with a hub in each language."""
    preload = 'smq = require "smq.hub".create {name = "lua"}'
    folder = application(tmp_path / "app", preload, smq="<?lsp app.smq:connect(request) ?>", peers=LUA)
    (folder / ".preload.py").write_text(PYTHON)
    return folder


def _two_free_ports() -> int:
    """The first of two ports that follow one another: the second worker takes the next one."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def listings(served: Served, page: str) -> dict[int, Listed]:
    """What each of two workers lists."""
    found: dict[int, Listed] = {}
    with ExitStack() as opened:  # a worker with fewer connections gets the next one

        def ask() -> bool:
            client = opened.enter_context(closing(HTTPConnection("127.0.0.1", served.port, timeout=10)))
            client.request("GET", page)
            told = json.load(client.getresponse())
            found[told["worker"]] = told["peers"]
            return len(found) == 2

        wait_until(ask, "both workers")
    return found


@pytest.mark.parametrize(
    ("door", "page"), [("/smq.lsp", "/peers.lsp"), ("/pydoor/", "/pypeers/")], ids=["Lua", "Python"]
)
def test_clients_of_all_workers_and_nodes_are_listed(serve: Serve, app: Path, door: str, page: str) -> None:
    ports = [_two_free_ports(), _two_free_ports()]
    nodes = ",".join(f"127.0.0.1:{port + worker}" for port in ports for worker in (0, 1))
    options = ("--workers", "2", "--hosts", "*", "--cluster-password", "of the test", "--cluster-hubs")
    one, other = (
        serve(
            *(app, *options, "--cluster-listen", f"127.0.0.1:{port}"),
            *("--cluster-nodes", nodes, "--cluster-node", number),
        )
        for number, port in ((1, ports[0]), (11, ports[1]))
    )
    devices = {}
    for served in (one, other):
        for number in range(8):
            uid = f"{served.port}-{number}"
            devices[uid] = Device(("127.0.0.1", served.port)).start(target=door).connect(uid.encode())
    everybody = {uid: device.etid for uid, device in devices.items()}

    def is_complete() -> bool:
        """Whether each of the four workers lists everybody once, by the ETID that it has everywhere."""
        return all(
            sorted((uid, etid) for uid, etid, *_ in peers if uid != SERVER) == sorted(everybody.items())
            for served in (one, other)
            for peers in listings(served, f"{page}?all=1").values()
        )

    wait_until(is_complete, "everybody is listed everywhere", 30)
    for served in (one, other):
        own = listings(served, page)
        everywhere = listings(served, f"{page}?all=1")
        assert {uid for peers in own.values() for uid, *_ in peers} - {SERVER} == {
            uid for uid in everybody if uid.startswith(f"{served.port}-")
        }
        for worker, peers in everywhere.items():
            here = {uid for uid, *_ in own[worker]}
            for uid, etid, node, phantom, has_socket in peers:
                assert (phantom, has_socket) == (uid not in here, uid in here)
                assert node == (int(str(etid)) >> 21 if phantom else 0)


def test_a_reconnect_keeps_its_etid_only_at_its_worker(serve: Serve, app: Path) -> None:
    served = serve(app, "--workers", "2", "--hosts", "*")
    seen: dict[bool, tuple[int, int]] = {}
    before: tuple[int, int] | None = None
    connected = []
    for _ in range(60):
        device = Device(("127.0.0.1", served.port)).start(target="/smq.lsp").connect(b"comes back")
        connected.append(device)
        wait_until(lambda: len(_places(served)) == 1)  # the one before has gone
        at = _places(served)[0]
        if before is not None:
            seen[at == before[0]] = before[1], device.etid
        before = at, device.etid
        if len(seen) == 2:
            break
    assert seen[True][0] == seen[True][1]
    assert seen[False][0] != seen[False][1]


def _places(served: Served) -> list[int]:
    items = asked(served, "api/v1/peers?limit=100")["items"]
    return [one["worker"] for one in items if one["uid"] == "comes back"]
