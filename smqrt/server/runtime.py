"""One server process: builds its parts, then starts, drains and stops them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event

from smqrt.acme.orders import Account, AcmePlan, AcmeService
from smqrt.apps.app_spec import AppSpec
from smqrt.apps.lua import api
from smqrt.apps.lua.api import smq_client, smq_hub
from smqrt.apps.lua.applications import Applications
from smqrt.apps.lua.vm import Services, Vm
from smqrt.apps.lua.watchdog import LoopWatchdog
from smqrt.auth import service as identity
from smqrt.auth.service import IdentityService, accepted_logins
from smqrt.cluster.engines.process_cluster import cluster
from smqrt.errors import StartError
from smqrt.http.access import Private
from smqrt.http.client.client import fetch
from smqrt.http.disk import DiskIo
from smqrt.http.logins import Logins
from smqrt.http.resources import Io, server_io
from smqrt.http.server import HttpServer
from smqrt.http.sessions import MAX_SESSIONS
from smqrt.http.shared_sessions import sessions_of
from smqrt.http.tree import ResourceReader, Root
from smqrt.hub.smq import Smq
from smqrt.journal import writer
from smqrt.journal.announcer import Announcer
from smqrt.journal.service import JournalService
from smqrt.loop.greenlets import limit_errors_of_greenlets
from smqrt.loop.scheduling import GarbageCollector
from smqrt.manual.web import ApplicationList, Manual
from smqrt.operations.access_log import AccessLog
from smqrt.operations.all_workers import AllWorkers, serve_other_workers
from smqrt.operations.console.console import mount as mount_console
from smqrt.operations.context import Health, Parts
from smqrt.operations.lua_prompt import LuaPrompt, PromptLimits
from smqrt.operations.otel import Tracing
from smqrt.operations.server import AdminServer
from smqrt.server.applications import Compactions, Pipelines, ServerApplications, shown_name
from smqrt.server.configuration import (
    FileReloader,
    LiveSettings,
    acme_files,
    apply_connection_limits,
    apply_settings,
    cluster_plan,
    http_limits,
)
from smqrt.server.javascript_client import client_scripts
from smqrt.server.listeners import ADMIN, Listeners, admin_files
from smqrt.server.mako_conf import MakoConf
from smqrt.server.mqtt import MqttDirectory, open_own_hub, take_mqtt
from smqrt.server.restart.new_process import TakeOver
from smqrt.server.restart.old_process import Restarts
from smqrt.server.shutdown import Signals, Step, StepRunner, prepare_process, state_report
from smqrt.server.systemd import Notifier
from smqrt.server.worker import WorkerEnd
from smqrt.settings.limits import apply_limits, apply_mqtt
from smqrt.settings.server_settings import Settings
from smqrt.smq import gevent_broker, session_migration
from smqrt.smq.shutdown import close_clients, reject_new_clients, wait_handled, wait_sent
from smqrt.transport.origins import is_loopback
from smqrt.transport.server_tls import ListenerTls
from smqrt.workers.worker_rpc import FdChannel, WorkerRpc, worker_place

log = logging.getLogger("smqrt")

Report = Callable[[str], None]

RTL_PRIORITY = 127  # the highest: no application can replace /rtl/ (spec: runtime §5.9)
# Time limits.
JOIN_S = 1.0  # the hubs of this process join their clusters; then clients are accepted
MQTT_CLOSE_S = 2.0  # MQTT clients send their queues and disconnect
SMQ_CLOSE_S = 2.0  # SMQ clients of applications do the same
FLUSH_S = 1.0  # the kernel sends the last bytes to clients


class Server:
    """One server process. The constructor binds its ports; `start` begins to accept connections.

    Args:
        settings: all settings of the process.
        arguments: the arguments of the command line, for `mako.argv`.
        report: called with each line for the terminal.
        pipelines: the command that runs the pipelines of an application, whose folder is appended; None to run none.
        conf: the mako.conf; `settings` already contains its settings.
        take_over: the hot restart in which this process replaces another one.
        worker: the channel to the supervisor, when this process is one of several workers.

    Attributes:
        file_reloader: reloads files at SIGHUP, and when they change.
        state: "loading", "serving", or "draining" during the shutdown.
        live: the current settings.
        identities: authenticates and authorizes clients of hubs; None to accept anonymous clients.
        acme: orders the certificate; None when ACME is off.

    Raises:
        StartError: an address can't be bound, or a certificate is wrong; one sentence.
    """

    def __init__(
        self,
        settings: Settings,
        arguments: Sequence[str] = (),
        report: Report = print,
        pipelines: Sequence[str] | None = None,
        conf: MakoConf | None = None,
        take_over: TakeOver | None = None,
        worker: WorkerEnd | None = None,
    ) -> None:
        self.live = LiveSettings(settings, report)
        self._report, self._conf = report, conf
        self._take_over, self._worker = take_over, worker
        self.place = worker_place()
        self._worker_rpc = WorkerRpc(self.place) if worker else None
        self.state = "loading"
        self._exit_code = 0
        self._stopping = Event()
        self._steps = StepRunner(self._remaining)
        self._systemd = Notifier()
        self._collector = GarbageCollector()
        self._compactions = Compactions(writer.opened, report)
        # Limits and the cluster plan are state of the process. A hub reads them when it is created.
        apply_limits(settings.limits, settings.topics)
        apply_mqtt(settings.mqtt)
        cluster.set_plan(cluster_plan(settings.cluster))

        # HTTP: the directory tree, sessions, logins, ports and the admin listener. The ports are bound here.
        self.root = Root()
        sessions = sessions_of(self.place, settings.sessions_per_address, (conf and conf.sessions) or MAX_SESSIONS)
        self.http = HttpServer(self.root, http_limits(settings), logins=Logins(sessions, self.place.secret))
        self.identities = _identity_service(settings, self.http.logins)
        sessions.catch_up()
        self._listeners = Listeners(settings, self.http, conf, *((worker.ports, worker.balance) if worker else ()))
        self._operations = Operations(settings, self.http, self.identities, self._listeners, worker, self._worker_rpc)
        self.admin = self._operations.admin
        self.acme = _acme_service(settings, self._listeners, self.http, report)

        # Reload. The settings come first, because they name the files of the other parts.
        self.file_reloader = FileReloader(report)
        self.file_reloader.on_reloaded = worker.reloaded if worker else self._systemd.reloaded
        self.file_reloader.add("settings", self.live.reload)
        if self._listeners.has_certificates:
            self.file_reloader.add("certificates", self._listeners.reload, self._listeners.files)
        if self.identities is not None:
            self.file_reloader.add("users and rules", self.identities.reload, self.identities.paths)
        if self._operations.access_log:
            self.file_reloader.add("access log", self._operations.access_log.reopen)
        apply_settings(self.live, self.http, self._listeners)

        # Applications: the Lua runtime with its libraries, the loader, and the pipelines.
        self._announcer = Announcer(writer.opened, self._listeners.local_url())
        self._own_hub: Smq | None = None
        self._rtl = self._mount_rtl()
        self.services = self._make_services(arguments)
        self.vm = Vm(settings.lua.version)
        self._watchdog = LoopWatchdog(self.vm, loop_s=settings.lua_loop_s, memory_mib=settings.limits.lua_memory_mib)
        api.install(self.vm, self.services)
        self._loader = Applications(self.vm, self.services)
        runner = Pipelines(pipelines, report) if pipelines else None
        self._apps = ServerApplications(self._loader, runner, report, self._announcer.refresh, settings.reload)
        self.applications = self._apps.all
        hubs = smq_hub.install(self.vm, self.services, self._loader.exchanges)
        smq_client.install_smq_cluster(self.vm, self.services, hubs)
        smq_client.install_smq_client(self.vm, self.services)

        # Operators: health, hot restart, and everything that the admin listener shows.
        self.health = Health(lambda: self.state, lambda: self.applications, settings.strict)
        restart = replace(settings.restart, socket="") if worker else settings.restart  # the supervisor has the socket
        self._restarts = Restarts(self, restart, report, self._replaced)
        self._operations.show(
            Parts(
                health=self.health,
                listeners=self._listeners,
                http=self.http,
                applications=self.applications,
                vm=self.vm,
                pipelines=self._apps.pipeline_states,
                restart=self._apps.restart,
                drain=self.drain,
                acme=self.acme.snapshot if self.acme and self.place.is_first else lambda: None,
            )
        )

    def _mount_rtl(self) -> ResourceReader:
        with resources.as_file(resources.files("smqrt") / "rtl") as folder:
            rtl = ResourceReader("rtl", RTL_PRIORITY, io=DiskIo(folder))
        # Before the files: readers of journals poll often, and this saves the look-up of a file.
        rtl.insertprolog(
            JournalService(writer.opened, self.settings.commit_mib << 20, lambda: self.state == "draining")
        )
        rtl.insert(ResourceReader(io=client_scripts()))
        # Pages of older applications load /rtl/jquery.js. BASE_DIR is the folder where the distribution has it.
        rtl.insert(ResourceReader(io=DiskIo(import_module("xstatic.pkg.jquery").BASE_DIR)))
        self.root.insert(rtl)
        self.root.insert(MqttDirectory())
        self.http.take_mqtt = take_mqtt
        if self.settings.pages.manual:
            self.root.insert(Manual())
        return rtl

    def _make_services(self, arguments: Sequence[str]) -> Services:
        settings = self.settings
        private = Private(settings.served_files)
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
            json_values=settings.json_values,
            key_file=Path(settings.tpm_key_file).absolute() if settings.tpm_key_file else None,
            argv=list(arguments),
            http_port=self.port("http"),
            https_port=self.port("https"),
            stop=self.ask_to_stop,
            load_certificates=self.load_certificates,
            http_server=self.http,
            conf=self._conf.path if self._conf else None,
            tracelogger=settings.tracelogger,
            worker_rpc=self._worker_rpc,
        )

    @property
    def settings(self) -> Settings:
        """The current settings."""
        return self.live.current

    def port(self, scheme: str = "http") -> int:
        """Return the port of "http" or "https"; 0 without such a listener."""
        return self._listeners.port_of(scheme)

    # ---- start

    def run(self, specs: Iterable[AppSpec]) -> int:
        """Load applications and serve them until SIGTERM, SIGINT or `mako.exit`; return the exit code."""
        at_once: dict[int, Callable[[], object]] = {
            signal.SIGTERM: self.end,
            signal.SIGINT: (lambda: None) if self._worker else self.end,  # Ctrl-C also reaches the supervisor
            signal.SIGUSR1: self.log_state,
        }
        supervisor = f"send SIGUSR2 to its supervisor, process {os.getppid()}"
        refuse_restart = partial(self._report, f"a worker can't restart itself; {supervisor}")
        restart = refuse_restart if self._worker else self._restarts.ask
        signals = Signals(at_once, {signal.SIGHUP: self.reload, signal.SIGUSR2: restart})
        if self._worker:
            self._worker.start(self)
        self._watchdog.start()
        # Before applications are loaded: with Python's own passes, 100,000 MQTT sessions of a file take twice as long.
        self._collector.start()
        limit_errors_of_greenlets()
        self._operations.start()
        loading = gevent.spawn(self.load, specs)  # a greenlet: SIGTERM also stops a server whose .preload blocks
        either: list[Any] = [loading, self._stopping]
        gevent.wait(either, count=1)
        failure: StartError | None = None
        if loading.ready():
            loading.get()
            failure = self._serve(signals)
        else:
            loading.kill()
        signals.cancel()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by default it would kill the process
        with self._steps.within(self.settings.drain.timeout_s):
            self.stop()
        if failure:
            raise failure
        return self._exit_code

    def load(self, specs: Iterable[AppSpec]) -> None:
        """Load applications one after the other and report each. A failed application does not stop the others."""
        self._apps.load(specs)
        self._own_hub = open_own_hub(self.settings.mqtt)
        if self.settings.pages.applications and all(application.name for application in self.applications):
            self.root.insert(ApplicationList(self.applications))

    def _serve(self, signals: Signals) -> StartError | None:
        """Serve until `end` is called, and return None; return the error of a failed start."""

        def publish_late(take_over: TakeOver) -> None:
            if not take_over.publish_late():
                self._listeners.keep_files()
                self.end(1)

        take_over = self._take_over
        try:
            if take_over:
                self._prepare()
                cluster.wait_until_joined(JOIN_S)  # so that the other nodes have the hubs before the clients arrive
                take_over.take(self.http, self.failed_applications())
            self._restarts.open()
        except StartError as error:
            return error
        self.start()
        signals.ready()
        if take_over:
            gevent.spawn(publish_late, take_over)
        self._stopping.wait()
        return None

    def _prepare(self) -> None:
        prepare_process()
        self._collector.freeze()
        apply_connection_limits(self.settings)

    def start(self) -> None:
        """Start the listeners and all background work."""
        # A process that takes over has done this in `_serve`, before it received clients.
        if self._take_over is None:
            self._prepare()
            if not self.place.is_first:
                cluster.wait_until_joined(JOIN_S)  # so that clients reach the clients of workers that already serve
        self._apps.watch_code()
        if self.acme is not None:
            self.acme.start()  # before the listeners: the first connection may be a verification by the authority
        self._listeners.start()
        self.file_reloader.start()
        if self.identities is not None:
            self.identities.start()
        self._announcer.start()
        if self.place.is_first:
            self._compactions.start()
        urls = {name: self._listeners.url(name) for name in self._listeners}
        listening = [
            f"listening on {url}" + ("" if name in ("http", "https") else f" (listener {name})")
            for name, url in urls.items()
        ]
        for line in listening if self._worker is None else ():
            self._report(line)
        if self._worker_rpc is not None:
            self._worker_rpc.server.open()
        if self.admin is not None:
            self._report(f"admin at {self.admin.url}")
        if self.identities is not None:
            self._report(accepted_logins(self.settings.auth))
        elif not all(one.is_unix or is_loopback(one.address[0]) for one in self._listeners.values()):
            self._report("hubs accept anonymous clients, unless an application requires a login; see auth.users")
        self._apps.start_pipelines()
        self.state = "serving"
        if self._worker:
            self._worker.ready(listening)
        failed = [f"application {shown_name(application)} failed" for application in self._apps.failed()]
        self._systemd.ready(", ".join([*urls.values(), *failed]))

    # ---- requests of operators, signals and applications

    def drain(self, on: bool) -> None:
        """Close the SMQ clients after `drain.delay_s` and reject new ones, until this is called with False."""
        log.warning("an operator drains the server" if on else "an operator ends the drain; clients are accepted again")
        if on and not self.health.drained:
            gevent.spawn(self._close_clients)
        self.health.drained = on
        if not on:
            gevent_broker.accept_new_clients(True)

    def _close_clients(self) -> None:
        gevent.sleep(self.settings.drain.delay_s)
        if self.health.drained and self.state == "serving":
            gevent_broker.accept_new_clients(False)
            brokers = gevent_broker.opened()
            reject_new_clients(brokers)
            wait_handled(brokers, self.settings.drain_s)
            count = close_clients(brokers, self.settings.drain.window_s, self.settings.drain_s)
            log.warning("drained: %d SMQ clients were closed", count)

    def load_certificates(self, in_thread: bool = True) -> str | None:
        """Read the certificates again. A failure changes nothing.

        Args:
            in_thread: block only this greenlet.

        Returns:
            The error; None for success.
        """
        if not self._listeners.has_certificates:
            return "there are no certificates to read again"
        return self._listeners.reload(in_thread)

    def reload(self) -> None:
        """Start a reload of settings and files; never blocks."""
        self._systemd.reloading()
        self.file_reloader.ask()
        if self.acme is not None:
            self.acme.try_now()

    def log_state(self) -> None:
        """Log where each greenlet and each Lua activity waits."""
        log.warning("state of the server\n%s", state_report(self.vm.waiting()))

    def ask_to_stop(self, exit_code: int = 0) -> None:
        """Stop the server, with all its workers."""
        if self._worker:
            self._worker.exit(exit_code)
        else:
            self.end(exit_code)

    # ---- hot restart

    @property
    def is_successor(self) -> bool:
        """Whether this process replaced another one."""
        return self._take_over is not None

    def failed_applications(self) -> list[str]:
        """Return the name and the error of each failed application."""
        return [f"{shown_name(one)}: {one.error}" for one in self._apps.failed()]

    def stop_pipelines(self) -> None:
        """Stop the pipelines; blocks this greenlet until their processes have ended."""
        self._apps.stop_pipelines()

    def start_pipelines(self) -> None:
        """Start the pipelines again."""
        self._apps.start_pipelines()

    def _replaced(self, pid: int) -> None:
        self._systemd.replaced(pid)
        if self._worker_rpc is not None:
            self._worker_rpc.server.close()  # from now on the other workers call the new process
        self.end()

    # ---- requests of the supervisor

    def accept_for(self, workers: Sequence[int]) -> None:
        """Also accept the connections of these workers."""
        self._listeners.accept_for(workers)

    def hand_over(self, channel: FdChannel) -> tuple[str | None, int]:
        """Let the process at the other end of the channel replace this one; see `Restarts.hand_over`."""
        return self._restarts.hand_over(channel)

    def end_without_successor(self) -> None:
        """Stop this process when no other process takes over its sockets."""
        self._listeners.expect_no_successor()
        self.end()

    # ---- stop

    def end(self, exit_code: int = 0) -> None:
        """Stop this process: `run` returns the exit code."""
        self._exit_code = exit_code
        self._stopping.set()

    def stop(self) -> None:
        """Stop all parts in order; blocks. Messages accepted before are delivered, or counted as lost."""
        never_served = self.state == "loading" and self.is_successor
        self.state = "draining"
        if not (self._restarts.is_handed_over or never_served):  # else systemd already watches another process
            self._systemd.stopping(self.settings.drain.timeout_s)
        drain, grace_s = self.settings.drain, self.settings.drain_s
        brokers = gevent_broker.opened()
        steps: list[Step] = [
            ("the delay", lambda: gevent.sleep(0 if self._restarts.is_handed_over else drain.delay_s)),
            ("rejecting new clients", lambda: self._reject_new_clients(brokers)),
            # Before the listeners close: pipelines commit their results over HTTP.
            ("stopping the pipelines", self.stop_pipelines),
            ("compactions", self._compactions.stop),
            ("listeners", self._close_listeners),
            ("open HTTP requests", lambda: self.http.drain(grace_s)),
            ("received messages", lambda: wait_handled(brokers, grace_s)),
            # Before the clients are closed: `onunload` may send them messages.
            ("onunload of the applications", self._loader.end),
            ("closing SMQ clients", lambda: close_clients(brokers, drain.window_s, grace_s)),
            ("unloading the applications", self._loader.unload),
            ("processes, sockets and MQTT clients of applications", lambda: _close_services(self.services)),
            ("SMQ clients of applications", lambda: self.services.smq_clients.end(SMQ_CLOSE_S)),
            ("cluster", cluster.close),
            ("hubs", gevent_broker.close_all),
            ("clients of restarting applications", session_migration.drop_kept_clients),
            # After the applications have ended: this forwards their last messages.
            ("the hand-over to the new process", self._restarts.finish),
            ("the last bytes to clients", lambda: wait_sent(FLUSH_S)),
            # After the hubs, whose last messages they record.
            ("journals", writer.close_all),
            ("the other parts", self._close_other_parts),
        ]
        self._steps.run(steps)

    def _reject_new_clients(self, brokers: Iterable[gevent_broker.GeventBroker]) -> None:
        self._apps.stop_watching()
        self._restarts.close()
        self.file_reloader.stop()
        if self.acme is not None:
            self.acme.stop()
        reject_new_clients(brokers)

    def _close_listeners(self) -> None:
        self._announcer.stop()
        if self._worker:
            self._worker.left()
        self._listeners.reject_queued()
        self._listeners.close()

    def _close_other_parts(self) -> None:
        identity.set_server_identity_service(None)
        gevent_broker.set_topic_rules(gevent_broker.TopicRules())
        if self.identities is not None:
            self.identities.close()
        self.http.close()
        self.http.logins.sessions.close()
        self._systemd.close()
        if self._worker_rpc is not None:
            self._worker_rpc.server.close()
        self._operations.close()
        self._watchdog.stop()
        self._collector.stop()
        self.vm.stop()

    def _remaining(self) -> str:
        """Return the counts of open objects, for the message of a shutdown that exceeds its time limit."""
        counts = {
            "HTTP connections": len(self.http),
            "SMQ clients": sum(len(one.sessions) for one in gevent_broker.opened()),
            "running applications": sum(one.running for one in self.applications),
            "open journals": len(writer.opened),
        }
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "nothing"


def _identity_service(settings: Settings, logins: Logins) -> IdentityService | None:
    identity.set_server_identity_service(None)
    if not IdentityService.is_wanted(settings.auth):
        return None
    crls = [settings.tls.client_crl, *(one.client_crl for one in settings.listener.values())]
    service = IdentityService(settings.auth, logins.throttle, fetch, list(filter(None, crls)))
    identity.set_server_identity_service(service)
    gevent_broker.follow(service)
    service.changed.append(partial(logins.recheck_clients, service.revalidate))
    return service


def _acme_service(
    settings: Settings, listeners: Listeners, http: HttpServer, report: Callable[[str], None]
) -> AcmeService | None:
    tls, files = settings.tls, acme_files(settings)
    if files is None:
        return None
    binding = (tls.acme_eab_id, tls.acme_eab_key) if tls.acme_eab_id else ()
    account = Account(tls.acme_directory, files.account, tls.acme_contact, tls.acme_ca or "", binding)
    plan = AcmePlan(files, account, tls.acme_challenge or "")
    orders = worker_place().is_first
    service = AcmeService(plan, listeners.answer_challenges, listeners.reload, report, listeners.has_http, orders)
    http.challenge_answer = service.answers.of_path
    return service


def _close_services(services: Services) -> None:
    services.processes.shutdown()
    services.sockets.shutdown()
    services.mqtt.shutdown()
    services.mqtt.wait_ended(MQTT_CLOSE_S)


class Operations:
    """The admin listener, the access log and the traces of a server.

    Args:
        settings: all settings of the process.
        http: the server whose requests are logged and traced.
        identities: authenticates operators; None for no login.
        listeners: reloads the certificates of the admin listener.
        worker: has the socket of the admin listener, when this process is a worker.
        worker_rpc: calls the other workers; None without workers.

    Attributes:
        admin: the admin listener; None when it is off, and in all workers but the first.
        access_log: None when it is off.

    Raises:
        StartError: an address can't be bound, or a file can't be written; one sentence.
    """

    def __init__(
        self,
        settings: Settings,
        http: HttpServer,
        identities: IdentityService | None,
        listeners: Listeners,
        worker: WorkerEnd | None,
        worker_rpc: WorkerRpc | None,
    ) -> None:
        self._settings, self._worker_rpc = settings.admin, worker_rpc
        self._parts: Parts | None = None
        self._prompt: LuaPrompt | None = None
        self.admin: AdminServer | None = None
        if settings.admin.enabled and worker_place().is_first:
            files = admin_files(settings)
            tls = ListenerTls(files) if files else None
            sockets = worker.ports[ADMIN].own if worker else ()
            self.admin = AdminServer(
                settings.admin.host, settings.admin.port, identities, tls, settings.tls.handshake_s, sockets
            )
            if tls is not None:
                listeners.add_admin(self.admin.listener, tls)
        self.access_log: AccessLog | None = None
        if path := settings.log.access:
            try:
                self.access_log = AccessLog(path, settings.log.format == "json")
            except OSError as error:
                raise StartError(f"log.access: {path} can't be written: {error.strerror}.") from None
            http.observers = (*http.observers, self.access_log)
            http.on_rejected = self.access_log.refused
        self._tracing: Tracing | None = None
        if settings.otel.endpoint:
            self._tracing = Tracing(settings.otel.endpoint, settings.otel.service)
            http.observers = (*http.observers, self._tracing)

    def show(self, parts: Parts) -> None:
        """Serve these parts at the admin listener of this process. Other workers send theirs to worker 0."""
        self._parts = parts
        if self._settings.lua_prompt:
            limits = PromptLimits(self._settings.lua_prompt_s, self._settings.lua_prompt_loop_ms / 1000)
            self._prompt = LuaPrompt(parts.vm, parts.applications, limits)
        if self.admin is not None:
            all_workers = AllWorkers(parts, self._worker_rpc)
            self.admin.mount(parts, all_workers)
            if self._settings.console:
                self.admin.application = mount_console(all_workers, self.admin.root)
        elif self._worker_rpc is not None and self._settings.enabled:
            serve_other_workers(self._worker_rpc.server, parts)

    def start(self) -> None:
        """Accept connections of operators."""
        if self._prompt is not None:
            self._prompt.start()
        if self.admin is not None:
            self.admin.start()
        elif self._worker_rpc is not None and self._settings.enabled and self._parts is not None:
            self._parts.start()

    def close(self) -> None:
        """Close the admin listener, the access log and the traces."""
        if self._prompt is not None:
            self._prompt.close()
        if self.admin is not None:
            self.admin.close()
        if self._parts is not None:
            self._parts.stop()
        for one in (self.access_log, self._tracing):
            if one is not None:
                one.close()
