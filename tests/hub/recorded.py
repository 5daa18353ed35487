"""What tests of hubs call, and values that are no JSON."""

from __future__ import annotations

from typing import Any

from tests.support.waiting import wait_until


class Calls(list[tuple[Any, ...]]):
    """Records what it is called with."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.answer = answer

    def __call__(self, *arguments: Any) -> Any:
        self.append(arguments)
        return self.answer

    def come(self, count: int = 1) -> Calls:
        wait_until(lambda: len(self) >= count, f"{count} calls")
        assert len(self) == count
        return self


DEEP = b"[" * 30000


SCALARS = [(b"42", 42), (b" -0.5\n", -0.5), (b"true", True), (b"false", False), (b'"text"', "text"), (b"null", None)]


NO_JSON = [
    b"no json",
    DEEP,
    b"\xff",
    b"",
    b" ",
    b"NaN",
    b"[NaN]",
    b"-Infinity",
    b"1 2",
    b"1]",
    b'"a',
    b"nul",
    b"{}{}",
    b"1,",
]
