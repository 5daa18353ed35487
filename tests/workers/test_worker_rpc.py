"""Requests between workers over real sockets: answers, silent workers, news."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from gevent import socket

from smqrt.errors import ArgumentError
from smqrt.operations.all_workers import AllWorkers
from smqrt.workers import worker_rpc
from smqrt.workers.worker_rpc import END, KIND, Message, News, WorkerPlace, WorkerRpc
from tests.support.waiting import wait_until

Make = Callable[..., WorkerRpc]


@pytest.fixture
def directory() -> Iterator[Path]:
    """A folder with a short name: paths of Unix sockets are bounded."""
    with tempfile.TemporaryDirectory(prefix="f-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def make(directory: Path) -> Iterator[Make]:
    """Makes worker N of three."""
    made: list[WorkerRpc] = []

    def make_one(number: int, **answers: Callable[[Message], Message]) -> WorkerRpc:
        one = WorkerRpc(WorkerPlace(number, 3, b"", directory))
        one.server.answers.update(answers)
        made.append(one)
        return one

    yield make_one
    for one in made:
        one.server.close()
        one.server.close()


def says(text: str) -> Callable[[Message], Message]:
    return lambda question: {"do": "answer", "answer": [text, question["of"]]}


def test_answers_come_from_all_running_workers(make: Make) -> None:
    first, second = make(0), make(1, name=says("second"))
    second.server.open()
    assert first.others == [1, 2]
    assert first.ask_all({"do": "name", "of": 5}) == {1: {"do": "answer", "answer": ["second", 5]}}
    make(2, name=says("third")).server.open()
    assert first.ask_all({"do": "name", "of": 6})[2]["answer"] == ["third", 6]
    assert first.ask(1, {"do": "what nobody knows"}) is None
    # Another process in its place, as at a hot restart.
    make(1, name=says("another")).server.open()
    second.server.close()
    assert (first.ask(1, {"do": "name", "of": 7}) or {})["answer"] == ["another", 7]


class Silent:
    """A worker that is held: its kernel takes connections, nobody answers."""

    def __init__(self, directory: Path, number: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(WorkerPlace(number, 3, b"", directory).socket_path(number, KIND)))
        self._socket.listen(16)
        self.questions = 0
        self._counting = gevent.spawn(self._count)

    def _count(self) -> None:
        self._taken = []
        while True:
            self._taken.append(self._socket.accept())
            self.questions += 1

    def close(self) -> None:
        self._counting.kill()
        self._socket.close()


def test_a_silent_worker_is_skipped_for_a_time(make: Make, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(worker_rpc, "ANSWER_S", 0.3)
    monkeypatch.setattr(worker_rpc, "QUESTION_S", 0.2)
    monkeypatch.setattr(worker_rpc, "monotonic", lambda: monotonic() + now_s[0])
    first, silent = make(0), Silent(directory, 1)
    make(2, name=says("third")).server.open()
    question = {"do": "name", "of": 1}
    begun_s = monotonic()
    assert list(first.ask_all(question)) == [2]
    assert 0.2 < monotonic() - begun_s < 2
    begun_s = monotonic()
    for _ in range(50):
        assert list(first.ask_all(question)) == [2]
    assert monotonic() - begun_s < 0.2 * 50, "nobody waits for it any more"
    assert silent.questions == 1
    # It is asked again, and once again only as long as it is silent.
    now_s[0] += worker_rpc.SILENT_S
    for _ in range(5):
        assert list(first.ask_all(question)) == [2]
    assert silent.questions == 2
    silent.close()
    make(1, name=says("awake")).server.open()
    assert list(first.ask_all(question)) == [2]
    now_s[0] += worker_rpc.SILENT_S
    assert list(first.ask_all(question)) == [1, 2]


def test_news_continue_until_closed_and_are_requested_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_rpc, "AGAIN_S", 0.05)
    told: list[Any] = []
    open_news: list[int] = []

    def news(number: int) -> Callable[[Message], News]:
        def tell(question: Message) -> News:
            open_news.append(number)
            try:
                for count in range(100):
                    yield {"do": "news", "answer": [number, count, question["of"]]}
                    gevent.sleep(0.01)
                yield END
            finally:
                open_news.remove(number)

        return tell

    first, second = make(0), make(1)
    second.server.news["news"] = news(1)
    asked = iter(range(10))
    following = gevent.spawn(first.follow, 1, lambda: {"do": "news", "of": next(asked)}, lambda said: told.append(said))
    gevent.sleep(0.1)
    second.server.open()  # it was not there at first
    wait_until(lambda: len(told) > 3)
    second.server.close()
    wait_until(lambda: not open_news)
    another = make(1)
    another.server.news["news"] = news(2)
    another.server.open()
    wait_until(lambda: told[-1]["answer"][0] == 2, told)
    assert told[-1]["answer"][2] > told[0]["answer"][2], "asked anew"
    following.kill()
    wait_until(lambda: not open_news, "who has nobody to tell stops")
    # What is complete is not asked for again.
    another.server.news["news"] = lambda question: (one for one in ({"do": "news", "answer": 1}, END))
    assert list(first.events([1], {"do": "news"})) == [1]


def test_several_queries_are_one_question_to_each_worker(make: Make) -> None:
    asked: list[Any] = []

    def answers(question: Message) -> Message:
        asked.append([words for words, _ in question["asked"]])
        found = {"limits": [LIMIT], "clusters": [{"node": "far"}], "hubs": {"id": 2_000_001}}
        return {"do": "answers", "answers": [(200, found[words[0]]) for words, _ in question["asked"]], "cost_s": 0.25}

    first = make(0)
    make(2, answers=answers).server.open()
    bodies, vm = SimpleNamespace(held_bytes=0, limit_bytes=1), SimpleNamespace(memory_bytes=lambda: 0)
    parts: Any = SimpleNamespace(http=SimpleNamespace(bodies=bodies), vm=vm)
    together = AllWorkers(parts, first)
    results = together.get_many(
        [(("limits",), {}), (("clusters",), {}), (("hubs", "2000001"), {}), (("hubs", "1000001"), {})]
    )
    assert asked == [[["limits"], ["clusters"], ["hubs", "2000001"]]]
    limits, clusters, hub, nobody = results.answers
    assert [one["reached"] for one in limits if one["name"] == LIMIT["name"]] == [7]
    assert [one["node"] for one in clusters] == ["far"]
    assert (hub, nobody) == ({"id": 2_000_001}, None)
    assert results.cost_s >= 0.25, "the CPU time of the worker that needed most"
    with pytest.raises(ArgumentError, match="Worker 1 does not answer"):
        together.get("hubs", "1000001")


LIMIT = {"name": "x", "rule": "", "setting": "", "reached": 7, "last": None, "last_at": None}
LIMIT |= {"title": "x", "unit": "", "used": None, "bound": None}
