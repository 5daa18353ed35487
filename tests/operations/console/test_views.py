"""Data of the console's pages: names, source lines of errors, the log, live views."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gevent
import pytest

from smqrt.errors import ArgumentError
from smqrt.operations.all_workers import Results
from smqrt.operations.console import source_lines as sources
from smqrt.operations.console.gauges import PacedCache, Sampler, hub_choices, hub_names, merged_hubs
from smqrt.operations.console.live_views import MAX_PAGES, LiveViews
from smqrt.operations.console.views import closed_clients, query_rows, shown_name
from smqrt.operations.logs import LogTail
from smqrt.process.current_process import AppScope, running_app
from tests.support.waiting import wait_until


def test_names_are_cut_and_printable() -> None:
    assert shown_name("lamp") == "lamp"
    assert shown_name("a\x1b[2J\u202egnp.exe\n") == "a\\x1b[2J\\u202egnp.exe\\n"
    long = shown_name("x" * 65_000)
    assert len(long) < 160
    assert long.endswith("… (65,000 characters)")


# ---- sources


PRELOAD = "".join(f"local line{number} = {number}\n" for number in range(1, 21))


def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "shop.zip", "w") as archive:
        archive.write(folder / "shop" / ".preload", ".preload")
    return folder / "shop.zip"


@pytest.mark.parametrize("application", [lambda folder: folder / "shop", zipped], ids=["folder", "zip"])
def test_the_lines_around_an_error(tmp_path: Path, application: Callable[[Path], Path]) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / ".preload").write_text(PRELOAD)
    found: Any = sources.source_lines(
        application(tmp_path), "shop/.preload:10: attempt to index a nil value\ntraceback"
    )
    assert (found["file"], found["line"]) == ("shop/.preload", 10)
    assert [number for number, _ in found["lines"]] == list(range(6, 15))
    assert found["lines"][4] == [10, "local line10 = 10"]


@pytest.mark.parametrize(
    "error",
    [
        "it just failed",
        "shop/.preload:99: beyond the end",
        "shop/../../secret:1: elsewhere",
        "/etc/passwd:1: elsewhere",
        "shop/link:1: a link out of the folder",
        "shop/missing.lua:1: no such file",
        "shop/:1: no file",
        "x" * 100_000 + ":1: long",
    ],
)
def test_files_outside_the_application_are_not_read(tmp_path: Path, error: str) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / ".preload").write_text(PRELOAD)
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / "shop" / "link").symlink_to(tmp_path / "secret")
    assert sources.source_lines(tmp_path / "shop", error) is None


# ---- the log


@pytest.fixture
def tail() -> Iterator[LogTail]:
    made = LogTail()
    made.start()
    made.start()
    yield made
    made.stop()
    made.stop()


def test_errors_and_traces_are_kept(tail: LogTail, tmp_path: Path) -> None:
    logging.getLogger("smqrt.trace").setLevel(logging.INFO)
    log, traces = logging.getLogger("smqrt.console.test"), logging.getLogger("smqrt.trace")
    log.warning("first")
    try:
        raise ValueError("\x1b[31mred")
    except ValueError:
        log.exception("second")
    newest, oldest = tail.newest_first()
    assert (newest.level, oldest.text) == ("ERROR", "first")
    assert newest.text.startswith("second\nTraceback")
    assert newest.text.endswith("ValueError: \\x1b[31mred")
    assert (tail.errors, tail.warnings, tail.errors_since(0)) == (1, 1, 1)
    traces.info("nobody's")
    with running_app(AppScope(tmp_path)):
        traces.info("mine")
    assert [[one.text for one in tail.traces(folder)] for folder in (None, tmp_path)] == [["nobody's"], ["mine"]]
    tail.stop()
    log.warning("third")
    assert tail.warnings == 1


# ---- live views


class FakeView:
    """Counts its calls."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options, self.asked, self.closed = options, 0, False

    def data(self) -> dict[str, object]:
        self.asked += 1
        if self.options.get("fails"):
            raise RuntimeError("out of order")
        return {"size": "x" * int(self.options.get("size", 1))}

    def close(self) -> None:
        self.closed = True


class Pages:
    """Live views whose pages keep what they receive."""

    def __init__(self) -> None:
        self.views: list[FakeView] = []
        self.sent: list[tuple[int, str]] = []
        self.beats: list[str] = []
        self.live_views = LiveViews(
            self.make, lambda: {"now": 1}, lambda text, page: self.sent.append((page, text)), self.beats.append
        )

    def make(self, name: str, options: Mapping[str, Any]) -> FakeView:
        if name == "none":
            raise ArgumentError("view: there is none")
        self.views.append(FakeView(options))
        return self.views[-1]

    def look(self, page: int, view: str = "peers", serial: int = 1, **options: Any) -> None:
        self.live_views.request(page, {"view": view, "options": options, "serial": serial})


