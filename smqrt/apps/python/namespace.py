"""Variables of a Python application, as a mapping and as attributes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any


class Namespace(MutableMapping[str, Any]):
    """The variables of `.preload.py`: `app["name"]` and `app.name` are the variable `name`.

    Args:
        variables: the variables themselves.
    """

    __slots__ = ("_variables",)
    _variables: dict[str, Any]

    def __init__(self, variables: dict[str, Any]) -> None:
        object.__setattr__(self, "_variables", variables)

    def __getitem__(self, name: str) -> Any:
        return self._variables[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._variables[name] = value

    def __delitem__(self, name: str) -> None:
        del self._variables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._variables)

    def __len__(self) -> int:
        return len(self._variables)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._variables[name]
        except KeyError:
            raise AttributeError(f"the application defines no {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._variables[name] = value

    def __delattr__(self, name: str) -> None:
        if self._variables.pop(name, self) is self:
            raise AttributeError(f"the application defines no {name!r}")

    def __repr__(self) -> str:
        return f"<application with {', '.join(name for name in self if not name.startswith('__'))}>"
