"""`smqrt journal schema`: which DDL describes the JSON payloads of a topic, and how many of them it describes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from smqrt.journal.ddl import Struct, Type
from smqrt.journal.jsontypes import fits, infer, load


@dataclass(frozen=True)
class Inferred:
    """What was found.

    Attributes:
        kind: the type of the payloads that are JSON.
        rows: how many payloads were looked at.
        json: how many of them are JSON.
        fitting: how many of them the type describes without losing a value.
    """

    kind: Type
    rows: int
    json: int
    fitting: int

    @property
    def ddl(self) -> str | None:
        """The DDL text; None when the payloads are no JSON objects, or none of them has a field."""
        return self.kind.ddl() if isinstance(self.kind, Struct) else None


def inferred(payloads: Iterable[bytes]) -> Inferred:
    """Returns the type that describes payloads: whole numbers widen to double, a field of many types is string."""
    values = [load(payload) for payload in payloads]
    documents = [value for value in values if value is not ...]
    kind = infer(documents)
    fitting = sum(fits(value, kind) for value in documents if value is not None)
    return Inferred(kind, len(values), len(documents), fitting)
