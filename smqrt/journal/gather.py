"""Many small batches of a segment as few large pyarrow.RecordBatches, in LuaJIT where lupa is installed.

A hub writes a batch every 10 ms; pyarrow takes some 8 us for each, however few rows it has. All of a journal have
headers of one layout, so that their columns can be copied together at 0.02 us a row.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from importlib import resources
from typing import Any

from smqrt.journal import arrow
from smqrt.journal.record import SEGMENT_COLUMNS

log = logging.getLogger("smqrt")

_MOST_BATCHES = 1 << 14
_INDEX = {column.name: at for at, column in enumerate(SEGMENT_COLUMNS)}


class Gatherer:
    """The kernel, with memory of its own: one batch is made after the other."""

    def __init__(self) -> None:
        import lupa.luajit21 as lupa

        self._runtime = lupa.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        source = resources.files("smqrt.journal").joinpath("gather.lua").read_bytes()
        chunk: Any = self._runtime.compile(source)
        places, constant = arrow.header_layout()
        table = self._runtime.table_from([one for part in constant for one in part])
        functions = chunk(_MOST_BATCHES, arrow.HEADER_BYTES, *places, table)
        self._survey, self._nulls, self._bits, self._numbers, self._text_bytes, self._texts = functions
        self._error: Any = lupa.LuaError

    def batches(self, data: memoryview, schema: Any, batch_rows: int) -> Iterator[Any]:
        """Yields pyarrow.RecordBatches of about `batch_rows` rows.

        Args:
            data: whole batches of a segment.
            schema: some of the segment's columns, as pyarrow.Schema.
            batch_rows: batches are joined until they have so many rows.

        Raises:
            pyarrow.ArrowInvalid: the data are something else.
        """
        import pyarrow as pa

        buffer, at = pa.py_buffer(data), 0
        try:
            while at < buffer.size:
                at, rows = self._survey(buffer.address, at, buffer.size, batch_rows)
                columns = [self._column(_INDEX[field.name], field.type, rows) for field in schema]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
        except self._error as error:
            raise pa.ArrowInvalid(str(error)) from None

    def _column(self, column: int, kind: Any, rows: int) -> Any:
        import pyarrow as pa

        first, missing = arrow.FIRST_BUFFER[column], self._nulls(column)
        valid = None
        if missing:
            valid = pa.allocate_buffer((rows + 7) >> 3)
            self._bits(column, first, valid.address)
        return pa.Array.from_buffers(kind, rows, [valid, *self._values(first + 1, kind, rows)], missing)

    def _values(self, buffer: int, kind: Any, rows: int) -> list[Any]:
        import pyarrow as pa

        if pa.types.is_primitive(kind):
            values = pa.allocate_buffer(rows * kind.bit_width // 8)
            self._numbers(buffer, kind.bit_width // 8, values.address)
            return [values]
        ends, text = pa.allocate_buffer((rows + 1) * 4), pa.allocate_buffer(self._text_bytes(buffer))
        self._texts(buffer, ends.address, text.address)
        return [ends, text]


_threads = threading.local()


def load() -> Gatherer | None:
    """This thread's kernel, which nobody else may use amidst a batch; None where LuaJIT is not available or
    `SMQRT_KERNELS=pure` asks for pyarrow alone.
    """
    if "kernel" not in _threads.__dict__:
        _threads.kernel = None if os.environ.get("SMQRT_KERNELS") == "pure" else _made()
    kernel: Gatherer | None = _threads.kernel
    return kernel


def _made() -> Gatherer | None:
    try:
        return Gatherer()
    except Exception as error:
        log.info("LuaJIT is not available (%s); pyarrow reads the journal's batches one by one", error)
        return None
