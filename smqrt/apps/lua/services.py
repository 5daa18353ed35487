"""The server around Lua: the parts of it that the functions of the API may use."""

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
from smqrt.process.current_application import AppScope, current_app
from smqrt.transport.tls_contexts import ClientTls, ServerTls
from smqrt.workers.worker_rpc import WorkerRpc

JSON_VALUES = 1 << 18


def _to_stdout(line: bytes) -> None:
    sys.stdout.write(line.decode("utf-8", "replace") + "\n")
    sys.stdout.flush()


@dataclass
class Services:
    """Given to every `install(vm, services)` in `smqrt/apps/lua/api`. Filled by the composition root; a part that is
    absent is None.

    root: the root of the virtual directories (`smqrt.http.tree.Root`).
    rtl: the directory `/rtl/`.
    ios: the named io objects (`disk`, `home`, `vm`, ...).
    private: tells which files of applications no client is shown.
    logins: sessions and logins of browsers (`smqrt.http.logins.Logins`).
    json_values: how many values `ba.json.decode` takes.
    argv: all words of the command line, in order.
    log: where `trace` writes.
    output: gets each line that `print` writes outside of pages.
    tls: the TLS clients and servers of Lua by their numbers (`ClientTls`, `ServerTls`).
    sockets: the sockets of Lua (`smqrt.apps.lua.api.sockets.SocketBinding`).
    mqtt: the MQTT clients of Lua (`smqrt.apps.lua.api.mqtt.MqttBinding`).
    smq_clients: the SMQ clients of Lua (`smqrt.apps.lua.api.smq_client.SmqClientBinding`).
    hubs: the hubs of Lua (`smqrt.apps.lua.api.smq_hub.HubBinding`).
    http_clients: the HTTP clients of Lua by their numbers.
    http_server: speaks HTTP (`smqrt.http.server.HttpServer`): where sockets can be handed back.
    key_file: the file of `ba.tpm`; None for the user's (`smqrt.crypto.keyfile.default_path`).
    processes: the child processes of Lua (`smqrt.apps.lua.api.processes.ProcessBinding`).
    exchanges: the HTTP requests in the hands of Lua (`smqrt.apps.lua.api.exchange.Exchanges`).
    http_port, https_port: the ports listened on, 0 when there is none.
    scopes: what belongs to the applications that run, by their numbers.
    stop: asks the server to stop, with the exit status.
    load_certificates: reads the certificates of the TLS ports again, in a thread (it blocks then) or not; gives why it
        could not, None when it did.
    conf: the file mako.conf that is in force.
    tracelogger: whether the trace logger is wanted, whatever that file says.
    fleet: the workers of the server; None when this process is alone.
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
        """The number of the application whose code this greenlet runs; None when it has no number, False when there is
        none. Lua hands the number on: the greenlet of a blocking call may be another one."""
        owner = current_app.get()
        if owner is None:
            return False
        return next((number for number, scope in list(self.scopes.items()) if scope is owner), None)

    def scope_of(self, application: int | None) -> AppScope | None:
        """What belongs to the application whose code is running.

        Args:
            application: its number as `core.application` of Lua says it, where it isn't known on this side.
        """
        return current_app.get() or self.scopes.get(application or 0)
