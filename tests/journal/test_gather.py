"""Both ways to join small batches give the rows that were written: the LuaJIT kernel and pyarrow alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smqrt.journal import arrow, tables
from smqrt.journal.arrow import PLAIN, WITH_MQTT, BatchLayout
from smqrt.journal.columns import gatherer
from smqrt.journal.reader import Journal
from smqrt.journal.record import SEGMENT_COLUMNS, Row
from tests.journal import written

NAMES = [column.name for column in SEGMENT_COLUMNS]
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
ROWS = st.builds(
    Row,
    INTEGERS,
    INTEGERS,
    st.none() | st.text(max_size=5),
    st.none() | INTEGERS,
    st.none() | st.text(max_size=5),
    st.none() | INTEGERS,
    st.none() | INTEGERS,
    st.none() | st.text(max_size=5),
    st.integers(0, 255),
    st.binary(max_size=9),
    st.none() | st.just("q:1"),
    st.none() | st.integers(0, 2),
    st.none() | st.booleans(),
    st.none() | st.text(max_size=5),
)
BATCHES = st.lists(st.lists(ROWS, min_size=1, max_size=20), min_size=1, max_size=8)


def joined(batches: list[list[Row]], layout: BatchLayout = PLAIN) -> bytes:
    return b"".join(piece for batch in batches for piece in arrow.encode(batch, layout))


def kernels(data: bytes, names: list[str], batch_rows: int, layout: BatchLayout = PLAIN) -> list[Any]:
    kernel = gatherer(layout)
    assert kernel, "LuaJIT comes with lupa"
    return list(kernel.batches(memoryview(data), tables.schema(names), batch_rows))


@settings(max_examples=40)
@given(
    BATCHES,
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    st.integers(1, 100),
    st.sampled_from([PLAIN, WITH_MQTT]),
)
def test_the_kernel_gives_what_was_encoded(
    batches: list[list[Row]], names: list[str], batch_rows: int, layout: BatchLayout
) -> None:
    found = kernels(joined(batches, layout), names, batch_rows, layout)
    for batch in found:
        batch.validate(full=True)
    assert all(batch.num_rows >= batch_rows for batch in found[:-1])
    table = pa.Table.from_batches(found)
    given_rows = [row._asdict() | {"ts": row.ts_us} for batch in batches for row in batch]
    for name in names:
        column = table.column(name).cast(pa.int64()) if name == "ts" else table.column(name)
        is_stored = name in [column.name for column in layout.columns]
        assert column.to_pylist() == [row[name] if is_stored else None for row in given_rows]


def all_of(journal: Path, start: int, end: int) -> Any:
    read = Journal(journal)
    plan = read.plan({"n1": start}, {"n1": end})
    return pa.Table.from_batches(
        [batch for part in plan for chunk in part for batch in read.tables(chunk, batch_rows=7)], tables.schema()
    )


@pytest.mark.parametrize("seed", range(5))
def test_both_ways_give_the_same(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written.write(tmp_path, written.random_ends(random.Random(seed), 80))
    ranges = [(0, 80), (3, 77), (40, 41)]
    with_kernel = [all_of(tmp_path, *edges) for edges in ranges]
    monkeypatch.setattr(tables, "gatherer", lambda layout: None)
    assert [all_of(tmp_path, *edges) for edges in ranges] == with_kernel
    assert [table.num_rows for table in with_kernel] == [80, 74, 1]


def test_threads_have_kernels_of_their_own(tmp_path: Path) -> None:
    for name, end in (("a", 300), ("b", 1500)):
        written.write(tmp_path / name, [range(3, end + 3, 3)])
    wanted = {name: all_of(tmp_path / name, 0, end) for name, end in (("a", 300), ("b", 1500))}
    with ThreadPoolExecutor(4) as pool:
        futures = [(name, pool.submit(all_of, tmp_path / name, 0, wanted[name].num_rows)) for name in "ab" * 8]
        assert all(future.result() == wanted[name] for name, future in futures)
        kernels_seen = set(pool.map(lambda _: id(gatherer()), range(50)))
    assert id(gatherer()) not in kernels_seen


def cut_off(batch: bytearray) -> None:
    del batch[-8:]


def another_message(batch: bytearray) -> None:
    batch[9] ^= 0xFF


def numbers_changed(batch: bytearray) -> None:
    (_, _, nodes, buffers), _ = arrow.PLAIN.header_layout()
    for at in (nodes, buffers + 8, buffers + 24):
        batch[at : at + 8] = (1 << 40).to_bytes(8, "little")


def no_rows(batch: bytearray) -> None:
    (_, rows, _, _), _ = arrow.PLAIN.header_layout()
    batch[rows : rows + 8] = bytes(8)


@pytest.mark.parametrize("damage", [cut_off, another_message, numbers_changed, no_rows])
def test_what_is_no_batch_is_an_error(damage: Callable[[bytearray], None]) -> None:
    batch = bytearray(joined([written.rows(0, 10)]))
    damage(batch)
    with pytest.raises(pa.ArrowInvalid):
        kernels(bytes(batch), ["seq", "topic"], 100)


def test_random_damage_ends_no_process() -> None:
    whole, chance = joined([written.rows(0, 10), written.rows(10, 25)]), random.Random(1)
    outcomes = {True: 0, False: 0}
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
        try:
            for found in kernels(bytes(data), NAMES, 100):
                found.column("payload").validate(full=True)
            outcomes[True] += 1
        except pa.ArrowInvalid:
            outcomes[False] += 1
    assert min(outcomes.values()) > 100
