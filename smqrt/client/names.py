"""Names and numbers as one connection knows them: topics and sub-topics are two separate spaces."""

from __future__ import annotations


class NameTable:
    """A two-way table of names and the numbers the broker gave them."""

    __slots__ = ("_ids", "_names")

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def number(self, name: bytes) -> int | None:
        """The number of `name`, None when the broker has not told it yet."""
        return self._ids.get(name)

    def name(self, number: int) -> bytes | None:
        """The name behind `number`, None when it is not known."""
        return self._names.get(number)

    def add(self, name: bytes, number: int) -> bool:
        """Remember what the broker said; tells whether it is news."""
        if self._ids.get(name) == number:
            return False
        self._ids[name] = number
        self._names[number] = name
        return True

    def take_all(self) -> list[bytes]:
        """Forget every number and return the names, oldest first."""
        names = list(self._ids)
        self._ids.clear()
        self._names.clear()
        return names
