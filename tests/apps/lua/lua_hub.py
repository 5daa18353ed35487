"""An application whose `.preload` makes a hub, and what its callbacks get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smqrt.apps.lua.api import smq_hub
from tests.apps.lua.app_server import AppServer
from tests.support.device import RAW, Device
from tests.support.waiting import wait_until

PAGE = "<?lsp app.smq:connect(request, app.argument) ?>"


class LuaSite:
    """An application whose `.preload` makes `smq`, and a page that connects.

    Attributes:
        calls: what Lua's `record(...)` was called with.
    """

    def __init__(self, folder: Path) -> None:
        self.server = AppServer(folder)
        self.half = smq_hub.install(self.server.vm, self.server.services, self.server.applications.exchanges)
        self.calls: list[tuple[Any, ...]] = []
        source = b"local core, py = ... record = py.record"
        self.server.vm.namespace("recording", {"record": lambda *values: self.calls.append(values)}, source=source)
        self.devices: list[Device] = []

    def load(self, preload: str) -> LuaSite:
        application = self.server.app({".preload": preload, "smq.lsp": PAGE})
        assert application.error is None, application.error
        return self

    def run(self, source: str) -> tuple[Any, ...]:
        """Run Lua as a page of the application does; gives what it recorded with `answer`."""
        self.server.write("", {"run.lsp": "<?lsp local smq = app.smq\n" + source + " ?>"})
        self.calls.clear()
        answer = self.server.ask("/run.lsp")
        assert answer.status == 200, answer.text
        assert not answer.text.strip(), answer.text
        return self.calls[-1] if self.calls else ()

    def open(self, kind: str = RAW) -> Device:
        self.devices.append(Device(("127.0.0.1", self.server.port), kind))
        return self.devices[-1].start(target="/smq.lsp?a=1&b=two")

    def device(self, uid: bytes = b"uid-a1", kind: str = RAW, **more: Any) -> Device:
        return self.open(kind).connect(uid, **more)

    @property
    def broker(self) -> Any:
        return next(iter(self.half._brokers.values())).broker

    def come(self, count: int) -> list[tuple[Any, ...]]:
        wait_until(lambda: len(self.calls) >= count, f"{count} calls, got {self.calls}")
        return self.calls

    def close(self) -> None:
        for device in self.devices:
            device.close()
        for one in list(self.half._brokers.values()):
            one.broker.shutdown()
            wait_until(lambda one=one: not one.broker.sessions, "the ends of all clients")  # type: ignore[misc]
        self.server.close()


@pytest.fixture
def lua(tmp_path: Path) -> Iterator[Callable[[str], LuaSite]]:
    sites: list[LuaSite] = []

    def load(preload: str = 'smq = require"smq.hub".create()') -> LuaSite:
        sites.append(LuaSite(tmp_path))
        return sites[-1].load(preload)

    yield load
    for site in sites:
        site.close()
