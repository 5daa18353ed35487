"""Number and shared data of this process among the workers of a server.

`smqrt serve --workers 4` has four workers, numbered from 0 to 3. The supervisor assigns each number before the worker
does anything else. Every other process, also a server without workers, is number 0 of 1. Worker 0 does what must be
done once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

ENVIRONMENT = "_SMQRT_WORKER"
"""The variable with the number of the inherited descriptor from which a worker reads its `WorkerPlace`."""
HUBS_OF_A_WORKER = 1_000_000


@dataclass(frozen=True)
class WorkerPlace:
    """One worker among those of its server.

    Attributes:
        number: from 0; the replacement of a dead worker has the same number.
        count: of all workers.
        secret: 32 random bytes that only the workers of this server know; empty for a process alone.
        directory: for Unix sockets between the workers, accessible to this user only, deleted with the server. None for
            a process alone.
        start: how many processes had this number before; the later of two, as at a hot restart, has the greater one.
    """

    number: int = 0
    count: int = 1
    secret: bytes = field(default=b"", repr=False)
    directory: Path | None = None
    start: int = 0

    @property
    def is_first(self) -> bool:
        """Whether it does what must be done once: pipelines, the admin listener."""
        return self.number == 0

    @property
    def label(self) -> str:
        """The name in log lines: "w1"; empty for a process alone."""
        return f"w{self.number}" if self.count > 1 else ""

    def socket_path(self, number: int, kind: str = "worker") -> Path:
        """Return the path of a worker's Unix socket.

        Args:
            number: of that worker.
            kind: the purpose of the socket.
        """
        assert self.directory is not None, "a process alone has no sockets for workers"
        return self.directory / f"{kind}-{number}.sock"

    def hub_number(self, count: int) -> int:
        """Return the number that operators see of the `count`th hub of this worker, unique among all workers."""
        return self.number * HUBS_OF_A_WORKER + count

    def share(self, total: int) -> int:
        """Return one worker's part of a number that is meant for all together, rounded up; 0 stays 0."""
        return -(-total // self.count)

    def own_file(self, path: str) -> str:
        """Return the file that this worker opens in place of one that only one process may open.

        Worker 0 opens `path` itself.
        """
        return path if self.is_first else f"{path}.w{self.number}"


_own = WorkerPlace()


def worker_of_hub(number: int) -> int:
    """Return the number of the worker that has the hub with this number."""
    return number // HUBS_OF_A_WORKER


def worker_place() -> WorkerPlace:
    """Return the place of this process."""
    return _own


def take_place(place: WorkerPlace) -> None:
    """Set the place of this process."""
    global _own
    _own = place


def anew(place: WorkerPlace) -> WorkerPlace:
    """Return the place of the next process with the same number."""
    return replace(place, start=place.start + 1)