@pytest.fixture
def pages() -> Iterator[Pages]:
    made = Pages()
    yield made
    made.live_views.close()
    made.live_views.close()


def test_pages_with_the_same_request_share_a_view(pages: Pages) -> None:
    pages.look(7, serial=3)
    pages.look(8, serial=4)
    wait_until(lambda: len(pages.sent) == 2)
    answer = '{"data":{"size":"x"}}'
    assert pages.sent == [(7, f"3 1 1\n{answer}"), (8, f"4 1 1\n{answer}")]
    assert len(pages.views) == 1
    assert pages.beats
    gevent.sleep(0.3)
    assert len(pages.sent) == 2  # nothing is new


def test_hidden_page_gets_no_updates(pages: Pages) -> None:
    pages.look(7)
    wait_until(lambda: pages.sent)
    pages.look(7, view="")
    (view,) = pages.views
    assert view.closed
    wait_until(lambda: not pages.live_views.is_updating)
    asked, beats = view.asked, len(pages.beats)
    gevent.sleep(0.2)
    assert (view.asked, len(pages.beats), len(pages.live_views)) == (asked, beats, 0)
    pages.look(7)
    wait_until(lambda: len(pages.sent) == 2)


def test_long_answers_are_split_and_too_long_ones_rejected(pages: Pages) -> None:
    pages.look(7, size=130_000)
    wait_until(lambda: len(pages.sent) == 3)
    heads, pieces = zip(*(text.split("\n") for _, text in pages.sent), strict=True)
    assert heads == ("1 1 3", "1 2 3", "1 3 3")
    assert max(len(text) for _, text in pages.sent) <= 0xFFF0
    assert len(json.loads("".join(pieces))["data"]["size"]) == 130_000
    pages.look(7, size=2_000_000)
    wait_until(lambda: len(pages.sent) == 4)
    assert "too long for a page" in pages.sent[-1][1]


def test_failed_view_does_not_affect_others(pages: Pages) -> None:
    pages.look(7, fails=True)
    pages.look(8)
    wait_until(lambda: len(pages.sent) == 2)
    assert "see the log of the server" in dict(pages.sent)[7]
    assert "data" in dict(pages.sent)[8]
    pages.look(9, view="none", serial=2)
    assert pages.sent[-1] == (9, '2 1 1\n{"error":"view: there is none"}')


@pytest.mark.parametrize(
    "question", [None, [], "peers", {}, {"view": 1}, {"view": "peers"}, {"view": "peers", "options": {}, "serial": "1"}]
)
def test_invalid_requests_are_ignored(pages: Pages, question: object) -> None:
    pages.live_views.request(7, question)
    assert len(pages.live_views) == 0


def test_number_of_pages_is_limited(pages: Pages) -> None:
    for page in range(MAX_PAGES):
        pages.look(page)
    pages.look(1000)
    assert "close one of them" in pages.sent[-1][1]
    assert len(pages.live_views) == MAX_PAGES
    pages.live_views.remove(0)
    pages.look(1000)
    assert len(pages.live_views) == MAX_PAGES


def test_an_expensive_order_is_refreshed_less_often() -> None:
    now_s, asked = [0.0], []

    def look(hub: int) -> tuple[int, float]:
        asked.append(hub)
        return hub, 0.2

    paced = PacedCache(look, clock=lambda: now_s[0])
    for _ in range(60):
        assert paced.get(1) == 1
        now_s[0] += 1
    assert len(asked) == 3
    assert paced.get(2) == 2


# ---- figures of a server


