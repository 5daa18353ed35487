"""Run one fuzz target under atheris: `python -m tests.fuzz.guided TARGET [SECONDS]`."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import atheris

os.environ["SMQRT_KERNELS"] = "pure"  # a fuzzer sees what Python runs, and not what LuaJIT does

with atheris.instrument_imports(include=["smqrt"]):
    from tests.fuzz.targets import TARGETS, seeds

LEARNED = Path(".fuzz")
MOST_BYTES = 4096
MAX_S = 2  # of one input: linear work on so few bytes takes milliseconds


def main(words: list[str]) -> None:
    """Run until `SECONDS` are over, or something fails."""
    if len(words) < 2 or words[1] not in TARGETS:
        sys.exit(f"usage: scripts/fuzz/guided TARGET [SECONDS]; targets: {', '.join(TARGETS)}")
    name, seconds = words[1], int(words[2]) if len(words) > 2 else 60
    folder = LEARNED / name
    folder.mkdir(parents=True, exist_ok=True)
    for data in seeds(name):
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    limits = [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES}", f"-timeout={MAX_S}", "-rss_limit_mb=1024"]
    where = f"-artifact_prefix={LEARNED}/{name}-"
    atheris.Setup([words[0], *limits, where, "-print_final_stats=1", "-verbosity=0", str(folder)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
