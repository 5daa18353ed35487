"""A running application in Python: its `.preload.py`, the modules beside it, and the end of both."""

from __future__ import annotations

from collections.abc import Callable

from smqrt.apps.python.directory import ApplicationDirectory
from smqrt.apps.python.modules import Modules
from smqrt.apps.python.namespace import Namespace
from smqrt.errors import SmqrtError
from smqrt.process.current_application import AppScope


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
