"""The parts of a server that operators look at."""

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
    """The parts of a server that are looked at; each belongs to the server, and is only read here.

    Attributes:
        health: whether it is ready.
        listeners: by name.
        http: answers on them.
        applications: in the order of their loading, also those that failed or were stopped.
        vm: the Lua runtime.
        pipelines: gives the folder and the state of each process of pipelines.
        restart: restarts an application; may block.
        drain: true: sends the SMQ clients away, soon, and takes no new ones; false: takes new ones again.
        acme: gives what is told of the certificate that this process orders; None when it orders none.
        lag: how late the event loop is.
        log: the end of the log.
        began_s: when it began, on the clock of `time.monotonic`, which no change of the machine's clock moves.
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
        """Begin to keep what operators are shown."""
        self.lag.start()
        self.log.start()

    def stop(self) -> None:
        """Keep nothing more; a second call does nothing."""
        self.lag.stop()
        self.log.stop()
