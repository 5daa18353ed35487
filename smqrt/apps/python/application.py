"""A running Python application: its `.preload.py` and the modules beside it."""

from __future__ import annotations

from collections.abc import Callable

from smqrt.apps.python.directory import ApplicationDirectory
from smqrt.apps.python.modules import Modules
from smqrt.apps.python.namespace import Namespace
from smqrt.errors import SmqrtError
from smqrt.process.current_application import AppScope


class PythonAppError(SmqrtError):
    """An error in an application's own code; the text has its file and line, then Python's traceback."""


class PythonApplication:
    """A running Python application.

    Args:
        name: its name.
        directory: the directory that serves it.
        scope: owner of what the application creates.
    """

    def __init__(self, name: str, directory: ApplicationDirectory, scope: AppScope) -> None:
        self._modules = Modules(name, directory.label, directory.io, scope)
        self._directory = directory
        variables = self._modules.main.__dict__
        scope.names.update(app=Namespace(variables), dir=directory, io=directory.io)
        variables.update(scope.names)

    def load(self) -> None:
        """Run `.preload.py`. May block.

        Raises:
            PythonAppError: it raised an exception.
        """
        self._call(self._modules.run_main)

    def stop(self) -> None:
        """Run `onunload`, when the application defines it. May block. Raises as `load`."""
        onunload = self._modules.main.__dict__.get("onunload")
        if callable(onunload):
            self._call(onunload)

    def clear(self) -> None:
        """Delete the variables and modules of the application."""
        self._modules.close()

    def _call(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            raise PythonAppError(self._directory.describe(error)) from error
