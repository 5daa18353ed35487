"""The trace logger of a server with several workers: one trace and one viewer, whatever worker a page came to."""

from __future__ import annotations

import http.client
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.apps.lua.websocket_client import Client
from tests.conftest import Served
from tests.support.applications import application
from tests.support.clock import undisturbed_s
from tests.support.waiting import wait_until
from tests.workers import visit
from tests.workers.served import command, workers_of

pytestmark = pytest.mark.servers

PATH = "/tracelogger.service/"
XHR = {"X-Requested-With": "XMLHttpRequest"}
PRELOAD = """
tl = ba.create.tracelogger()
tl:configure{request = true}
dir:insert(tl, true)
if io:stat "slow" and mako.worker == 2 then ba.sleep(4000) end
"""
PAGES = {
    "who": "<?lsp response:write(tostring(mako.worker)) ?>",
    "say": "<?lsp trace(request:data'text') ?>",
    "hold": "<?lsp trace(request:data'text') local till = ba.clock() + 120 while ba.clock() < till do end ?>",
    "flood": "<?lsp for n = 1, 3000 do trace('number', n, ('x'):rep(1000)) end ?>",
    "long": "<?lsp ba.sleep(6000) ?>",
}


@pytest.fixture
def served(serve: Callable[..., Served], tmp_path: Path) -> Served:
    """A server with three workers that trace what they are asked to."""
    return serve(application(tmp_path / "app", PRELOAD, **PAGES), "--workers", "3", "--hosts", "*")


class Visit(visit.Visit):
    """A connection to one worker, which traces."""

    def say(self, text: str, page: str = "say") -> None:
        assert self.ask(f"/{page}.lsp?text={text}")[0] == 200

    @property
    def is_free(self) -> bool:
        """Whether the place of the viewer is, as this worker sees it."""
        return self.ask(PATH, XHR)[0] == 204

    def view(self) -> Viewer:
        return Viewer(Client(self.port, PATH, sock=self.http.sock))


class Viewer:
    """Who looks at the trace."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.lines: list[str] = []
        self._rest = b""
        message = client.receive()
        assert message
        assert message.data[:1] == b"\x01"

    def read(self) -> bool:
        """Takes the next frame; whether that has lines."""
        message = self._client.receive()
        if message is None or message.data[:1] != b"\x02":
            return False
        *lines, self._rest = (self._rest + message.data[1:]).split(b"\n")
        self.lines += [line.decode() for line in lines]
        return True

    def until(self, *texts: str) -> list[str]:
        """The lines up to those with these texts, at least."""
        while not all(any(text in line for line in self.lines) for text in texts):
            assert self.read(), f"{texts} did not come: {self.lines[-9:]}"
        return self.lines

    def said(self) -> list[str]:
        """What was traced, with the worker."""
        return [f"{at}:{text}" for at, text in re.findall(r"^w(\d): say.lsp 1: (\S+)$", "\n".join(self.lines), re.M)]

    @property
    def is_taken(self) -> bool:
        """Whether another viewer has taken over."""
        while self.read():
            pass
        return self._client.closed() == 1000

    def close(self) -> None:
        self._client.sock.close()


def test_one_trace_and_one_viewer(served: Served) -> None:
    visits = [Visit(served, number) for number in range(3)]
    for number in range(9):
        visits[number % 3].say(f"early{number}")
    assert all(one.is_free for one in visits)
    open_files = [files(pid) for pid in workers_of(served).values()]

    viewer = Visit(served, 1).view()
    viewer.until("early8")
    assert viewer.said() == [f"{number % 3}:early{number}" for number in range(9)], "the past, in its order"
    wait_until(lambda: not any(one.is_free for one in visits), "taken at all workers")
    for number in range(9):
        visits[number % 3].say(f"late{number}")
    viewer.until("w2: 127.0.0.1 GET /say.lsp?text=late8 200 OK")
    assert viewer.said()[9:] == [f"{number % 3}:late{number}" for number in range(9)]
    # A line waits for those of a worker whose loop is held.
    held = threading.Thread(target=visits[2].say, args=("first", "hold"))
    held.start()
    served.wait_for(r"^w2: hold\.lsp 1: first$")
    visits[0].say("second")
    held.join()
    lines = viewer.until("first", "second")
    assert lines.index("w2: hold.lsp 1: first") < lines.index("w0: say.lsp 1: second")

    # Another one takes over, at another worker, and has the past of all as well.
    other = Visit(served, 0).view()
    assert viewer.is_taken
    other.until("early0", "early8", "late8")
    visits[1].say("more")
    other.until("w1: say.lsp 1: more")
    other.close()
    wait_until(lambda: all(one.is_free for one in visits), "free at all workers")
    wait_until(lambda: [files(pid) for pid in workers_of(served).values()] <= open_files, "they talk no more")


def files(pid: int) -> int:
    """How many files, sockets among them, a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_of_two_that_come_at_once_one_stays(served: Served) -> None:
    for number in range(10):
        visits = [Visit(served, number) for number in (0, 2)]
        with ThreadPoolExecutor() as threads:
            viewers = list(threads.map(Visit.view, visits))
        probe = Visit(served, 1)
        probe.say(f"stays{number}")
        gone = [one for one in viewers if not sees(one, f"stays{number}")]
        assert [one.is_taken for one in gone] == [True], "one has gone, and was told why"
        wait_until(lambda probe=probe: not probe.is_free)
        for one in viewers:
            one.close()
        wait_until(lambda probe=probe: probe.is_free)


