"""An OS thread that looks after the loop: it tells where Lua is when the loop has not turned for some seconds, and it
ends an activity that computes for longer than it may.

Everything waits while an application computes; the person at the terminal should read which line it is. What is found
goes straight to the file descriptor: neither locks nor loggers, which a monkey-patched process shares with greenlets,
are touched.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from gevent import get_hub, monkey

from smqrt.apps.lua.activity import Activities, Run
from smqrt.apps.lua.lupa_internals import PATIENCE_S, interrupt_of, wait_until
from smqrt.apps.lua.vm import Vm
from smqrt.apps.python.directory import overload
from smqrt.settings.limit_register import Limit

LIMIT_S = 5.0
STEP_S = 0.5
MEMORY_STEP_S = 0.1  # a loop takes some hundred megabytes in that time
COLLECT_EVERY_S = 10.0  # all of a heap of gigabytes takes seconds
AGAIN_AFTER_S = 2.0  # or twice the limit
STDERR = 2

LUA_MEMORY = Limit("lua_memory", "limits.lua_memory_mib", "Lua has as much memory as it may")
ELSEWHERE = b"not in Lua, or in a C function such as string.find\n"

_sleep: Callable[[float], None] = monkey.get_original("time", "sleep")
_start_thread: Callable[..., int] = monkey.get_original("_thread", "start_new_thread")


class Overdue:
    """Finds the run that has computed for too long.

    Args:
        activities: whose runs they are.
        thread_id: of the thread in which they are.
        limit_s: CPU time of that thread. A process that had to wait for the processor has not computed.
    """

    def __init__(self, activities: Activities, thread_id: int, limit_s: float) -> None:
        self._activities, self._limit_s = activities, limit_s
        self._clock = time.pthread_getcpuclockid(thread_id)
        self._since_s: dict[Run, float] = {}
        self._found: Run | None = None
        self._again_s = 0.0
        self.case = 0

    def look(self) -> Run | None:
        """The innermost run that is overdue, and again after `AGAIN_AFTER_S` when it goes on.

        `case` is another number for every other run. Must be called a few times per limit, and `forget` when the loop
        has turned. When one has ended that was overdue, the time of those around it begins anew: it was not they who
        computed.
        """
        now_s, runs = time.clock_gettime(self._clock), self._activities.runs()
        if self._found is not None and self._found not in runs:
            self.forget()
        self._since_s = {run: self._since_s.get(run, now_s) for run in runs}
        found = next((run for run in runs if now_s - self._since_s[run] >= self._limit_s), None)
        if found is None or (found == self._found and now_s < self._again_s):
            return None
        self.case += found != self._found
        self._found, self._again_s = found, now_s + min(AGAIN_AFTER_S, 2 * self._limit_s)
        return found

    def forget(self) -> None:
        """All runs that were seen are over."""
        self._since_s, self._found = {}, None


class LoopWatchdog:
    """Watches the loop of the current thread.

    Args:
        vm: the Lua runtime of that thread.
        limit_s: for how long the loop may stand still before it is told where.
        write: takes the report, in the watchdog's thread; standard error by default.
        loop_s: for how long an activity may compute (CPU time) without giving way before it gets an error; 0 for ever.
        memory_mib: what all may have; beyond, the activity that computes gets an error. None for any amount.
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
        self._step_s = min(STEP_S, limit_s / 4, loop_s / 4 or STEP_S, STEP_S if memory_mib is None else MEMORY_STEP_S)
        self._memory_case = 0
        self._collected_s = -COLLECT_EVERY_S
        self._write = write or (lambda text: os.write(STDERR, text))
        self._interrupt = interrupt_of(vm)
        self._turns = 0
        self._stopped = False
        self._thread_id = monkey.get_original("_thread", "get_ident")()
        self._overdue = Overdue(vm.activities, self._thread_id, loop_s)
        self._is_ending = False
        self._timer = get_hub().loop.timer(self._step_s, self._step_s, ref=False)

    def start(self) -> None:
        """Begin to watch."""
        self._timer.start(self._turn)
        _start_thread(self._watch, ())

    def stop(self) -> None:
        """Stop watching."""
        self._stopped = True
        self._timer.stop()
        self._timer.close()

    def _turn(self) -> None:
        self._turns += 1
        if self._memory_mib is not None:
            self._look_at_memory(self._memory_mib)
        if self._is_ending and self._interrupt:
            self._is_ending = False
            self._interrupt.end()
            self._vm.relax()

    def _look_at_memory(self, most_mib: int) -> None:
        """Let no request in as long as there is more than may be, when garbage is left aside."""
        if self._vm.memory_bytes() >> 20 < most_mib:
            overload.clear()
            return
        now_s = time.monotonic()
        if now_s - self._collected_s >= COLLECT_EVERY_S:
            self._collected_s = now_s
            self._vm.collect()
        if self._vm.memory_bytes() >> 20 >= most_mib:
            if not overload:
                overload.append("Lua has as much memory as it may; try again later.")
            LUA_MEMORY.refused("requests of applications", f"Lua has {self._vm.memory_bytes() >> 20} MiB")
        else:
            overload.clear()

    def _end_hungry(self) -> None:
        """End the activity that computes while Lua has more than it may."""
        interrupt, runs, most_mib = self._interrupt, self._vm.activities.runs(), self._memory_mib
        if interrupt is None or not runs or most_mib is None:
            return
        innermost, _ = run = runs[0]  # it can't be freed as long as it is named here
        if interrupt.lua.memory_mib(innermost.address) < most_mib:
            return
        self._is_ending = True
        self._memory_case -= 1
        activities, case = self._vm.activities, self._memory_case

        def arm(at: int) -> None:
            if run in activities.runs():
                interrupt.lua.arm(at, case, -float(most_mib))
            else:
                interrupt.lua.set_hook(at, None, 0, 0)

        interrupt.begin(innermost.address, arm)
        _sleep(PATIENCE_S)  # it is at work: collecting all, or dealing with the error

    def _watch(self) -> None:
        seen, still_s = -1, 0.0
        while not self._stopped:
            _sleep(self._step_s)
            self._end_hungry()
            if self._turns != seen:
                seen, still_s = self._turns, 0.0
                self._overdue.forget()
                continue
            before, still_s = still_s, still_s + self._step_s
            if before < self._limit_s <= still_s:
                self._report()
            if self._loop_s:
                self._end_overdue()

    # ---- the report

    def _report(self) -> None:
        where = self._lua_traceback() or ELSEWHERE + self._python_stack()
        self._write(b"the server has stood still for %.1f s:\n%s\n" % (self._limit_s, where))

    def _lua_traceback(self) -> bytes | None:
        interrupt, runs = self._interrupt, self._vm.activities.runs()
        if interrupt is None or not runs:
            return None
        found: list[bytes] = []

        def look(at: int) -> None:
            interrupt.lua.set_hook(at, None, 0, 0)
            found.append(interrupt.tracebacks(at))

        innermost, _ = runs[0]  # it can't be freed as long as it is named here
        interrupt.begin(innermost.address, look)
        wait_until(lambda: bool(found), PATIENCE_S)
        interrupt.end()
        return found[0] if found else None

    def _python_stack(self) -> bytes:
        frame, lines = sys._current_frames().get(self._thread_id), []
        while frame is not None:
            lines.append(f"\t{frame.f_code.co_filename}:{frame.f_lineno}: in {frame.f_code.co_name}")
            frame = frame.f_back
        return "\n".join(lines).encode()

    # ---- the end of an activity

    def _end_overdue(self) -> None:
        interrupt, run = self._interrupt, self._overdue.look()
        if interrupt is None or run is None:
            return
        self._is_ending = True
        activities, case, loop_s = self._vm.activities, self._overdue.case, self._loop_s

        def arm(at: int) -> None:
            if run in activities.runs():
                interrupt.lua.arm(at, case, loop_s)
            else:  # it has ended by itself, and somebody else has got its coroutine
                interrupt.lua.set_hook(at, None, 0, 0)

        interrupt.begin(run[0].address, arm)
