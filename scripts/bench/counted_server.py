"""`smqrt` that counts what it does, for path_costs.py: each line on standard input starts or ends a count.

"calls" counts calls of Python functions and of built-in ones, "allocations" new blocks of memory. The next line ends
the count, and the result is printed as a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from build import built
from gevent import get_hub

from smqrt.cli import main

ALLOCATIONS = Path(__file__).parent / "allocations.c"


class Counters:
    """What is counted at present; called by the loop."""

    def __init__(self) -> None:
        self._library = ctypes.PyDLL(str(built(ALLOCATIONS, "-shared", "-fPIC")))
        self._library.stop.restype = ctypes.c_long
        self._calls: Counter[str] = Counter()
        self._what = ""

    def read_line(self) -> None:
        """Starts or ends a count."""
        word = os.read(0, 100).decode().strip()
        if self._what:
            print(json.dumps(self._end()), flush=True)
        elif word:
            self._what = word
            print(json.dumps("counting"), flush=True)
            # The last step, so that only the path itself is counted.
            self._library.start() if word == "allocations" else sys.setprofile(self._called)

    def _end(self) -> dict[str, int]:
        if self._what == "allocations":
            found = {"allocations": self._library.stop()}
        else:
            sys.setprofile(None)
            found = dict(self._calls)
            self._calls.clear()
        self._what = ""
        return found

    def _called(self, frame: Any, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            module = frame.f_globals.get("__name__", "?")
            self._calls[f"python {module}.{code.co_qualname}"] += 1
        elif event == "c_call":
            self._calls[f"builtin {getattr(argument, '__qualname__', argument)}"] += 1


if __name__ == "__main__":
    watcher = get_hub().loop.io(0, 1)
    watcher.start(Counters().read_line)
    main()
