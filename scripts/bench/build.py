"""Builds the C programs of the comparison, once per source text."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

CACHE = Path(__file__).parent.parent.parent / ".cache"


def compiler() -> str | None:
    """Returns the path of a C compiler, if there is one."""
    return shutil.which("gcc") or shutil.which("cc")


def built(source: Path, *options: str) -> Path:
    """Returns the program of a C source file, built when it is new or changed; `-shared` as an option: a library."""
    program = CACHE / f"{source.stem}-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        CACHE.mkdir(exist_ok=True)
        subprocess.run([str(compiler()), "-O2", *options, "-o", str(program), str(source)], check=True)
    return program
