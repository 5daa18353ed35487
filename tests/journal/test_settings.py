"""Settings of a journal: what may be written, and what each mistake is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import ArgumentError
from smqrt.journal.settings import CompactSettings, JournalSettings, names, parse, parse_duration, parse_size

FOLDER = Path("/srv/factory")


@pytest.mark.parametrize("value", [None, False])
def test_no_journal(value: Any) -> None:
    assert parse(value, FOLDER) is None


@pytest.mark.parametrize("value", [True, {}])
def test_the_defaults(value: Any) -> None:
    found = parse(value, FOLDER)
    assert found == JournalSettings(path=FOLDER / ".journal", name="factory")
    assert (found.flush_ms, found.sync, found.sync_s, found.retain_s) == (10, "interval", 1, 7 * 86400)
    assert (found.max_bytes, found.hard_bytes, found.segment_bytes) == (20 * 10**9, 40 * 10**9, 64 * 10**6)


@pytest.mark.parametrize(
    ("value", "path"),
    [("data", FOLDER / "data"), ("/var/journal", Path("/var/journal")), (Path("x/y"), FOLDER / "x/y")],
)
def test_a_path(value: Any, path: Path) -> None:
    assert parse(value, FOLDER) == parse({"path": value}, FOLDER) == JournalSettings(path=path, name="factory")


def test_a_folder_whose_name_is_no_name() -> None:
    found = parse(True, Path("/srv/my app"))
    assert found
    assert found.name == "journal"


def test_everything() -> None:
    compact = {"after": "1h", "json": "variant", "schema": {"site1/#": "temp double"}}
    values = {
        "path": "j", "name": "main", "node": "n-2", "topics": ["a/#"], "exclude": "a/b", "direct": False, "flush_ms": 5,
        "sync": "200ms", "retain": "30d", "max_bytes": "1GB", "hard_bytes": "2 GiB", "segment_bytes": "1MB",
        "reader_timeout_s": "2d", "min_free_bytes": "5GB", "compact": compact,
    }  # fmt: skip
    assert sorted(values) == sorted(names())
    assert parse(values, FOLDER) == JournalSettings(
        FOLDER / "j", "main", "n-2", ("a/#",), ("a/b",), False, 5, "interval", 0.2, 30 * 86400, 10**9, 2 * 2**30,
        2 * 86400, 5 * 10**9, 10**6, CompactSettings(3600, "variant", {"site1/#": "temp double"}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "hard_bytes"),
    [({"max_bytes": "3GB"}, 6 * 10**9), ({"max_bytes": None}, None), ({"hard_bytes": None}, None)],
)
def test_the_hard_limit_follows_the_soft_one(value: Any, hard_bytes: int | None) -> None:
    found = parse(value, FOLDER)
    assert found is not None
    assert found.hard_bytes == hard_bytes


@pytest.mark.parametrize("word", ["publish", "always"])
def test_sync_as_a_word(word: str) -> None:
    found = parse({"sync": word}, FOLDER)
    assert found
    assert (found.sync, found.sync_s) == (word, 1)


def test_limits_that_are_off() -> None:
    found = parse({"retain": None, "max_bytes": None, "compact": False}, FOLDER)
    assert found
    assert (found.retain_s, found.max_bytes, found.compact) == (None, None, None)
    compacted = parse({"compact": True}, FOLDER)
    assert compacted
    assert compacted.compact == CompactSettings(600)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "journal: 3 is none of true, false, a path, or settings such as topics and retain"),
        (
            {"topic": "a"},
            "journal.topic: there is no such setting; there are path, name, node, topics, exclude, direct",
        ),
        ({"path": ""}, "journal.path: '' is no path"),
        ({"path": 3}, "journal.path: 3 is no path"),
        ({"path": "s3a://bucket/j"}, "journal.path: s3a://bucket/j is no folder of this machine: a hub writes"),
        ({"name": "a/b"}, "journal.name: 'a/b' is no name; use up to 64 letters"),
        ({"node": ".."}, "journal.node: '..' is no name"),
        ({"topics": "a/#/b"}, "journal.topics: 'a/#/b' has a '#' inside"),
        ({"topics": 3}, "journal.topics: 3 is no list of topic filters"),
        ({"exclude": [3]}, "journal.exclude: 3 is no topic filter"),
        ({"direct": "no"}, "journal.direct: 'no' is neither true nor false"),
        ({"flush_ms": 0}, "journal.flush_ms: 0 is no number of milliseconds from 0.1 to 60000"),
        ({"flush_ms": True}, "journal.flush_ms: True is no number"),
        ({"sync": "never"}, "journal.sync: 'never' is none of 'publish', 'always' or a time from '10ms' to '1h'"),
        ({"retain": "7 parsecs"}, "journal.retain: '7 parsecs' is no duration; it's a number and a unit"),
        ({"retain": 0}, "journal.retain: 0 would keep nothing"),
        ({"max_bytes": "lots"}, "journal.max_bytes: 'lots' is no size; it's a number and a unit, such as '64MB'"),
        ({"max_bytes": "1MB"}, "journal.max_bytes: 1000000 is less than two segments"),
        ({"hard_bytes": "1GB"}, "journal.hard_bytes: 1000000000 is less than max_bytes"),
        ({"reader_timeout_s": 0}, "journal.reader_timeout_s: 0 would keep nothing for pipelines"),
        ({"segment_bytes": 5}, "journal.segment_bytes: 5 is too small; it's at least 65536 bytes"),
        ({"segment_bytes": None}, "journal.segment_bytes: None is no size"),
        ({"compact": 3}, "journal.compact: 3 is neither true, false nor settings: after, json, schema"),
        ({"compact": {"afer": 1}}, "journal.compact: there is no setting 'afer'; there are after, json, schema"),
        ({"compact": {"after": "x"}}, "journal.compact: 'x' is no duration"),
        ({"compact": {"json": "text"}}, "journal.compact: json: 'text' is not 'variant'"),
        ({"compact": {"schema": ["a"]}}, "journal.compact: schema: it's DDL by topic filter"),
        ({"compact": {"schema": {"a#": "x int"}}}, "journal.compact: topics: 'a#' has a '#' inside"),
    ],
    ids=str,
)
def test_mistakes(value: Any, says: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(value, FOLDER)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("200 ms", 0.2),
        ("10m", 600),
        ("7d", 604800),
        ("1 hour", 3600),
        ("5 minutes", 300),
        ("1.5s", 1.5),
        ("2w", 1209600),
    ]
    + [(3, 3), ("90 Seconds", 90), ("50us", 5e-5), (0.5, 0.5)],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "10", "m", "-1s", "1 fortnight", None, True, -3, float("inf"), float("nan"), "1s2"]
)
def test_no_durations(text: Any) -> None:
    with pytest.raises(ArgumentError, match="is no duration; it's a number and a unit, such as '200 ms'"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MB", 64 * 10**6), ("1 KiB", 1024), ("20GB", 20 * 10**9), ("1.5mib", 3 << 19), ("7", 7), (9, 9)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1B", "1XB", None, True, -1, 1.5])
def test_no_sizes(text: Any) -> None:
    with pytest.raises(ArgumentError, match="is no size; it's a number and a unit"):
        parse_size(text)
