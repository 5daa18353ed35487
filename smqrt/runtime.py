"""The composition root: builds the parts of a server, starts, drains and stops them."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import signal
import ssl
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from greenlet import getcurrent, greenlet

from smqrt import reload
from smqrt.errors import StartError
from smqrt.http.access import Access
from smqrt.http.body import HttpLimits
from smqrt.http.builtin_pages import ApplicationList, Manual
from smqrt.http.disk import DiskIo
from smqrt.http.logins import Logins
from smqrt.http.private import Private
from smqrt.http.request_sessions import RequestSessions
from smqrt.http.resources import Io
from smqrt.http.server import HttpServer
from smqrt.http.sessions import MAX_SESSIONS
from smqrt.http.tree import ResourceReader, Root
from smqrt.http.virtual_files import server_io
from smqrt.journal import writer
from smqrt.journal.announcer import Announcer
from smqrt.journal.service import JournalService
from smqrt.lua import api
from smqrt.lua.api import smq_client, smq_hub
from smqrt.lua.apps import Application, Applications
from smqrt.lua.services import Services
from smqrt.lua.vm import Vm
from smqrt.lua.watchdog import LoopWatchdog
from smqrt.mako_conf import MakoConf
from smqrt.net import broker
from smqrt.net.contexts import server_context
from smqrt.net.listener import Listener, OnAccept, open_connections
from smqrt.net.log_limits import limit_errors_of_greenlets
from smqrt.net.origins import Hosts, Origins, is_loopback
from smqrt.net.scheduling import GarbageCollector
from smqrt.settings import Settings
from smqrt.supervise import Compactions, Pipelines

log = logging.getLogger("smqrt")

Report = Callable[[str], None]

OTHER_PORTS = {"port": range(9357, 9371), "tls_port": range(9443, 9461)}  # spec: runtime §1.2
RTL_PRIORITY = 127  # /rtl/ always wins (spec: runtime §5.9)
MQTT_END_S = 2.0  # for MQTT clients to deliver what waits, and to disconnect
SMQ_END_S = 2.0  # the same for SMQ clients
FLUSH_S = 0.05  # what the last messages take to leave

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES, _TRIM_BYTES = 4 << 20, 64 << 20
_DEEPEST_FRAMES = 12  # of a greenlet in a report of the state


@dataclass(frozen=True)
class AppSpec:
    """One application to load.

    Attributes:
        name: the path segment it is mounted under; empty for the root.
        path: a folder or a ZIP file.
        priority: -127 to 127, higher is asked first.
        inner: the folder inside the ZIP file; empty for its top.
        entry: its number in the table `apps` of mako.conf; None when that does not name it.
    """

    name: str
    path: Path
    priority: int = 0
    inner: str = ""
    entry: int | None = None


class Server:
    """One server process. Its ports are bound from the beginning, and served from `start` on.

    Args:
        settings: host, ports and the rest.
        words: all words of the command line, for `mako.argv`.
        report: takes each line meant for the person at the terminal.
        pipelines: the command that runs the pipelines of an application, whose folder is put behind it; none are run
            when there is none.
        conf: what mako.conf says; its settings are in `settings` already.

    Raises:
        StartError: an address can't be bound, or a certificate is wrong; one sentence.
    """

    def __init__(
        self,
        settings: Settings,
        words: Sequence[str] = (),
        report: Report = print,
        pipelines: Sequence[str] | None = None,
        conf: MakoConf | None = None,
    ) -> None:
        self.settings = settings
        self._conf = conf
        self.root = Root()
        sessions = RequestSessions(settings.sessions_per_address, (conf and conf.sessions) or MAX_SESSIONS)
        limits = HttpLimits(bodies_bytes=settings.bodies_mib << 20)
        self.http = HttpServer(self.root, limits, logins=Logins(sessions))
        self._report = report
        self._stopping = Event()
        self._exit_code = 0
        self._watcher: gevent.Greenlet[..., None] | None = None
        self._listeners = self._listen()
        self.http.access = _access(settings, next(iter(self._listeners.values())).address[0])
        self._announcer = Announcer(writer.opened, self._reachable_url())
        self._pipelines = Pipelines(pipelines, report) if pipelines else None
        self._compactions = Compactions(writer.opened, report)
        self._rtl = self._mount_rtl()
        self.services = self._make_services(words)
        self.vm = Vm()
        self._collector = GarbageCollector()
        self._watchdog = LoopWatchdog(self.vm, loop_s=settings.lua_loop_s)
        api.install(self.vm, self.services)
        self._loader = Applications(self.vm, self.services)
        self.applications = self._loader.all
        smq_hub.install(self.vm, self.services, self._loader.exchanges)
        smq_client.install(self.vm, self.services)

    def _listen(self) -> dict[str, Listener]:
        settings, conf = self.settings, self._conf
        listeners = {}
        if conf is None or conf.plain_http or settings.tls_port is None:
            listeners["http"] = self._bound("port", settings.host, settings.port, self.http.accepted)
        if settings.tls_port is not None:
            host = (conf and conf.tls_host) or settings.host
            try:
                context = self._tls_context()
                accepted = self.http.accepted_secure
                listeners["https"] = self._bound("tls_port", host, settings.tls_port, accepted, context)
            except BaseException:
                for listener in listeners.values():
                    listener.close()
                raise
        return listeners

    def _bound(
        self, setting: str, host: str, port: int, accepted: OnAccept, context: ssl.SSLContext | None = None
    ) -> Listener:
        """A listener on this port; when it is mako.conf's and not to be had, on the first free one of Mako's others."""
        others = OTHER_PORTS[setting] if self._conf and self._conf.settings.get(setting) == port else ()
        failures: list[StartError] = []
        for candidate in (port, *others):
            try:
                return Listener(host, candidate, accepted, context)
            except StartError as error:
                failures.append(error)
        raise failures[0]

    def _tls_context(self) -> ssl.SSLContext:
        settings = self.settings
        assert settings.cert
        assert settings.key
        return server_context(settings.cert, settings.key, settings.client_ca)

    def _mount_rtl(self) -> ResourceReader:
        with resources.as_file(resources.files("smqrt") / "rtl") as folder:
            rtl = ResourceReader("rtl", RTL_PRIORITY, io=DiskIo(folder))
        # Before the files: readers ask often, and no file's name need be looked for.
        rtl.insertprolog(JournalService(writer.opened, self.settings.commit_mib << 20))
        self.root.insert(rtl)
        self.root.insert(Manual())
        return rtl

    def _reachable_url(self) -> str:
        """The address at which processes of this machine reach the server."""
        scheme, listener = next(iter(self._listeners.items()))
        host, port = listener.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{scheme}://{_literal(host)}:{port}"

    def _make_services(self, words: Sequence[str]) -> Services:
        private = Private(self.settings.served_files)
        ios: dict[str, Io] = {
            "disk": DiskIo("/"),
            "home": DiskIo(self._conf.home if self._conf else os.getcwd()),
            "vm": server_io(),
        }
        for io in ios.values():
            io.private = private
        return Services(
            root=self.root,
            rtl=self._rtl,
            ios=ios,
            private=private,
            logins=self.http.logins,
            json_values=self.settings.json_values,
            key_file=Path(self.settings.key_file).absolute() if self.settings.key_file else None,
            argv=list(words),
            http_port=self.port("http"),
            https_port=self.port("https"),
            stop=self.ask_to_stop,
            load_certificates=self.load_certificates,
            http_server=self.http,
            conf=self._conf.path if self._conf else None,
            tracelogger=self.settings.tracelogger,
        )

    def port(self, scheme: str = "http") -> int:
        """Returns the port listened on for "http" or "https", 0 when there is none."""
        listener = self._listeners.get(scheme)
        return listener.address[1] if listener else 0

    def load(self, specs: Iterable[AppSpec]) -> None:
        """Loads applications one after the other and reports each; one that fails does not hinder the others."""
        self._loader.configure()
        for spec in specs:
            application = self._loader.load(spec.name, spec.path, spec.priority, spec.inner, spec.entry)
            self._tell(application, _outcome(application))
        if all(application.name for application in self.applications):
            self.root.insert(ApplicationList(self.applications))

    def _tell(self, application: Application, outcome: str) -> None:
        self._report(f"app {_shown_name(application)} at {application.uri}: {outcome}")

    def start(self) -> None:
        """Begins to accept connections and, if asked to, to watch the applications' code."""
        _prepare_process()
        self._collector.start()
        open_connections.limit = self.settings.max_connections
        open_connections.per_address = self.settings.connections_per_address
        if self.settings.reload:
            watches = {one: reload.FolderWatch(one.path) for one in self.applications}
            self._watcher = reload.watch(watches, self._changed)
        for listener in self._listeners.values():
            listener.start()
        self._announcer.start()
        self._compactions.start()
        for scheme, listener in self._listeners.items():
            host, port = listener.address
            self._report(f"listening on {scheme}://{_literal(host)}:{port}")
        for application in self.applications:
            self._start_pipelines(application)

    def _start_pipelines(self, application: Application) -> None:
        if self._pipelines and application.error is None:
            self._pipelines.start(_shown_name(application), application.path.resolve())

    def _changed(self, application: Application, files: list[str]) -> None:
        own, pipelines = reload.split_pipelines(files, application.path)
        try:
            if own and (application.running or application.error):  # and not stopped by hand
                self._reload(application, own)
            if pipelines and self._pipelines:
                self._pipelines.restart(application.path.resolve())
            self._start_pipelines(application)
        except Exception:
            log.exception("reloading %s failed", application.uri)

    def _reload(self, application: Application, files: list[str]) -> None:
        fault = reload.syntax_error(files, application.path, self.vm)
        if fault:
            self._tell(application, f"kept as it was: {fault}")
        else:
            application.reload()
            self._announcer.refresh()
            self._tell(application, _outcome(application))

    def run(self, specs: Iterable[AppSpec]) -> int:
        """Loads applications and serves them until SIGTERM, SIGINT or `mako.exit`; returns the exit code."""
        handlers = [gevent.signal_handler(number, react) for number, react in self._reactions().items()]
        self._watchdog.start()
        limit_errors_of_greenlets()
        loading = gevent.spawn(self.load, specs)  # beside us: a .preload may block when we are asked to stop
        either: list[Any] = [loading, self._stopping]
        gevent.wait(either, count=1)
        if loading.ready():
            loading.get()
            self.start()
            self._stopping.wait()
        else:
            loading.kill()
        self.stop()
        for handler in handlers:
            handler.cancel()
        return self._exit_code

    def _reactions(self) -> dict[signal.Signals, Callable[[], None]]:
        return {
            signal.SIGTERM: self._on_signal,
            signal.SIGINT: self._on_signal,
            signal.SIGHUP: self.renew,
            signal.SIGUSR1: self.tell_state,
        }

    def renew(self) -> None:
        """Reads the certificate files again, for the handshakes from now on; wrong ones are told, and nothing
        changes."""
        fault = self.load_certificates()
        if fault is None:
            self._report("certificates read again")
        elif "https" in self._listeners:
            log.error("certificates kept as they were: %s", fault)
        else:
            self._report(fault)

    def load_certificates(self) -> str | None:
        """The same without a word; returns why it could not be done, None when it was."""
        listener = self._listeners.get("https")
        if listener is None:
            return "there are no certificates to read again"
        try:
            listener.renew(self._tls_context())
        except StartError as error:
            return str(error)
        return None

    def tell_state(self) -> None:
        """Logs what the greenlets and the activities of the applications wait for."""
        log.warning("asked for the state\n%s", state_report(self.vm.waiting()))

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            os._exit(1)  # asked twice: somebody is in a hurry
        self.ask_to_stop()

    def ask_to_stop(self, exit_code: int = 0) -> None:
        """Lets `run` go on to its end."""
        self._exit_code = exit_code
        self._stopping.set()

    def stop(self) -> None:
        """Ends the pipelines, stops accepting, unloads the applications, disconnects every client and closes."""
        if self._watcher:
            self._watcher.kill()
        if self._pipelines:
            self._pipelines.stop()  # first, while there is a hub that takes what they have done
        self._compactions.stop()
        self._announcer.stop()
        for listener in self._listeners.values():
            listener.close()
        for application in list(self.applications):
            application.unload()
        self._loader.run_exit_functions()
        self._loader.send_mail_log()
        self._loader.close()
        self.services.processes.shutdown()
        self.services.sockets.shutdown()
        self.services.mqtt.shutdown()
        self.services.mqtt.wait_ended(MQTT_END_S)
        self.services.smq_clients.end(SMQ_END_S)
        broker.close_all()
        gevent.sleep(FLUSH_S)
        writer.close_all()
        self.http.drain(self.settings.drain_s)
        self.http.close()
        self._watchdog.stop()
        self._collector.stop()
        self.vm.stop()


