"""Watchdog of the event loop, in an OS thread of its own.

It reports the line of Lua that blocks the loop for some seconds, and ends activities that exceed their CPU time or the
memory limit. It writes reports directly to the file descriptor: in a monkey-patched process, locks and loggers belong
to greenlets.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable

from gevent import get_hub, monkey

from smqrt.apps.lua.activities import Activities, Run
from smqrt.apps.lua.lupa_internals import TIMEOUT_S, interrupt_of, wait_until
from smqrt.apps.lua.vm import Vm
from smqrt.apps.python.directory import overload
from smqrt.loop.threads import block_thread, start_thread
from smqrt.settings.limits import Limit

LIMIT_S = 5.0
STEP_S = 0.5
MEMORY_STEP_S = 0.1  # in this time a Lua loop may allocate some hundred megabytes
COLLECT_EVERY_S = 10.0  # a full collection of a heap of gigabytes takes seconds
AGAIN_AFTER_S = 2.0  # or twice the limit
STEPS_PER_LIMIT = 4
STDERR = 2

LUA_MEMORY = Limit("lua_memory", "limits.lua_memory_mib", "Lua uses its maximum of memory")
ELSEWHERE = b"not in Lua, or in a C function such as string.find\n"


class Overdue:
    """Finds the run that exceeds its CPU time.

    Args:
        activities: the activities.
        thread_id: the thread in which they run.
        limit_s: seconds of CPU time of that thread; time in which it waits for a processor does not count. Activities
            may have other limits (`Activities.limits`).

    Attributes:
        case: a number that differs between overdue runs.
    """

    def __init__(self, activities: Activities, thread_id: int, limit_s: float) -> None:
        self._activities, self._limit_s = activities, limit_s
        self._clock = time.pthread_getcpuclockid(thread_id)
        self._since_s: dict[Run, float] = {}
        self._found: Run | None = None
        self._again_s = 0.0
        self.case = 0

    def look(self) -> tuple[Run, float] | None:
        """Return the innermost overdue run and its limit; the same run again after `AGAIN_AFTER_S` if it has not ended.

        Call this several times per limit, and `forget` after each iteration of the loop. After the end of an overdue
        run, the time of the runs around it starts again, since they did not use the CPU time.
        """
        now_s, runs = time.clock_gettime(self._clock), self._activities.runs()
        if self._found is not None and self._found not in runs:
            self.forget()
        self._since_s = {run: self._since_s.get(run, now_s) for run in runs}
        limits = self._activities.limits
        for run in runs:
            limit_s = limits.get(run[0], self._limit_s)
            if now_s - self._since_s[run] >= limit_s:
                break
        else:
            return None
        if run == self._found and now_s < self._again_s:
            return None
        self.case += run != self._found
        self._found, self._again_s = run, now_s + min(AGAIN_AFTER_S, 2 * limit_s)
        return run, limit_s

    def forget(self) -> None:
        """Forget all runs, which have ended since the loop has run another iteration."""
        self._since_s, self._found = {}, None


class LoopWatchdog:
    """Watches the loop of the current thread.

    Args:
        vm: the Lua runtime of that thread.
        limit_s: seconds without an iteration of the loop until a report.
        write: writes the report, in the watchdog's thread; standard error by default.
        loop_s: seconds of CPU time after which a running activity gets an error; 0 for no limit.
        memory_mib: memory of Lua above which the running activity gets an error; None for no limit.
    """

    def __init__(
        self,
        vm: Vm,
        limit_s: float = LIMIT_S,
        write: Callable[[bytes], object] | None = None,
        loop_s: float = 0.0,
        memory_mib: int | None = None,
    ) -> None:
        self._vm = vm
        self._limit_s, self._loop_s, self._memory_mib = limit_s, loop_s, memory_mib
        most_s = STEP_S if memory_mib is None else MEMORY_STEP_S
        self._step_s = min(most_s, limit_s / STEPS_PER_LIMIT, loop_s / STEPS_PER_LIMIT or STEP_S)
        self._memory_case = 0  # counts down, since `Overdue.case` counts up
        self._collected_s = -COLLECT_EVERY_S  # the first collection runs at once
        self._write = write or (lambda text: os.write(STDERR, text))
        self._interrupt = interrupt_of(vm)
        self._turns = 0
        self._stopped = False
        self._thread_id = monkey.get_original("_thread", "get_ident")()
        self._overdue = Overdue(vm.activities, self._thread_id, loop_s or math.inf)
        self._is_ending = False
        self._timer = get_hub().loop.timer(self._step_s, self._step_s, ref=False)  # it does not keep the loop running

    def start(self) -> None:
        """Start the watchdog."""
        self._timer.start(self._turn)
        start_thread(self._watch, ())

    def stop(self) -> None:
        """Stop the watchdog."""
        self._stopped = True
        self._timer.stop()
        self._timer.close()

    def _turn(self) -> None:
        self._turns += 1
        if self._memory_mib is not None:
            self._check_memory(self._memory_mib)
        if self._is_ending and self._interrupt:
            self._is_ending = False
            self._interrupt.end()
            self._vm.relax()

    def _check_memory(self, limit_mib: int) -> None:
        """Reject requests of applications while Lua exceeds its memory limit after a collection."""
        if self._vm.memory_bytes() >> 20 < limit_mib:
            overload.clear()
            return
        now_s = time.monotonic()
        if now_s - self._collected_s >= COLLECT_EVERY_S:
            self._collected_s = now_s
            self._vm.collect()
        if self._vm.memory_bytes() >> 20 >= limit_mib:
            if not overload:
                overload.append("Lua uses its maximum of memory. Try again later.")
            LUA_MEMORY.refused("requests of applications", f"Lua uses {self._vm.memory_bytes() >> 20} MiB")
        else:
            overload.clear()

    def _end_over_memory(self) -> None:
        """End the running activity when Lua exceeds its memory limit."""
        interrupt, runs, limit_mib = self._interrupt, self._vm.activities.runs(), self._memory_mib
        if interrupt is None or not runs or limit_mib is None:
            return
        innermost, _ = run = runs[0]  # this reference keeps the coroutine from being freed
        if interrupt.lua.memory_mib(innermost.address) < limit_mib:
            return
        self._is_ending = True
        self._memory_case -= 1
        activities, case = self._vm.activities, self._memory_case

        def arm(at: int) -> None:
            if run in activities.runs():
                interrupt.lua.arm(at, case, -float(limit_mib))  # negative: a memory limit
            else:
                interrupt.lua.set_hook(at, None, 0, 0)

        interrupt.begin(innermost.address, arm)
        block_thread(TIMEOUT_S)  # time for the collection and for handling the error

    def _watch(self) -> None:
        seen, blocked_s = -1, 0.0
        limits = self._vm.activities.limits
        while not self._stopped:
            # `list` copies in one step: the other thread changes the dict.
            step_s = min([self._step_s, *(limit_s / STEPS_PER_LIMIT for limit_s in list(limits.values()))])
            block_thread(step_s)
            self._end_over_memory()
            if self._turns != seen:
                seen, blocked_s = self._turns, 0.0
                self._overdue.forget()
                continue
            # Counted in steps, not by a clock, so that a stopped process does not count as blocked.
            before_s, blocked_s = blocked_s, blocked_s + step_s
            if before_s < self._limit_s <= blocked_s:
                position = self._lua_traceback()
                if not position:
                    # Not by `traceback`, which would also read the source files.
                    frame, lines = sys._current_frames().get(self._thread_id), []
                    while frame is not None:
                        lines.append(f"\t{frame.f_code.co_filename}:{frame.f_lineno}: in {frame.f_code.co_name}")
                        frame = frame.f_back
                    position = ELSEWHERE + "\n".join(lines).encode()
                self._write(b"the event loop has been blocked for %.1f s:\n%s\n" % (self._limit_s, position))
            if self._loop_s or limits:
                self._end_overdue()

    def _lua_traceback(self) -> bytes | None:
        interrupt, runs = self._interrupt, self._vm.activities.runs()
        if interrupt is None or not runs:
            return None
        found: list[bytes] = []

        def look(at: int) -> None:
            interrupt.lua.set_hook(at, None, 0, 0)
            found.append(interrupt.tracebacks(at))

        innermost, _ = runs[0]  # this reference keeps the coroutine from being freed
        interrupt.begin(innermost.address, look)
        wait_until(lambda: bool(found), TIMEOUT_S)
        interrupt.end()
        return found[0] if found else None

    def _end_overdue(self) -> None:
        interrupt, overdue = self._interrupt, self._overdue.look()
        if interrupt is None or overdue is None:
            return
        run, limit_s = overdue
        self._is_ending = True
        activities, case = self._vm.activities, self._overdue.case

        def arm(at: int) -> None:
            if run in activities.runs():
                interrupt.lua.arm(at, case, limit_s)
            else:  # the run has ended, and its coroutine may run another activity
                interrupt.lua.set_hook(at, None, 0, 0)

        interrupt.begin(run[0].address, arm)
