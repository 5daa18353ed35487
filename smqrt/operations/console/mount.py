"""Console in the directory tree of the admin listener."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from smqrt.apps.lua.applications import Application, Running
from smqrt.apps.python.application import PythonApplication
from smqrt.apps.python.directory import ApplicationDirectory
from smqrt.http.disk import DiskIo
from smqrt.http.message import Request
from smqrt.http.tree import Branch, Directory
from smqrt.operations.all_workers import AllWorkers
from smqrt.process.current_process import AppScope

NAME = "console"
HEADERS = {
    # Only scripts and styles in files of this server: the name of a topic or client can't inject code into a page.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _StartPage(Directory):
    """Redirects `/` of the admin listener to the console while that is running."""

    def __init__(self, console: Application) -> None:
        super().__init__(None, -127)  # the lowest priority
        self._console = console

    def service(self, request: Request, relpath: str) -> bool:
        """See `Directory.service`."""
        if relpath or not self._console.running:
            return False
        request.response.redirect(f"/{NAME}/")
        return True


def mount(
    server: AllWorkers, root: Branch, find_session: Callable[[Request], object] = lambda request: None
) -> Application:
    """Return the console as an application, not loaded yet: `load` inserts it into `root`, `unload` removes it.

    Args:
        server: the server that the console shows.
        root: the tree of the admin listener.
        find_session: returns the session of a request, or None.
    """
    folder = Path(str(resources.files("smqrt.operations.console")))

    def start() -> Running:
        scope = AppScope(folder, NAME)
        scope.is_internal = True  # the hub of the console is not shown in the console
        reader = ApplicationDirectory(NAME, 0, DiskIo(folder), scope, find_session, f"{NAME}/")
        reader.headers = dict(HEADERS)
        scope.names["server"] = server
        script = PythonApplication(NAME, reader, scope)
        root.insert(reader)
        return Running(scope, reader, [script])

    application = Application(NAME, folder, start)
    root.insert(_StartPage(application))
    return application
