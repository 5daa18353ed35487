"""Parts of the server that the Lua API uses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from smqrt.http.access import Private
from smqrt.http.client.client import HttpConversation
from smqrt.http.logins import Logins
from smqrt.http.resources import Io
from smqrt.http.server import HttpServer
from smqrt.http.tree import ResourceReader, Root
from smqrt.process.current_process import AppScope, current_app
from smqrt.transport.tls_contexts import ClientTls, ServerTls
from smqrt.workers.worker_rpc import WorkerRpc

JSON_VALUES = 1 << 18


def _to_stdout(line: bytes) -> None:
    sys.stdout.write(line.decode("utf-8", "replace") + "\n")
    sys.stdout.flush()


@dataclass
class Services:
    """The argument of every `install(vm, services)` in `smqrt/apps/lua/api`; absent parts are None.

    root: the root of the virtual directories (`smqrt.http.tree.Root`).
    rtl: the directory `/rtl/`.
    ios: the named io objects (`disk`, `home`, `vm`, ...).
    private: the files of applications that are hidden from clients.
    logins: sessions and logins of browsers (`smqrt.http.logins.Logins`).
    json_values: maximum number of values of `ba.json.decode`.
    argv: all words of the command line, in order.
    log: the log of `trace`.
    output: called with each line that `print` writes outside of pages.
    tls: the TLS clients and servers of Lua by their numbers (`ClientTls`, `ServerTls`).
    sockets: the sockets of Lua (`smqrt.apps.lua.api.sockets.SocketBinding`).
    mqtt: the MQTT clients of Lua (`smqrt.apps.lua.api.mqtt.MqttBinding`).
    smq_clients: the SMQ clients of Lua (`smqrt.apps.lua.api.smq_client.SmqClientBinding`).
    hubs: the hubs of Lua (`smqrt.apps.lua.api.smq_hub.HubBinding`).
    http_clients: the HTTP clients of Lua by their numbers.
    http_server: the HTTP server (`smqrt.http.server.HttpServer`), to which sockets can be returned.
    key_file: the file of `ba.tpm`; None for the user's (`smqrt.crypto.keyfile.default_path`).
    processes: the child processes of Lua (`smqrt.apps.lua.api.processes.ProcessBinding`).
    exchanges: the HTTP requests that Lua processes (`smqrt.apps.lua.api.exchange.Exchanges`).
    http_port, https_port: the listening ports; 0 for none.
    scopes: the scopes of running applications, by their numbers.
    stop: requests a shutdown of the server, with the exit status.
    load_certificates: reloads the certificates of the TLS ports, in a thread (blocking) or not; returns the error, None
        for success.
    conf: the mako.conf in force.
    tracelogger: whether the trace logger is enabled, regardless of that file.
    fleet: the workers of the server; None for a single process.
    """

    root: Root = field(default_factory=Root)
    rtl: ResourceReader | None = None
    ios: dict[str, Io] = field(default_factory=dict)
    private: Private = field(default_factory=Private)
    logins: Logins = field(default_factory=Logins)
    json_values: int = JSON_VALUES
    argv: list[str] = field(default_factory=list)
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("smqrt.trace"))
    output: Callable[[bytes], None] = _to_stdout
    tls: dict[int, ClientTls | ServerTls] = field(default_factory=dict)
    sockets: Any = None
    mqtt: Any = None
    smq_clients: Any = None
    hubs: Any = None
    http_clients: dict[int, HttpConversation] = field(default_factory=dict)
    http_server: HttpServer | None = None
    key_file: Path | None = None
    processes: Any = None
    exchanges: Any = None
    scopes: WeakValueDictionary[int, AppScope] = field(default_factory=WeakValueDictionary)
    http_port: int = 0
    https_port: int = 0
    stop: Callable[[int], None] | None = None
    load_certificates: Callable[[bool], str | None] | None = None
    conf: Path | None = None
    tracelogger: bool = False
    fleet: WorkerRpc | None = None

    def known_application(self) -> int | bool | None:
        """Return the number of the application whose code this greenlet runs.

        None for an application without a number, False outside of applications. Lua passes the number to blocking
        calls, which may run in another greenlet.
        """
        owner = current_app.get()
        if owner is None:
            return False
        return next((number for number, scope in list(self.scopes.items()) if scope is owner), None)

    def scope_of(self, application: int | None) -> AppScope | None:
        """Return the scope of the application whose code is running.

        Args:
            application: its number from `core.application` of Lua, for greenlets without a current application.
        """
        return current_app.get() or self.scopes.get(application or 0)
