"""A server that changes its process while it serves, and the application it serves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from smqrt.wire import smq as wire
from tests.conftest import START_S, Served
from tests.support import applications
from tests.support.device import RAW, Device
from tests.support.waiting import wait_until

PRELOAD = """
local hub = require "smq.hub"
smq = hub.create {
   name = "main",
   onconnect = function(etid, info) smq:publish(tostring(info.restored), "met", etid) end,
   onclose = function(etid) smq:publish("left", "met", etid) end,
   permittop = function(topic) return topic ~= "secret" end,
}
smq:subscribe("echo", {onmsg = function(data, etid) smq:publish("echo:" .. data, etid) end})
"""
PAGE = "<?lsp app.smq:connect(request) ?>"


def application(folder: Path, preload: str = PRELOAD, **pages: str) -> Path:
    """Makes an application with a hub at `/smq.lsp`."""
    return applications.application(folder, preload, **{"smq": PAGE, **pages})


class HotServed(Served):
    """A running `smqrt serve` that takes its own place.

    Attributes:
        pid: of the process that serves now.
        restarts: how often there was another one.
    """

    restarts = 0

    def __init__(self, *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
        super().__init__("--hosts", "*", *arguments, cwd=cwd, env=env)
        self.pid = self.process.pid

    def restart(self) -> None:
        """Restarts it by signal, and waits until the next process serves."""
        os.kill(self.pid, signal.SIGUSR2)
        self.next_process()

    def next_process(self) -> None:
        """Waits until another process serves, and the one before has ended."""
        before = self.pid
        found = [0]

        def serves() -> bool:
            found[:] = [int(one) for one in re.findall(r"restart: process (\d+) serves", self.output)]
            return len(found) > self.restarts

        wait_until(serves, self.lines, START_S)
        self.restarts, self.pid = len(found), found[-1]
        wait_until(lambda: has_ended(before), f"process {before} ends:\n{self.output}")
        if before == self.process.pid:
            code = self.process.wait()
            assert code == 0, f"exit code {code}:\n{self.output}"

    def device(self, uid: bytes = b"device", kind: str = RAW, page: str = "/smq.lsp") -> Device:
        """A connected client."""
        port = self.tls_port if kind in ("tls", "wss") else self.port
        return Device(("127.0.0.1", port), kind).start(target=page).connect(uid)

    def end(self) -> None:
        """Ends the last process, whichever that is."""
        if not has_ended(self.pid):
            os.kill(self.pid, signal.SIGTERM)
        if self.process.poll() is None and self.pid != self.process.pid:
            self.process.kill()
        self._reader.join(self.stop_s)
        still = [one for one in self._writers() if self._reader.is_alive()]
        if still and not has_ended(self.pid):
            os.kill(self.pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.wait()
        assert not still, f"did not end in {self.stop_s} s, {self.pid} serves: {still}\n{self.output}"

    def _writers(self) -> list[str]:
        """The processes that have the pipe of its output."""
        assert self.process.stdout
        pipe, found = os.fstat(self.process.stdout.fileno()).st_ino, []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if process.name != str(os.getpid()) and pipe in [os.stat(one).st_ino for one in process.glob("fd/*")]:
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(f"{process.name} {(process / 'wchan').read_text()}: {words}")
        return found


def has_ended(pid: int) -> bool:
    """Whether a process has ended, whoever waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def heard(device: Device) -> tuple[int, bytes]:
    """Destination and payload of the next message."""
    tid, _, _, payload = wire.unpack_publish(wire.frame(device.receive()))
    return tid, payload
