"""Answers of the admin API: those of this process, and those of all workers as one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smqrt.errors import ArgumentError, ClosedError
from smqrt.http.headers import HttpError
from smqrt.operations import all_workers
from smqrt.operations.all_workers import MERGES, AllWorkers, handle, response_of
from smqrt.operations.snapshots import NotFoundError
from smqrt.smq.gevent_broker import GeventBroker


def test_metrics_of_workers_are_merged() -> None:
    first = '# HELP a_total A.\n# TYPE a_total counter\na_total{x="1{"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    second = '# HELP b B.\n# TYPE b gauge\nb 3.0\n# HELP a_total A.\n# TYPE a_total counter\na_total{x="}"} 4.0\n'
    assert all_workers.metrics({0: first, 1: second}) == (
        '# HELP a_total A.\n# TYPE a_total counter\na_total{worker="0",x="1{"} 1.0\na_total{worker="1",x="}"} 4.0\n'
        '# HELP b B.\n# TYPE b gauge\nb{worker="0"} 2.0\nb{worker="1"} 3.0\n'
    )


def test_limits_are_merged_by_name() -> None:
    """A worker that has not imported a module does not have its limits."""

    def row(
        name: str, reached: int, last_at: str | None = None, used: int | None = None, bound: int | None = None
    ) -> dict[str, object]:
        return {"name": name, "reached": reached, "last_at": last_at, "used": used, "bound": bound}

    answers = {
        0: [row("a", 1), row("b", 2, "2026-01-01", 7, 10), row("c", 4)],
        1: [row("b", 8, "2026-01-02", 3, 20), row("d", 16)],
    }
    merged = [row("a", 1), row("b", 10, "2026-01-02", 7, 10), row("c", 4), row("d", 16)]
    assert all_workers.limits(answers, {}) == merged, "the use is that of the fullest worker"


def page(*rows: dict[str, Any], after: str | None = None, total: int | None = None) -> dict[str, Any]:
    return {"items": list(rows), "after": after, "total": len(rows) if total is None else total}


def peer(hub: int, etid: int, **more: Any) -> dict[str, Any]:
    return {"hub": hub, "etid": etid, "id": f"{hub}.{etid}", **more}


def test_pages_of_clients_continue_across_workers() -> None:
    answers = {0: page(peer(1, 4), peer(1, 7), total=9, after="1.7"), 1: page(peer(1_000_001, 2), total=1)}
    merged: Any = MERGES["peers"](answers, {"limit": "2"})
    assert [(one["id"], one["worker"]) for one in merged["items"]] == [("1.4", 0), ("1.7", 0)]
    assert (merged["after"], merged["total"]) == ("1.7", 10)
    merged = MERGES["peers"]({0: page(peer(1, 4)), 1: page(peer(1_000_001, 2))}, {"limit": "1"})
    assert merged["after"] == "1.4", "each has shown all of its own"
    merged = MERGES["peers"]({0: page(), 1: page(peer(1_000_001, 2))}, {})
    assert ([one["id"] for one in merged["items"]], merged["after"]) == (["1000001.2"], None)


def test_sorted_clients_of_all_have_no_next_page() -> None:
    answers = {0: page(peer(1, 4, dropped=5), peer(1, 7, dropped=1)), 1: page(peer(2, 2, dropped=3))}
    merged: Any = MERGES["peers"](answers, {"sort": "dropped", "limit": "2"})
    assert ([one["dropped"] for one in merged["items"]], merged["after"]) == ([5, 3], None)
    answers = {0: page(peer(1, 4, connected_s=5)), 1: page(peer(2, 2, connected_s=3))}
    merged = MERGES["peers"](answers, {"sort": "newest"})
    assert [one["connected_s"] for one in merged["items"]] == [3, 5]


def test_the_newest_records_of_all_come_first() -> None:
    answers = {
        0: page({"at": "01", "number": 1}, {"at": "03", "number": 2}, after="1"),
        1: page({"at": "02", "number": 1}),
    }
    for name in ("closed", "log"):
        merged: Any = MERGES[name](answers, {"limit": "2"})
        assert [(one["at"], one["worker"]) for one in merged["items"]] == [("03", 0), ("02", 1)]
        assert (merged["after"], merged["total"]) == (None, 3)


def test_an_application_that_fails_anywhere_is_shown_failed() -> None:
    def app(name: str, state: str) -> dict[str, Any]:
        return {"name": name, "state": state}

    answers = {
        0: [app("a", "running"), app("b", "failed"), app("c", "running")],
        1: [app("a", "failed"), app("b", "running"), app("c", "running")],
        2: [app("a", "changing"), app("b", "stopped")],
    }
    assert MERGES["apps"](answers, {}) == [app("a", "failed") | {"worker": 1}, app("b", "failed"), app("c", "running")]


def test_last_trace_lines_are_those_of_all_workers() -> None:
    def lines(app: str, *times: int) -> dict[str, Any]:
        return {"app": app, "lines": [{"at": at} for at in times]}

    answers = {0: [lines("a", 1, 4)], 1: [lines("a", 2, 3), lines("b", 5)]}
    assert MERGES["traces"](answers, {"limit": "2"}) == [
        {"app": "a", "lines": [{"at": 3, "worker": 1}, {"at": 4, "worker": 0}]},
        {"app": "b", "lines": [{"at": 5, "worker": 1}]},
    ]


def test_counters_of_listeners_are_added_by_name() -> None:
    answers = {
        0: [{"name": "http", "port": 80, "accepted": 1, "open": 1}, {"name": "https", "accepted": 5}],
        1: [{"name": "https", "accepted": 7}, {"name": "http", "port": 80, "accepted": 2, "open": 0, "refused": 4}],
    }
    http, https = MERGES["listeners"](answers, {})  # type: ignore[misc]
    assert (http["port"], http["accepted"], http["open"], http["refused"], https["accepted"]) == (80, 3, 1, 4, 12)


def test_a_server_is_ready_when_all_workers_are() -> None:
    def one(number: int, *obstacles: str) -> dict[str, Any]:
        counters = dict.fromkeys(all_workers._WORKER_KEYS, number)
        return counters | {"pid": number, "phase": "serving", "obstacles": list(obstacles), "ready": not obstacles}

    merged: Any = MERGES["server"]({0: one(1), 1: one(2, "late"), 2: one(4, "late")}, {})
    assert (merged["peers"], merged["loop_lag_s"], merged["pid"]) == (7, 4, 1)
    assert (merged["obstacles"], merged["ready"]) == (["late"], False)
    assert [(worker["worker"], worker["pid"]) for worker in merged["workers"]] == [(0, 1), (1, 2), (2, 4)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotFoundError("gone"), 404),
        (ArgumentError("wrong"), 400),
        (ClosedError("closed"), 409),
        (HttpError(503, "later"), 503),
    ],
)
def test_errors_are_answers_with_a_status(error: Exception, status: int) -> None:
    def fail() -> object:
        raise error

    assert response_of(fail) == (status, {"error": error.detail if isinstance(error, HttpError) else str(error)})
    assert response_of(lambda: [1]) == (200, [1])


PARTS: Any = SimpleNamespace(applications=[], drain=None)


@pytest.mark.parametrize(
    ("words", "arguments", "body", "message"),
    [
        (["nothing"], {}, None, "There is no such address"),
        (["nothing"], {}, {}, "There is nothing to do at this address"),
        (["hubs"], {"x": "1"}, None, "x: this address takes no arguments"),
        (["hubs", "x"], {}, None, "hub: 'x' is not a number"),
        (["hubs", "77"], {}, None, "there is no hub 77"),
        (["topics"], {}, None, "hub: an argument is needed"),
        (["peers"], {"x": "1"}, None, "x: unknown argument; the arguments are hub, after"),
        (["peers", "1", "disconnect"], {}, {}, "'1' is not the id of a client"),
        (["peers", "1.2", "disconnect"], {}, {"text": "x" * 70_000}, "text: a string of at most"),
        (["peers", "1.2", "disconnect"], {}, {"text": 5}, "text: a string of at most"),
        (["hubs", "1", "publish"], {}, {"topic": "a", "data": {}}, "data: a string is needed; send JSON as a string"),
        (["hubs", "1", "publish"], {}, {"data": "x"}, "topic: a name or a number is needed"),
        (["hubs", "1", "publish"], {}, {"topic": True}, "topic: a name or a number is needed"),
        (["hubs", "1", "publish"], {}, {"to": "a"}, "to: unknown argument"),
        (["drain"], {}, {"on": 1}, "on: true or false is needed"),
        (["apps", "shop", "restart"], {}, {}, "there is no application 'shop'"),
    ],
)
def test_wrong_requests_say_what_is_wrong(words: list[str], arguments: dict[str, str], body: Any, message: str) -> None:
    status, answer = response_of(lambda: handle(PARTS, words, arguments, body))
    assert status in (400, 404)
    assert message in answer["error"]  # type: ignore[index]


def test_a_restarting_application_is_not_restarted_again() -> None:
    restarted: list[str] = []
    facts = {"name": "", "uri": "/", "error": None, "running": True}
    app = SimpleNamespace(changing=True, **facts)
    parts: Any = SimpleNamespace(applications=[app], restart=lambda one: restarted.append(one.uri))
    with pytest.raises(ArgumentError, match="the application / is already starting or stopping"):
        handle(parts, ["apps", "-", "restart"], {}, {})
    app.changing = False
    assert handle(parts, ["apps", "-", "restart"], {}, {}) == {"name": "", "state": "running", "error": None}
    assert restarted == ["/"]


def test_a_message_is_published_to_names_and_numbers(smq: Any, broker: GeventBroker) -> None:
    number = broker.create(b"lamp")
    for topic in ("lamp", number):
        body = {"topic": topic, "data": "ä", "subtopic": ""}
        answer: Any = handle(PARTS, ["hubs", str(broker.number), "publish"], {}, body)
        assert (answer["topic"], answer["bytes"]) == (topic, 2)


class Workers:
    """Calls of the workers 1 and 2; the former answers as the test says, the latter never."""

    others = [1, 2]

    def __init__(self, **reply: Any) -> None:
        self.reply = reply
        self.asked: list[tuple[int, Any]] = []

    def ask(self, number: int, question: Any, within_s: float = 1) -> Any:
        self.asked.append((number, question))
        return self.reply if number == 1 else None

    def ask_each(self, questions: dict[int, Any]) -> dict[int, Any]:
        self.asked += questions.items()
        return {1: self.reply} if 1 in questions else {}


def test_an_action_goes_to_the_worker_of_its_hub() -> None:
    workers: Any = Workers(status=404, answer={"error": "gone"})
    together = AllWorkers(PARTS, workers)
    words = ["peers", "1000001.5", "disconnect"]
    assert together.answer(words, {}, {}) == (404, {"error": "gone"})
    assert workers.asked == [(1, {"do": "act", "words": words, "body": {}})]
    words, body = ["hubs", "1000001", "mqtt-retained", "delete"], {"filter": "#"}
    assert together.answer(words, {}, body) == (404, {"error": "gone"})
    assert workers.asked.pop() == (1, {"do": "act", "words": words, "body": body})
    with pytest.raises(HttpError, match="Worker 2 does not answer") as error:
        together.answer(["hubs", "2000001", "publish"], {}, {})
    assert error.value.status == 503
    assert together.answer(["hubs", "1", "publish"], {}, {"topic": "a"})[0] == 404, "of this worker, which has none"
    assert len(workers.asked) == 2


def test_an_action_for_all_ends_at_the_first_error() -> None:
    app = SimpleNamespace(changing=False, name="shop", uri="/shop/", error=None, running=True)
    parts: Any = SimpleNamespace(applications=[app], restart=lambda one: None)
    workers: Any = Workers(status=400, answer={"error": "changing"})
    assert AllWorkers(parts, workers).answer(["apps", "shop", "restart"], {}, {}) == (400, {"error": "changing"})
    assert [number for number, _ in workers.asked] == [1]
    parts.applications = []
    assert AllWorkers(parts, workers).answer(["apps", "shop", "restart"], {}, {})[0] == 404
    assert len(workers.asked) == 1, "not asked after an error of this worker"


def test_a_silent_worker_is_left_out_of_lists() -> None:
    workers: Any = Workers(answers=[(200, [{"id": 1_000_001}])], cost_s=0.25)
    assert AllWorkers(PARTS, workers).get("hubs") == [{"id": 1_000_001, "worker": 1}]
    with pytest.raises(ArgumentError, match="Worker 2 does not answer"):
        AllWorkers(PARTS, workers).get("hubs", "2000001")
