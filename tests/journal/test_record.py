"""Rows of the journal: their flags, times and commits as numbers and texts."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from smqrt.errors import ArgumentError
from smqrt.journal.record import SEGMENT_COLUMNS, Flag, Row, iso, now_us, parse_moment, parse_transaction, transaction

HOUR_US = 3_600_000_000
NOW_US = 1_795_176_000_000_123


def test_flags_keep_their_bits() -> None:
    """Segments of all releases have them."""
    assert {flag.name: flag.value for flag in Flag} == {
        "DIRECT": 1,
        "UNROUTED": 2,
        "ASSEMBLED": 4,
        "PIPELINE": 8,
        "SERVER": 16,
    }


def test_a_row_has_the_columns_of_a_segment() -> None:
    names = ["ts_us" if column.name == "ts" else column.name for column in SEGMENT_COLUMNS]
    assert tuple(names) == Row._fields
    assert [column.name for column in SEGMENT_COLUMNS if not column.nullable] == ["seq", "ts", "flags", "payload"]


@pytest.mark.parametrize(
    ("text", "moment_us"),
    [
        ("earliest", 0),
        ("latest", NOW_US),
        ("2h", NOW_US - 2 * HOUR_US),
        ("1970-01-01T00:00:01.000002", 1_000_002),
        ("1970-01-01T02:00:00+01:00", HOUR_US),
        ("1970-01-02", 24 * HOUR_US),
    ],
)
def test_a_moment_is_a_time_or_a_duration(text: str, moment_us: int) -> None:
    assert parse_moment(text, now=NOW_US) == moment_us


def test_durations_end_now() -> None:
    before_us = now_us()
    assert before_us - HOUR_US <= parse_moment("1h") <= now_us() - HOUR_US
    assert abs(before_us - datetime.now(UTC).timestamp() * 1e6) < 60e6
    with pytest.raises(ArgumentError, match="--from 'soon' must be a duration"):
        parse_moment("soon", "--from")


def test_a_time_is_written_with_microseconds() -> None:
    assert iso(NOW_US) == "2026-11-20T12:00:00.000123Z"
    assert iso(999_999) == "1970-01-01T00:00:00.999999Z"
    assert iso(-1) == "1969-12-31T23:59:59.999999Z"


def test_a_commit_is_a_query_and_a_batch() -> None:
    assert transaction("a:b", 7) == "a:b:7"
    assert parse_transaction("a:b:7") == ("a:b", 7)
    with pytest.raises(ValueError, match="invalid literal"):
        parse_transaction("a:b")
