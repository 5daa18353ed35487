"""Parts of a server that the admin listener reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from smqrt.apps.lua.applications import Application
from smqrt.apps.lua.vm import Vm
from smqrt.http.server import HttpServer
from smqrt.operations.health import Health, LoopLag
from smqrt.operations.logs import LogTail
from smqrt.server.listeners import Listeners


@dataclass
class Parts:
    """The parts of a server that operators see. The server owns them.

    Attributes:
        health: whether the server is ready.
        listeners: the listeners by name.
        http: the HTTP server on them.
        applications: in the order of loading, with those that failed or were stopped.
        vm: the Lua runtime.
        pipelines: returns the folder and the state of each process of pipelines.
        restart: restarts an application; may block.
        drain: True closes the SMQ clients over the drain period and rejects new ones; False accepts clients again.
        acme: returns the state of the certificate that this process orders by ACME; None when it orders none.
        lag: the delay of the event loop.
        log: the last records of the log.
        began_s: start time by `time.monotonic`, which does not change with the clock of the machine.
    """

    health: Health
    listeners: Listeners
    http: HttpServer
    applications: Sequence[Application]
    vm: Vm
    pipelines: Callable[[], Sequence[tuple[Path, str]]]
    restart: Callable[[Application], None]
    drain: Callable[[bool], None]
    acme: Callable[[], Mapping[str, object] | None] = lambda: None
    lag: LoopLag = field(default_factory=LoopLag)
    log: LogTail = field(default_factory=LogTail)
    began_s: float = field(default_factory=monotonic)

    def start(self) -> None:
        """Start measuring the loop and keeping log records."""
        self.lag.start()
        self.log.start()

    def stop(self) -> None:
        """Stop both. A second call does nothing."""
        self.lag.stop()
        self.log.stop()
