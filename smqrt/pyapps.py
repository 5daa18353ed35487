"""Python applications: a folder with `.preload.py`, run once with the names `app`, `dir` and `io`.

    from smqrt.http.tree import Directory

    def hello(request, relpath):
        request.response.write(b"Hello " + relpath.encode())

    greeter = Directory("hello")
    greeter.setfunc(hello)
    dir.insert(greeter)

    def onunload():
        print("good bye")

A directory's function gets the HTTP request and the rest of the path; it may block in gevent's way, and returning
exactly False passes the request on. What `.preload.py` defines is `app`: as its variables, as `app["name"]` and as
`app.name`.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from typing import Any

from smqrt.errors import SmqrtError
from smqrt.http.resources import Io
from smqrt.http.tree import ResourceReader

PRELOAD = ".preload.py"


class Namespace(dict[str, Any]):
    """What an application defines: a dict whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the application defines no {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class PythonAppError(SmqrtError):
    """An application's own code failed; the text begins with its file and line, Python's traceback follows."""


class PythonApplication:
    """A running Python application.

    Args:
        label: what tracebacks call `.preload.py`, such as "chat/.preload.py".
        io: the application's folder.
        reader: the directory that serves it.
    """

    def __init__(self, label: str, io: Io, reader: ResourceReader) -> None:
        self._label = label
        self.namespace = Namespace(__name__="__preload__", __file__=label, io=io, dir=reader)
        self.namespace["app"] = self.namespace

    def load(self) -> None:
        """Run `.preload.py`; may block.

        Raises:
            PythonAppError: it failed.
        """
        source = self.namespace["io"].read(PRELOAD)
        lines = source.decode("utf-8", "replace").splitlines(keepends=True)
        linecache.cache[self._label] = len(source), None, lines, self._label  # tracebacks show the lines
        self._guard(lambda: exec(compile(source, self._label, "exec", dont_inherit=True), self.namespace))

    def stop(self) -> None:
        """Run `onunload`, when there is one; may block. Raises as `load`."""
        onunload = self.namespace.get("onunload")
        if callable(onunload):
            self._guard(onunload)

    def clear(self) -> None:
        """Forget what the application defined."""
        self.namespace.clear()

    def _guard(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            raise PythonAppError(self._described(error)) from error

    def _described(self, error: Exception) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == self._label]
        if isinstance(error, SyntaxError) and error.filename == self._label:
            lines.append(error.lineno)
        position = f"{self._label}:{lines[-1]}: " if lines else f"{self._label}: "
        own = frames[next((at for at, frame in enumerate(frames) if frame.filename == self._label), len(frames)) :]
        summary = f"{position}{type(error).__name__}: {error}"
        return "\n".join([summary, "traceback:", *traceback.StackSummary.from_list(own).format()]).rstrip()
