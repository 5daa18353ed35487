"""`shutdown` of all clients: it reaches every worker, except while its application ends (spec: smq §6a)."""

from __future__ import annotations

import select
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import gevent
import pytest

from smqrt.wire import smq as wire
from tests.conftest import Served, free_port
from tests.support.applications import application
from tests.support.device import Device
from tests.support.waiting import wait_until
from tests.workers.served import asked

pytestmark = pytest.mark.servers

Serve = Callable[..., Served]
QUIET_S = 0.5
DOORS = list(enumerate(("/smq.lsp", "/py")))
LUA = """
smq = require "smq.hub".create {name = "lua"}
function onunload()
   smq:shutdown "unloading"
   ba.sleep(300) -- what goes to other nodes has gone
end
"""
PYTHON = """
import gevent
from smqrt import hub
from smqrt.app import dir

smq = hub.create(name="python")


def page(request, relpath):
    if relpath == "py":
        smq.connect(request)
    elif relpath == "pyall":
        smq.shutdown("all")
    elif relpath == "pylocal":
        smq.shutdown("here", everywhere=False)
    elif relpath == "pycount":
        request.response.write(str(len(list(smq.peers(phantoms=True)))))
    else:
        return False
    return True


def onunload():
    smq.shutdown("unloading")
    gevent.sleep(0.3)


dir.setfunc(page)
"""
PAGES = {
    "smq": "<?lsp app.smq:connect(request) ?>",
    "all": "<?lsp app.smq:shutdown('all') ?>",
    "count": "<?lsp local n = 0 for _ in app.smq:peers(true) do n = n + 1 end response:write(n) ?>",
    "local": "<?lsp app.smq:shutdown('here', nil, false) ?>",
}


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An application with a hub in each language."""
    folder = application(tmp_path / "app", LUA, **PAGES)
    (folder / ".preload.py").write_text(PYTHON)
    return folder


def clients(served: Served, door: str) -> dict[Device, int]:
    """Eight clients at least, with the workers they are at; some at each of two."""
    devices: dict[str, Device] = {}
    found: dict[Device, int] = {}

    def are_at_both() -> bool:
        for _ in range(8):
            uid = f"client-{len(devices):03d}"
            devices[uid] = Device(("127.0.0.1", served.port)).start(target=door).connect(uid.encode())
        listed = {one["uid"]: one["worker"] for one in asked(served, "api/v1/peers?limit=500")["items"]}
        found.update((device, listed[uid]) for uid, device in devices.items())
        return len(set(found.values())) == 2

    wait_until(are_at_both, "clients at both workers")
    return found


def ask(served: Served, page: str) -> str:
    with closing(HTTPConnection("127.0.0.1", served.port, timeout=10)) as client:
        client.request("GET", page)
        return client.getresponse().read().decode()


def connected(served: Served, number: int, door: str) -> Device:
    return Device(("127.0.0.1", served.port)).start(target=door).connect(b"%d-%d" % (served.port, number))


def ended(devices: Iterable[Device]) -> list[Device]:
    """Those to whom something has come."""
    gevent.sleep(QUIET_S)
    by_socket = {device.sock.fileno(): device for device in devices}
    return [by_socket[fd] for fd in select.select(list(by_socket), [], [], 0)[0]]


@pytest.mark.parametrize("end", ["all", "local"])
@pytest.mark.parametrize("door", ["/smq.lsp", "/py"], ids=["Lua", "Python"])
def test_all_workers_are_reached_unless_one_is_meant(serve: Serve, app: Path, door: str, end: str) -> None:
    served = serve(app, "--workers", "2", "--hosts", "*")
    devices = clients(served, door)
    ask(served, f"/{end}.lsp" if door == "/smq.lsp" else f"/py{end}")
    gone = ended(devices)
    for device in gone:
        device.expect_end(wire.disconnect(b"all" if end == "all" else b"here"))
    if end == "all":
        assert len(gone) == len(devices)
    else:
        [worker] = {devices[device] for device in gone}
        assert set(gone) == {device for device, its in devices.items() if its == worker}


@pytest.mark.parametrize("how", ["stop", "reload"])
def test_closing_an_application_closes_clients_of_its_node(serve: Serve, app: Path, how: str) -> None:
    folders = [shutil.copytree(app, app.parent / name / "app") for name in ("leaving", "staying")]
    ports = [free_port(), free_port()]
    nodes = ",".join(f"127.0.0.1:{port}" for port in ports)
    options = (
        "--reload",
        "--hosts",
        "*",
        "--cluster-password",
        "of the test",
        "--cluster-hubs",
        "--cluster-nodes",
        nodes,
    )
    leaving, staying = (
        serve(folder, *options, "--cluster-nodes", nodes, "--cluster-listen", f"127.0.0.1:{port}")
        for folder, port in zip(folders, ports, strict=True)
    )
    here, there = ([connected(served, *one) for one in DOORS] for served in (leaving, staying))
    for page in ("/count.lsp", "/pycount"):
        wait_until(
            lambda page=page: ask(leaving, page) == "3", "the server, the client here, and that of the other node"
        )
    if how == "stop":
        leaving.stop()
    else:
        (folders[0] / ".preload").write_text(LUA + "-- edited")
    for device in here:
        device.expect_end(wire.disconnect(b"unloading"))
    assert ended(there) == []
