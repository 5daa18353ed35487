"""The load generator: smqload.c when it lies beside the repository and a compiler is there, else pyload.py (slower)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from build import built, compiler
from shapes import Shape

REPOSITORY = Path(__file__).parent.parent.parent
SOURCE = REPOSITORY.parent / "shared" / "tools" / "smqload.c"


class Target(Protocol):
    """What load comes to: its name, its protocol for smqload, its port, and the processes whose CPU counts."""

    name: str
    protocol: str
    port: int

    @property
    def pids(self) -> list[int]: ...


class Generator:
    """`name` says which one it is; `run` measures one shape against one broker."""

    def __init__(self, python: bool = False) -> None:
        if SOURCE.is_file() and compiler() and not python:
            self.name = "smqload"
            self._command = [str(built(SOURCE))]
        else:
            why = "asked for" if python else "no C compiler" if SOURCE.is_file() else "smqload.c is not there"
            self.name = f"pyload (slower: {why}; it limits the load, so compare CPU per message only)"
            self._command = [sys.executable, str(Path(__file__).parent / "pyload.py")]

    def run(self, shape: Shape, broker: Target, seconds: float) -> dict[str, Any]:
        """Returns what the generator reports, as its JSON says it."""
        process = self.start(shape, broker, seconds, errors=subprocess.PIPE)
        said, error = process.communicate()
        if process.returncode:
            raise SystemExit(f"{shape.title} against {broker.name}: {error.strip()}")
        report: dict[str, Any] = json.loads(said)
        return report

    def start(self, shape: Shape, broker: Target, seconds: float, errors: int | None = None) -> subprocess.Popen[str]:
        """Starts the generator, which reports on its standard output after that time."""
        protocol = "smqws" if shape.websocket else broker.protocol
        where = ["--proto", protocol, "--port", str(broker.port), "--pid", ",".join(map(str, broker.pids))]
        times = ["--time", str(seconds), "--warmup", str(min(0.5, seconds / 3)), "--max-time", str(seconds + 40)]
        words = [*self._command, *where, *times, *shape.options.split()]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True)
