"""API of Python applications.

    from smqrt.app import app, dir, io

In `.preload.py` and in the modules beside it, these names belong to the application: `app` has the variables of
`.preload.py`, `dir` is its directory in the tree of URLs, `io` its folder. `.preload.py` has them also without an
import; the import declares them for linters and type checkers. `worker` is this worker process: `worker.number` of
`worker.count` (help: workers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smqrt.apps.python.exports import in_thread, send_file
from smqrt.errors import ArgumentError, SmqrtError
from smqrt.http.headers import HttpError
from smqrt.http.logins import Account, Acl, Authenticator, AuthInfo, FunctionAuthorizer, Login, UserTable
from smqrt.http.message import Request
from smqrt.http.resources import IoError
from smqrt.http.response import Response
from smqrt.http.sessions import HttpSession
from smqrt.http.tree import Directory
from smqrt.http.websocket import WebSocket, WebSocketClosedError
from smqrt.http.wsgi import WsgiDirectory
from smqrt.process import current_process
from smqrt.workers.worker_rpc import WorkerPlace, worker_place

if TYPE_CHECKING:
    from smqrt.apps.python.directory import ApplicationDirectory
    from smqrt.apps.python.exports import Namespace
    from smqrt.http.resources import Io

    app: Namespace
    dir: ApplicationDirectory
    io: Io
    worker: WorkerPlace

__all__ = [
    "Account",
    "Acl",
    "AuthInfo",
    "Authenticator",
    "FunctionAuthorizer",
    "HttpSession",
    "Login",
    "UserTable",
    "WebSocket",
    "WebSocketClosedError",
    "ArgumentError",
    "Directory",
    "HttpError",
    "IoError",
    "Request",
    "Response",
    "SmqrtError",
    "WorkerPlace",
    "WsgiDirectory",
    "app",
    "dir",
    "in_thread",
    "io",
    "send_file",
    "worker",
]


def __getattr__(name: str) -> object:
    if name == "worker":
        return worker_place()
    if name not in ("app", "dir", "io"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    scope = current_process.current_app.get()
    if scope is None or name not in scope.names:
        raise ImportError(
            f"smqrt.app has {name!r} only in an application. Import it in .preload.py or in a module beside it, and run"
            " the application with `smqrt serve`."
        )
    return scope.names[name]
