"""The `init` of a processor, tried before Spark calls it: which states it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessor,
    StatefulProcessorHandle,
    ValueState,
)


def states_with_ttl(processor: StatefulProcessor) -> list[str]:
    """Returns the names of a processor's states that have a time to live; raises what its `init` raises."""
    handle = _Handle()
    copy(processor).init(handle)
    return handle.with_ttl


class _Handle(StatefulProcessorHandle):
    """One without Spark behind it."""

    def __init__(self) -> None:
        self.with_ttl: list[str] = []

    def getValueState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ValueState:
        self._note(stateName, ttlDurationMs)
        return ValueState(_NOBODY, stateName)

    def getListState(self, stateName: str, schema: Any, ttlDurationMs: int | None = None) -> ListState:
        self._note(stateName, ttlDurationMs)
        return ListState(_NOBODY, stateName)

    def getMapState(
        self, stateName: str, userKeySchema: Any, valueSchema: Any, ttlDurationMs: int | None = None
    ) -> MapState:
        self._note(stateName, ttlDurationMs)
        return MapState(_NOBODY, stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        raise RuntimeError("init() has no key, whose timer it could set; set it in handleInputRows().")

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self.registerTimer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        return iter(())

    def deleteIfExists(self, stateName: str) -> None:
        """There is none yet."""

    def _note(self, name: str, ttl_ms: int | None) -> None:
        if ttl_ms is not None:
            self.with_ttl.append(name)


_NOBODY: Any = None