def sees(viewer: Viewer, text: str) -> bool:
    """Whether a viewer is shown a text."""
    try:
        viewer.until(text)
    except AssertionError:
        return False
    return True


def test_data_for_a_slow_viewer_is_bounded_and_counted(served: Served) -> None:
    visits = [Visit(served, number) for number in range(3)]
    viewer = visits[1].view()
    viewer.until("who.lsp")
    for number in (0, 2, 0, 2):
        visits[number].ask("/flood.lsp")
    visits[2].say("the-end")
    lines = viewer.until("say.lsp 1: the-end")
    shown = sum("flood.lsp 1: number" in line for line in lines)
    missed = sum(int(count) for count in re.findall(r"^\.\.\. (\d+) lines were dropped", "\n".join(lines), re.M))
    others = sum("flood.lsp?" in line or "/flood.lsp " in line for line in lines)
    assert shown < 5000
    assert 12_000 <= shown + missed <= 12_000 + 4 - others


def test_silent_or_killed_workers_delay_no_others(served: Served) -> None:
    near, pids = Visit(served, 0), workers_of(served)
    viewer = Visit(served, 0).view()
    os.kill(pids[2], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    for number in range(5):
        begun_s = undisturbed_s(pids[0])
        near.say(f"quick{number}")
        viewer.until(f"quick{number}")
        assert undisturbed_s(pids[0]) - begun_s < 1
    # They come again, with what they said meanwhile; nothing of it twice.
    os.kill(pids[2], signal.SIGCONT)
    Visit(served, 2).say("awake")
    served.wait_for(r"^w1: process \d+ serves$")
    Visit(served, 1).say("anew")
    viewer.until("w2: say.lsp 1: awake", "w1: say.lsp 1: anew")
    assert len(viewer.said()) == len(set(viewer.said()))

    # A viewer that comes while a worker is silent has the past of the others soon, and that one's later.
    third = Visit(served, 2)
    os.kill(workers_of(served)[1], signal.SIGSTOP)
    begun_s = undisturbed_s(pids[0], pids[2])
    later = third.view()
    later.until("quick4", "awake")
    assert undisturbed_s(pids[0], pids[2]) - begun_s < 2
    os.kill(workers_of(served)[1], signal.SIGCONT)
    later.until("anew")


def test_a_stopped_viewer_keeps_its_place_and_returns(served: Served) -> None:
    far, pids = Visit(served, 2), workers_of(served)
    viewer = Visit(served, 1).view()
    viewer.until("who.lsp")
    os.kill(pids[1], signal.SIGSTOP)
    for _ in range(3):
        far.ask("/flood.lsp")
    # It took nothing for 10 s: its worker is not told anything any more, until it asks again.
    wait_until(lambda: far.is_free, "given up")
    os.kill(pids[1], signal.SIGCONT)
    wait_until(lambda: not far.is_free, "asked again")
    far.say("again")
    lines = viewer.until("w2: say.lsp 1: again")
    numbers = [int(one) for one in re.findall(r"^w2: flood.lsp 1: number\s+(\d+)", "\n".join(lines), re.M)]
    missed = sum(int(count) for count in re.findall(r"^\.\.\. (\d+) lines were dropped", "\n".join(lines), re.M))
    assert 9000 <= len(numbers) + missed <= 9004


def long(old: Visit) -> None:
    """A request that is not answered before its process ends."""
    with pytest.raises(http.client.RemoteDisconnected):
        old.ask("/long.lsp")


def test_hot_restart(served: Served, tmp_path: Path) -> None:
    (tmp_path / "app" / "slow").touch()
    old = Visit(served, 0)
    viewer = Visit(served, 2).view()  # the last that is replaced
    viewer.until("who.lsp")
    waiting = threading.Thread(target=long, args=(old,))  # so long the old process is there
    waiting.start()
    restarting = threading.Thread(target=command, args=("restart", "--pid", served.process.pid))
    restarting.start()
    served.wait_for(r"^w0: process \d+ serves$", 30)
    Visit(served, 0).say("new")
    now = workers_of(served)
    begun_s = undisturbed_s(now[0], now[2])
    viewer.until("w0: say.lsp 1: new")
    assert undisturbed_s(now[0], now[2]) - begun_s < 2
    restarting.join()
    waiting.join()
    # The viewer's own worker was replaced, too: whoever comes next has the trace of the new ones.
    wait_until(lambda: Visit(served, 1).is_free)
    again = Visit(served, 1).view()
    Visit(served, 2).say("after")
    again.until("w0: say.lsp 1: new", "w2: say.lsp 1: after")
