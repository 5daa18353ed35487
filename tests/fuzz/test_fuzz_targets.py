"""Decoders under inputs that nobody meant: the good ones, those that were faults once, and both spoiled at random.

`scripts/fuzz/guided` looks for new ones, led by what of the code they reach.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fuzz.targets import TARGETS, seeds

EXECUTIONS = int(os.environ.get("FUZZ_EXECUTIONS", "0"))
"""Of each target; 0 for as many as `CPU_S` lets it, and `LEAST` at least."""
CPU_S, LEAST = 0.1, 100
MAX_S = 0.05
"""Of one input: nobody may hold the loop for longer."""
MOST_BYTES = 4096
_EDGES = b'\x00\x01\x02\x7d\x7e\x7f\x80\x81\xfe\xff\r\n :;,=%/."\\-'


def spoiled(rng: random.Random, good: list[bytes]) -> bytes:
    """One of the inputs with a few bytes changed, left out, put in, repeated, or joined to another one."""
    data = bytearray(rng.choice(good))
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes((rng.choice(_EDGES),))
            case 1:
                data[at : at + 1] = rng.randbytes(1)
            case 2:
                del data[at : at + rng.choice((1, 2, 8, 64))]
            case 3:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 32)))
            case 4:
                data[at:at] = data[at : at + rng.choice((2, 16, 256))]
            case _:
                data[at:] = rng.choice(good)[at:]
    return bytes(data[:MOST_BYTES])


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_and_former_faults(name: str) -> None:
    for data in [*seeds(name), b"", b"\x00", b"\xff" * 100]:
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_spoiled_inputs(name: str) -> None:
    target, good = TARGETS[name], seeds(name)
    rng = random.Random(name)
    for _ in executions():
        data = spoiled(rng, good)
        began_s = time.thread_time()
        try:
            target(data)
        except Exception as error:
            raise AssertionError(f"{name} fails at {data.hex()}: a line for tests/fuzz/finds/{name}.hex") from error
        if time.thread_time() - began_s > MAX_S:
            took_s = min(cpu_s(target, data) for _ in range(3))  # the collector of garbage may have had its turn
            assert took_s <= MAX_S, f"{name} takes {took_s:.3f} s for {data.hex()}"


def executions() -> Iterator[int]:
    """Counts as far as inputs are to be tried."""
    until_s = time.thread_time() + CPU_S
    count = 0
    while count < EXECUTIONS if EXECUTIONS else count < LEAST or time.thread_time() < until_s:
        yield count
        count += 1


def cpu_s(target: Callable[[bytes], None], data: bytes) -> float:
    """The processor time that an input takes."""
    began_s = time.thread_time()
    target(data)
    return time.thread_time() - began_s