def _access(settings: Settings, address: str) -> Access:
    own = {settings.host.strip("[]"), address}  # pipelines of this machine come by it
    hosts = Hosts([*settings.hosts.split(","), *own] if settings.hosts else ())
    return Access(Origins(settings.origins), hosts, is_loopback(address), settings.debug)


def _shown_name(application: Application) -> str:
    return application.name or application.path.resolve().stem


def _literal(host: str) -> str:
    """An address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def _outcome(application: Application) -> str:
    return "ok" if application.error is None else f"failed: {application.error.splitlines()[0]}"


def _prepare_process() -> None:
    """Suits the process to many connections and large messages."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Without this, malloc maps and unmaps every large message: 34 against 20 us for one of 60 KB (design: broker §8).
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def state_report(activities: Iterable[str]) -> str:
    """Give the state of the process in text: what its greenlets, and the activities of its applications, wait for.

    Args:
        activities: a line for each activity of Lua.
    """
    lua = Counter(activities)
    stacks = Counter(_stack(one) for one in _greenlets())
    gc.freeze()
    parts = [f"{sum(lua.values())} activities of Lua wait", *(_counted(count, text) for text, count in lua.items())]
    parts += [f"{sum(stacks.values())} greenlets", *(_counted(count, text) for text, count in stacks.most_common())]
    return "\n".join(parts)


def _counted(count: int, text: str) -> str:
    return f"  {text}" if count == 1 else f"  {count} times {text}"


def _greenlets() -> list[greenlet]:
    me = getcurrent()
    gc.unfreeze()  # what the server froze when it started would not be seen
    return [one for one in gc.get_objects() if isinstance(one, greenlet) and one.gr_frame is not None and one is not me]


def _stack(one: greenlet) -> str:
    frames = traceback.extract_stack(one.gr_frame, _DEEPEST_FRAMES)
    lines = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
    return f"{type(one).__name__} at " + "\n      from ".join(lines)
