"""A running application in Python: its `.preload.py`, the modules beside it, and the end of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from smqrt.apps.python.directory import ApplicationDirectory
from smqrt.apps.python.modules import Modules
from smqrt.errors import SmqrtError
from smqrt.process.current_application import AppScope

# ---- The variables of an application in Python, as a mapping and as attributes.


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


class PythonAppError(SmqrtError):
    """An application's own code failed; the text begins with its file and line, Python's traceback follows."""


class PythonApplication:
    """A running Python application.

    Args:
        name: the application's.
        reader: the directory that serves it.
        scope: what ends with it.
    """

    def __init__(self, name: str, reader: ApplicationDirectory, scope: AppScope) -> None:
        self._modules = Modules(name, reader.label, reader.io, scope)
        self._reader = reader
        variables = self._modules.main.__dict__
        scope.names.update(app=Namespace(variables), dir=reader, io=reader.io)
        variables.update(scope.names)

    def load(self) -> None:
        """Run `.preload.py`; may block.

        Raises:
            PythonAppError: it failed.
        """
        self._guard(self._modules.run_main)

    def stop(self) -> None:
        """Run `onunload`, when there is one; may block. Raises as `load`."""
        onunload = self._modules.main.__dict__.get("onunload")
        if callable(onunload):
            self._guard(onunload)

    def clear(self) -> None:
        """Forget what the application defined, and its modules."""
        self._modules.close()

    def _guard(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            raise PythonAppError(self._reader.describe(error)) from error
