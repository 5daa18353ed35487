"""ba.thread, ba.sleep, ba.clock and ba.exec: time and work beside the request (spec: bas-api §7, runtime §6)."""

from __future__ import annotations

from gevent import get_hub, subprocess

from smqrt.lua.clock import clock_ms, sleep_ms
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm

MAX_OUTPUT_BYTES = 64 * 1024


def execute(command: bytes) -> tuple[object, ...]:
    """Run a shell command and return its output (stdout and stderr, at most 64 KiB) and exit code.

    Returns None, code, output when the command failed.
    """
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            output = _head_of(process)
            code = process.wait()
        except BaseException:
            process.kill()
            raise
    return (output, code) if code == 0 else (None, code, output)


def _head_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    head: bytes = process.stdout.read(MAX_OUTPUT_BYTES)
    while process.stdout.read(MAX_OUTPUT_BYTES):  # the rest, so that the command never waits for a reader
        pass
    return head


def install(vm: Vm, services: Services) -> None:
    """Give Lua `ba.thread`, `ba.sleep`, `ba.clock` and `ba.exec`."""

    def soon(ref: int, handle: int) -> None:
        get_hub().loop.run_callback(vm.start, ref, handle)

    vm.namespace("ba.thread", {"clock": clock_ms, "soon": soon}, {"exec": execute}, parking={"sleep": sleep_ms})