def test_expensive_samples_are_reused_longer(smq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, cost_s, asked = [100.0], [0.001], []

    def get_many(queries: Any) -> Results:
        asked.append([words[0] for words, _ in queries])
        return Results([SERVER, [HUB], [{"name": "lua"}]], cost_s[0])

    server: Any = SimpleNamespace(get_many=get_many)
    sampler = Sampler(server, "limits", clock=lambda: now_s[0])
    assert sampler.sample().now["in_per_s"] == 0
    now_s[0] += 2
    monkeypatch.setitem(HUB, "messages", 300)
    seen = sampler.sample()
    assert (seen.now["in_per_s"], seen.now["loop_ms"], seen.hubs[0]["dropped"]) == (100.0, 20.0, 3)
    assert (seen.also, asked) == ({"limits": [{"name": "lua"}]}, [["server", "hubs", "limits"]] * 2)
    now_s[0] += 0.4
    assert sampler.sample() is seen, "that is the same moment"
    # What takes a worker long is done less often, whichever worker that is.
    cost_s[0] = 0.1
    now_s[0] += 1
    first = sampler.sample()
    now_s[0] += 15
    assert sampler.sample() is first
    now_s[0] += 10
    assert sampler.sample() is not first


SERVER = {"cpu_s": 1.0, "memory_bytes": 1 << 20, "loop_lag_5s_s": 0.02}
HUB: dict[str, Any] = {
    "id": 1, "peers": 2, "messages": 100, "copies": 50, "drops": {"unrouted": 9, "over_budget": 2, "closed": 1},
}  # fmt: skip


def test_hubs_with_the_same_key_are_merged() -> None:
    rows = [
        {"id": number, "key": key, "made_at": f"{key}/.preload:1", "app": "shop", "peers": peers, "topics": peers}
        | {"mqtt": {"sessions": number % 10, "retained": 1} if key == "shop/2" else None}
        for number, key, peers in (
            (1, "shop/1", 3),
            (2, "shop/2", 1),
            (1_000_001, "shop/1", 4),
            (1_000_003, "shop/2", 2),
            (1_000_004, "other/1", 5),
        )
    ]
    found = [(one["name"], one["ids"], one["peers"], one["topics"]) for one in merged_hubs(rows)]
    assert found == [
        ("shop/1/.preload:1", [1, 1_000_001], 7, 7),
        ("shop/2/.preload:1", [2, 1_000_003], 3, 3),
        ("other/1/.preload:1", [1_000_004], 5, 5),
    ]
    assert [one["retained"] for one in merged_hubs(rows)] == [0, 1, 0], "all workers have the same"
    assert [one["id"] for one in hub_choices(merged_hubs(rows))] == [1, 1_000_004, 2]
    assert [one["id"] for one in hub_choices(merged_hubs(rows), "sessions")] == [2, 1, 1_000_004], "those with sessions"


def test_hubs_have_the_names_of_their_applications() -> None:
    def hub(number: int, key: str, app: str, made_at: str = "") -> dict[str, Any]:
        return {"id": number, "key": key, "app": app, "made_at": made_at}

    names = hub_names(
        [
            hub(1, "chat", "chat", "chat/.preload:8"),
            hub(1_000_001, "chat", "chat", "chat/.preload:8"),
            hub(2, "shop/1", "shop\x1b", "shop/.preload:1"),
            hub(3, "shop/2", "shop\x1b", "shop/.preload:2"),
            hub(4, "script", "", "run.py:3"),
            hub(5, "none", ""),
        ]
    )
    assert names == {
        "chat": "chat",
        "shop/1": "shop/.preload:1",
        "shop/2": "shop/.preload:2",
        "script": "run.py:3",
        "none": "hub 5",
    }


# ---- queries and closed connections


def test_queries_with_an_error_come_first() -> None:
    running = {"name": "fine", "kind": "table", "state": "running", "lag_s": 0.2, "lag_rows": 3, "updated": 90.0}
    failed = {"name": "<b>", "state": "failed", "error": "no column \x1b[2J\nmore"}
    late = {"name": "late", "state": "waiting", "warning": "its state grows"}
    found: list[Any] = query_rows([{"path": "/shop", "state": "running", "queries": [running, failed, late]}], 100.0)
    assert [(one["name"], one["state"]) for one in found] == [
        ("<b>", "failed"),
        ("late", "waiting"),
        ("fine", "running"),
    ]
    assert found[0]["error"] == "no column \\x1b[2J\nmore"
    assert found[1]["error"] == "its state grows"
    assert (found[2]["lag_s"], found[2]["lag_rows"], found[2]["updated_ago_s"], found[2]["path"]) == (
        0.2,
        3,
        10,
        "/shop",
    )
    assert query_rows([{"path": "/shop", "state": "waiting"}], 100.0) == []


def test_closes_of_one_client_are_one_row() -> None:
    def close(number: int, uid: str, detail: str = "") -> dict[str, Any]:
        where = {"hub": 1, "uid": uid, "user": "", "address": "192.0.2.1", "detail": detail}
        return {"number": number, "at": f"12:0{number}", "connected_s": 1.5, "reason": "peer_closed", **where}

    found = closed_clients([close(4, "lamp"), close(3, "door"), close(2, "lamp"), close(1, "lamp", "late")])
    assert [(one["uid"], one["detail"], one["times"], one["at"]) for one in found] == [
        ("lamp", "", 2, "12:04"),
        ("door", "", 1, "12:03"),
        ("lamp", "late", 1, "12:01"),
    ]
