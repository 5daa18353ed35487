"""Arrow batches are joined and cut to a good size, and no row changes."""

from __future__ import annotations

import pyarrow as pa

from smqrt.pipeline.smq_source import scan


def batch(first: int, rows: int, size_bytes: int = 1) -> pa.RecordBatch:
    return pa.record_batch({"seq": range(first, first + rows), "payload": [b"x" * size_bytes] * rows})


def seqs(batches: list[pa.RecordBatch]) -> list[int]:
    return [seq for one in batches for seq in one.column("seq").to_pylist()]


def test_small_batches_become_large_ones() -> None:
    merged = list(scan.merged((batch(first, 7) for first in range(0, 700, 7)), 64))
    assert seqs(merged) == list(range(700))
    assert all(one.num_rows >= 64 for one in merged[:-1])
    assert len(merged) == 10


def test_a_large_batch_stays_as_it_is() -> None:
    large = batch(0, 5000)
    assert list(scan.merged([large], 64)) == [large]


def test_a_batch_of_many_bytes_is_cut() -> None:
    merged = list(scan.merged([batch(0, 100, 1 << 20)], 8192))
    assert seqs(merged) == list(range(100))
    assert len(merged) > 1
    assert max(one.nbytes for one in merged) <= 1.1 * scan.MAX_BATCH_BYTES


def test_small_batches_are_not_joined_beyond_the_most_bytes() -> None:
    merged = list(scan.merged((batch(first, 1, 10 << 20) for first in range(10)), 8192))
    assert seqs(merged) == list(range(10))
    assert max(one.nbytes for one in merged) <= 1.4 * scan.MAX_BATCH_BYTES


def test_nothing_gives_nothing() -> None:
    assert list(scan.merged([], 64)) == list(scan.merged([batch(0, 0)], 64)) == []
