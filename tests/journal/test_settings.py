"""Settings of a journal: what may be written, and what each mistake is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smqrt.errors import ArgumentError
from smqrt.journal.settings import CompactSettings, JournalSettings, names, parse

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


def test_a_folder_with_an_invalid_name() -> None:
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
        (3, "journal must be true, false, a path, or a table of settings, not 3."),
        (
            {"topic": "a"},
            "journal.topic is not an option; did you mean topics? The options are: path, name, node,",
        ),
        ({"path": ""}, "journal.path must be a folder, relative to the application's, not ''."),
        ({"path": 3}, "journal.path must be a folder, relative to the application's, not 3."),
        ({"path": "s3a://bucket/j"}, "journal.path: s3a://bucket/j is not a folder of this machine: a hub writes"),
        ({"name": "a/b"}, "journal.name must be a name: up to 64 letters, digits, '.', '_' and '-', not 'a/b'."),
        ({"node": ".."}, "journal.node must be a name"),
        ({"topics": "a/#/b"}, "journal.topics must be a list of topic filters ('a/#/b' has a '#' inside"),
        ({"topics": 3}, "journal.topics must be a list of topic filters such as ['site1/#'], not 3."),
        ({"exclude": [3]}, "journal.exclude must be a list of topic filters (3 is not a topic filter"),
        ({"direct": "no"}, "journal.direct must be true or false, not 'no'."),
        ({"flush_ms": 0}, "journal.flush_ms must be a number from 0.1 to 60000 (ms), not 0."),
        ({"flush_ms": True}, "journal.flush_ms must be a number"),
        ({"sync": "never"}, "journal.sync must be 'publish', 'always' or a time from '10ms' to '1h', not 'never'."),
        ({"sync": "2h"}, "journal.sync must be 'publish', 'always' or a time from '10ms' to '1h', not '2h'."),
        (
            {"retain": "7 parsecs"},
            "journal.retain must be a time above 0 such as '200 ms', '10m', '2h', '7d', or nothing",
        ),
        ({"retain": 0}, "journal.retain must be a time above 0"),
        ({"max_bytes": "lots"}, "journal.max_bytes must be a size such as '64MB', '20GB', '512MiB', or nothing"),
        ({"max_bytes": "1MB"}, "journal.max_bytes must be at least two segments (128000000 bytes"),
        ({"hard_bytes": "1GB"}, "journal.hard_bytes must be at least max_bytes (20000000000), not 1000000000."),
        ({"reader_timeout_s": 0}, "journal.reader_timeout_s must be a time above 0"),
        ({"segment_bytes": 5}, "journal.segment_bytes must be a size of at least 65536 bytes such as"),
        ({"segment_bytes": None}, "journal.segment_bytes must be a size"),
        ({"compact": 3}, "journal.compact must be true, false or a table with after, json and schema, not 3."),
        (
            {"compact": {"afer": 1}},
            "journal.compact.afer is not an option; did you mean after?",
        ),
        ({"compact": {"after": "x"}}, "journal.compact.after must be a time such as"),
        ({"compact": {"json": "text"}}, "journal.compact.json must be 'variant', or nothing, not 'text'."),
        ({"compact": {"schema": ["a"]}}, "journal.compact.schema must be DDL by topic filter such as"),
        ({"compact": {"schema": {"a#": "x int"}}}, "journal.compact.schema: topics: 'a#' has a '#' inside"),
    ],
    ids=str,
)
def test_mistakes(value: Any, says: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(value, FOLDER)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
