"""The place of this process among the workers of a server: `smqrt serve --workers 4` has four, numbered from 0 to 3.

The supervisor gives a worker its place before anything else is done. Every other process, a server without workers
also, is alone: number 0 of 1. What must exist once is the business of worker 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

ENVIRONMENT = "_SMQRT_WORKER"
"""The number of the descriptor that a worker inherits, at which it is told its place."""
HUBS_OF_A_WORKER = 1_000_000


@dataclass(frozen=True)
class WorkerPlace:
    """One worker among those of its server.

    Attributes:
        number: from 0; a worker that takes a dead one's place has its number.
        count: of all workers.
        secret: 32 random bytes that the workers of this server know and nobody else; empty for a process alone.
        directory: for Unix sockets between the workers, of this user only; it goes with the server. None for a process
            alone.
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
        """What logs call it: "w1"; empty for a process alone."""
        return f"w{self.number}" if self.count > 1 else ""

    def socket_path(self, number: int, kind: str = "worker") -> Path:
        """Where a worker has its Unix socket of a kind.

        Args:
            number: of that worker.
            kind: what the socket is for.
        """
        assert self.directory is not None, "a process alone has no sockets for workers"
        return self.directory / f"{kind}-{number}.sock"

    def hub_number(self, count: int) -> int:
        """The number that operators see of the hub that this worker made as its `count`th: no two workers have one."""
        return self.number * HUBS_OF_A_WORKER + count

    def share(self, whole: int) -> int:
        """The part that a worker has of a number that is meant for all together, rounded up; 0 stays 0."""
        return -(-whole // self.count)

    def own_file(self, path: str) -> str:
        """The file that a worker has in the place of one that a single process only may have open; worker 0 has that
        very one.
        """
        return path if self.is_first else f"{path}.w{self.number}"


_own = WorkerPlace()


def worker_of_hub(number: int) -> int:
    """The number of the worker that a hub with this number belongs to."""
    return number // HUBS_OF_A_WORKER


def worker_place() -> WorkerPlace:
    """The place of this process."""
    return _own


def take_place(place: WorkerPlace) -> None:
    """Be that worker, from now on."""
    global _own
    _own = place


def anew(place: WorkerPlace) -> WorkerPlace:
    """The place of the next process with its number."""
    return replace(place, start=place.start + 1)
