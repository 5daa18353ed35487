"""Topics with columns in them: "agg/{device}"."""

from __future__ import annotations

import re

from smqrt.errors import PipelineError

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]|[^{}]+")


class Template:
    """A text in which `{column}` stands for a column of the row; `{{` and `}}` are braces.

    Args:
        text: such as "agg/{device}" or "agg/{window.start}".

    Attributes:
        text: as it was given.
        parts: (is a column, text or column) in order.

    Raises:
        PipelineError: a brace is without its partner, or there is nothing between them.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts: list[tuple[bool, str]] = []
        for match in _PART.finditer(text):
            self._add(match[0], match[1])

    def _add(self, piece: str, column: str | None) -> None:
        if piece in ("{", "}") or (column is not None and not column.strip()):
            raise PipelineError(f"{self.text!r} has a brace without a column; write {{column}}, or {{{{ for a brace.")
        if column is not None:
            self.parts.append((True, column.strip()))
        else:
            self.parts.append((False, {"{{": "{", "}}": "}"}.get(piece, piece)))

    @property
    def columns(self) -> list[str]:
        """Returns the columns that the row must have, in order."""
        return [piece for is_column, piece in self.parts if is_column]
