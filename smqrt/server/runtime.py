"""The composition root: builds the parts of a server, starts, drains and stops them."""

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

from smqrt.acme.orders import Account
from smqrt.acme.service import AcmePlan, AcmeService
from smqrt.apps.app_spec import AppSpec
from smqrt.apps.lua import api
from smqrt.apps.lua.api import smq_client, smq_cluster, smq_hub
from smqrt.apps.lua.applications import Application, Applications
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.apps.lua.watchdog import LoopWatchdog
from smqrt.auth import service as identity
from smqrt.auth.service import IdentityService, ways_in
from smqrt.cluster.engines.process_cluster import cluster
from smqrt.errors import StartError
from smqrt.http.access import Private
from smqrt.http.client.client import fetched
from smqrt.http.disk import DiskIo
from smqrt.http.logins import Logins
from smqrt.http.resources import Io, server_io
from smqrt.http.server import HttpServer
from smqrt.http.sessions import MAX_SESSIONS
from smqrt.http.shared_sessions import sessions_of
from smqrt.http.tree import ResourceReader, Root
from smqrt.journal import writer
from smqrt.journal.announcer import Announcer
from smqrt.journal.service import JournalService
from smqrt.loop.log_limits import limit_errors_of_greenlets
from smqrt.loop.scheduling import GarbageCollector
from smqrt.manual.web import ApplicationList, Manual
from smqrt.operations.access_log import AccessLog
from smqrt.operations.all_workers import Together, answer_others
from smqrt.operations.console.mount import mount as mount_console
from smqrt.operations.context import Parts
from smqrt.operations.health import Health
from smqrt.operations.otel import Tracing
from smqrt.operations.server import AdminServer
from smqrt.server import file_reload as reload
from smqrt.server import shutdown
from smqrt.server.file_reload import Renewal
from smqrt.server.listeners import Listeners
from smqrt.server.live_settings import LiveSettings, apply_connection_limits, apply_settings, cluster_plan, http_limits
from smqrt.server.mako_conf import MakoConf
from smqrt.server.ports import ADMIN, admin_files
from smqrt.server.restart.control import Restarts
from smqrt.server.restart.new_process import TakeOver
from smqrt.server.shutdown import Ending, Signals, Step
from smqrt.server.side_processes import Compactions, Pipelines
from smqrt.server.startable import acme_files
from smqrt.server.systemd import Notifier
from smqrt.server.worker import WorkerEnd
from smqrt.settings.limits import apply_limits
from smqrt.settings.settings import Settings
from smqrt.smq import gevent_broker, session_migration
from smqrt.smq.shutdown import close_clients, refuse_newcomers, wait_handled, wait_sent
from smqrt.transport.origins import is_loopback
from smqrt.transport.server_tls import ListenerTls
from smqrt.workers.fd_channel import FdChannel
from smqrt.workers.worker_identity import worker_place
from smqrt.workers.worker_rpc import WorkerRpc

log = logging.getLogger("smqrt")

Report = Callable[[str], None]

RTL_PRIORITY = 127  # /rtl/ always wins (spec: runtime §5.9)
JOIN_S = 1.0  # for the hubs of a worker to be joined with those of the others before it takes clients
MQTT_END_S = 2.0  # for MQTT clients to deliver what waits, and to disconnect
SMQ_END_S = 2.0  # the same for SMQ clients
LAST_BYTES_S = 1.0  # for what was sent last to reach the other machines


class Server:
    """One server process. Its ports are bound from the beginning, and served from `start` on.

    Args:
        settings: host, ports and the rest.
        words: all words of the command line, for `mako.argv`.
        report: takes each line meant for the person at the terminal.
        pipelines: the command that runs the pipelines of an application, whose folder is put behind it; none are run
            when there is none.
        conf: what mako.conf says; its settings are in `settings` already.
        take_over: another process whose place this one takes.
        worker: the channel to the supervisor, of one worker of several.

    Attributes:
        renewal: what is read again at SIGHUP, and when its files change.
        state: "loading", "serving", or "draining" once it was asked to stop.
        live: the settings in force; tells who watches them of changes.
        identities: who may connect to hubs; None when everybody may.
        acme: orders the certificate; None when the settings ask for none.

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
        take_over: TakeOver | None = None,
        worker: WorkerEnd | None = None,
    ) -> None:
        self.live = LiveSettings(settings, report)
        self._take_over, self._worker = take_over, worker
        self.place = worker_place()
        self._fleet = WorkerRpc(self.place) if worker else None
        restart = replace(settings.restart, socket="") if worker else settings.restart  # that is the supervisor's
        self._restarts = Restarts(self, restart, report, self._replaced)
        self._conf = conf
        self.root = Root()
        sessions = sessions_of(self.place, settings.sessions_per_address, (conf and conf.sessions) or MAX_SESSIONS)
        apply_limits(settings.limits, settings.topics)
        cluster.follow(cluster_plan(settings.cluster))
        self.http = HttpServer(self.root, http_limits(settings), logins=Logins(sessions, self.place.secret))
        self._report = report
        self.state = "loading"
        self._systemd = Notifier()
        self._stopping = Event()
        self._ending = Ending(self._left)
        self._exit_code = 0
        self._watches: dict[Application, reload.FolderWatch] = {}
        self._watcher: gevent.Greenlet[..., None] | None = None
        self.identities = self._read_identities()
        sessions.catch_up()
        given = (worker.ports, worker.balance) if worker else (None, None)
        self._listeners = Listeners(settings, self.http, conf, *given)
        self.admin = self._open_admin()
        self.acme = self._make_acme()
        self.renewal = self._make_renewal()
        apply_settings(self.live, self.http, self._listeners)
        self._announcer = Announcer(writer.opened, self._reachable_url())
        self._pipelines = Pipelines(pipelines, report) if pipelines else None
        self._compactions = Compactions(writer.opened, report)
        self._rtl = self._mount_rtl()
        self.services = self._make_services(words)
        self.vm = Vm(settings.lua.version)
        self._collector = GarbageCollector()
        self._watchdog = LoopWatchdog(self.vm, loop_s=settings.lua_loop_s, memory_mib=settings.limits.lua_memory_mib)
        api.install(self.vm, self.services)
        self._loader = Applications(self.vm, self.services)
        self.applications = self._loader.all
        self.health = Health(lambda: self.state, lambda: self.applications, settings.strict)
        self._parts = self._show_operators()
        self._access_log = self._open_access_log()
        self._tracing = self._open_tracing()
        hubs = smq_hub.install(self.vm, self.services, self._loader.exchanges)
        smq_cluster.install(self.vm, self.services, hubs)
        smq_client.install(self.vm, self.services)

    def _make_renewal(self) -> Renewal:
        renewal = Renewal(self._report)
        renewal.answered = self._worker.reloaded if self._worker else self._systemd.reloaded
        renewal.add("settings", self.live.reload)  # first: others may find the names of their files there
        if self._listeners.has_certificates:
            renewal.add("certificates", self._listeners.reload, self._listeners.files)
        if self.identities is not None:
            renewal.add("users and rules", self.identities.reload, self.identities.paths)
        return renewal

    def _make_acme(self) -> AcmeService | None:
        tls, files = self.settings.tls, acme_files(self.settings)
        if files is None:
            return None
        binding = (tls.acme_eab_id, tls.acme_eab_key) if tls.acme_eab_id else ()
        account = Account(tls.acme_directory, files.account, tls.acme_contact, tls.acme_ca or "", binding)
        plan = AcmePlan(files, account, tls.acme_challenge or "")
        listeners, orders = self._listeners, self.place.is_first
        made = AcmeService(
            plan, listeners.answer_challenges, listeners.reload, self._report, listeners.has_http, orders
        )
        self.http.challenge_answer = made.answers.of_path
        return made

    def _open_admin(self) -> AdminServer | None:
        settings = self.settings.admin
        if not settings.enabled or not self.place.is_first:
            return None
        files = admin_files(self.settings)
        tls = ListenerTls(files) if files else None
        given = self._worker.ports[ADMIN].own if self._worker else ()
        admin = AdminServer(settings.host, settings.port, self.identities, tls, self.settings.tls.handshake_s, given)
        if tls is not None:
            self._listeners.look_after(admin.listener, tls)
        return admin

    def _show_operators(self) -> Parts:
        """What the admin listener serves, here or in worker 0."""
        parts = Parts(
            health=self.health,
            listeners=self._listeners,
            http=self.http,
            applications=self.applications,
            vm=self.vm,
            pipelines=lambda: self._pipelines.states() if self._pipelines else [],
            restart=self._restart,
            drain=self.drain,
            acme=self.acme.snapshot if self.acme and self.place.is_first else lambda: None,
        )
        if self.admin is not None:
            together = Together(parts, self._fleet)
            self.admin.mount(parts, together)
            if self.settings.admin.console:
                self.admin.application = mount_console(together, self.admin.root)
        elif self._fleet is not None and self.settings.admin.enabled:
            answer_others(self._fleet.desk, parts)
        return parts

    def _open_tracing(self) -> Tracing | None:
        settings = self.settings.otel
        if not settings.endpoint:
            return None
        tracing = Tracing(settings.endpoint, settings.service)
        self.http.observers = (*self.http.observers, tracing)
        return tracing

    def _open_access_log(self) -> AccessLog | None:
        settings = self.settings.log
        if not settings.access:
            return None
        try:
            access_log = AccessLog(settings.access, settings.format == "json")
        except OSError as error:
            raise StartError(f"log.access: {settings.access} can't be written: {error.strerror}.") from None
        self.http.observers = (*self.http.observers, access_log)
        self.http.on_refused = access_log.refused
        self.renewal.add("access log", access_log.reopen)
        return access_log

    def _restart(self, application: Application) -> None:
        application.reload()
        self._announcer.refresh()
        self._tell(application, _outcome(application))

    @property
    def settings(self) -> Settings:
        """Those in force."""
        return self.live.current

    def _read_identities(self) -> IdentityService | None:
        settings, logins = self.settings, self.http.logins
        identity.serve(None)
        if not IdentityService.is_wanted(settings.auth):
            return None
        lists = [settings.tls.client_crl, *(one.client_crl for one in settings.listener.values())]
        made = IdentityService(settings.auth, logins.throttle, fetched, list(filter(None, lists)))
        identity.serve(made)
        gevent_broker.follow(made)
        made.changed.append(partial(logins.look_again, made.revalidate))
        return made

    def _mount_rtl(self) -> ResourceReader:
        with resources.as_file(resources.files("smqrt") / "rtl") as folder:
            rtl = ResourceReader("rtl", RTL_PRIORITY, io=DiskIo(folder))
        # Before the files: readers ask often, and no file's name need be looked for.
        rtl.insertprolog(
            JournalService(writer.opened, self.settings.commit_mib << 20, lambda: self.state == "draining")
        )
        # Pages of older applications load /rtl/jquery.js. The package has a variable for where a distribution keeps it.
        rtl.insert(ResourceReader(io=DiskIo(import_module("xstatic.pkg.jquery").BASE_DIR)))
        self.root.insert(rtl)
        if self.settings.pages.manual:
            self.root.insert(Manual())
        return rtl

    def _reachable_url(self) -> str:
        """The address at which processes of this machine reach the server."""
        name, listener = next(iter(self._listeners.items()))
        host, port = listener.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"{self._listeners.scheme(name)}://{_literal(host)}:{port}"

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
            key_file=Path(self.settings.tpm_key_file).absolute() if self.settings.tpm_key_file else None,
            argv=list(words),
            http_port=self.port("http"),
            https_port=self.port("https"),
            stop=self.ask_to_stop,
            load_certificates=self.load_certificates,
            http_server=self.http,
            conf=self._conf.path if self._conf else None,
            tracelogger=self.settings.tracelogger,
            fleet=self._fleet,
        )

    def port(self, scheme: str = "http") -> int:
        """Returns the port listened on for "http" or "https", 0 when there is none."""
        return self._listeners.port_of(scheme)

    def load(self, specs: Iterable[AppSpec]) -> None:
        """Loads applications one after the other and reports each; one that fails does not hinder the others."""
        self._loader.configure()
        for spec in specs:
            # Before its code is read: what is saved meanwhile is a change.
            watch = reload.FolderWatch(spec.path) if self.settings.reload else None
            application = self._loader.load(spec.name, spec.path, spec.priority, spec.inner, spec.entry)
            if watch:
                self._watches[application] = watch
            self._tell(application, _outcome(application))
        if self.settings.pages.applications and all(application.name for application in self.applications):
            self.root.insert(ApplicationList(self.applications))

    def _tell(self, application: Application, outcome: str) -> None:
        self._report(f"app {_shown_name(application)} at {application.uri}: {outcome}")

    def start(self) -> None:
        """Begins to accept connections and, if asked to, to watch the applications' code."""
        if self._take_over is None:
            self._prepare()
            if not self.place.is_first:
                cluster.wait_until_joined(JOIN_S)  # whose clients reach those of the workers that serve already
        if self.settings.reload:
            watches = {one: self._watches.get(one) or reload.FolderWatch(one.path) for one in self.applications}
            self._watcher = reload.watch(watches, self._changed)
        if self.acme is not None:
            self.acme.start()  # first: a connection may be that of the authority, which looks for an answer
        self._listeners.start()
        self.renewal.start()
        if self.identities is not None:
            self.identities.start()
        self._announcer.start()
        if self.place.is_first:
            self._compactions.start()
        urls = {name: self._url(name, listener.address) for name, listener in self._listeners.items()}
        listening = [
            f"listening on {url}" + ("" if name in ("http", "https") else f" (listener {name})")
            for name, url in urls.items()
        ]
        for line in listening if self._worker is None else ():
            self._report(line)
        if self._fleet is not None:
            self._fleet.desk.open()
        if self.admin is not None:
            self._report(f"admin at {self.admin.url}")
        if self.identities is not None:
            self._report(ways_in(self.settings.auth))
        elif not all(is_loopback(listener.address[0]) for listener in self._listeners.values()):
            self._report("hubs let in: whoever comes, where no application asks for a login; see auth.users")
        for application in self.applications:
            self._start_pipelines(application)
        self.state = "serving"
        if self._worker:
            self._worker.ready(listening)
        failed = [_shown_name(application) for application in self.applications if application.error is not None]
        self._systemd.ready(", ".join([*urls.values(), *(f"application {name} failed" for name in failed)]))

    def _url(self, name: str, address: tuple[str, int]) -> str:
        return f"{self._listeners.scheme(name)}://{_literal(address[0])}:{address[1]}"

    def _prepare(self) -> None:
        """What is to be done before the first client is here."""
        shutdown.prepare()
        self._collector.start()
        apply_connection_limits(self.settings)

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
            self._restart(application)

    def run(self, specs: Iterable[AppSpec]) -> int:
        """Loads applications and serves them until SIGTERM, SIGINT or `mako.exit`; returns the exit code."""
        signals = self._signals()
        if self._worker:
            self._worker.start(self)
        self._watchdog.start()
        limit_errors_of_greenlets()
        if self.admin is not None:
            self.admin.start()
        elif self._fleet is not None and self.settings.admin.enabled:
            self._parts.start()
        loading = gevent.spawn(self.load, specs)  # beside us: a .preload may block when we are asked to stop
        either: list[Any] = [loading, self._stopping]
        gevent.wait(either, count=1)
        failure: StartError | None = None
        if loading.ready():
            loading.get()
            failure = self._serve(signals)
        else:
            loading.kill()
        signals.cancel()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it has nothing to read again, and would end the process
        with self._ending.within(self.settings.drain.timeout_s):
            self.stop()
        if failure:
            raise failure
        return self._exit_code

    def _serve(self, signals: Signals) -> StartError | None:
        """Returns why it could not, after the applications are loaded."""
        try:
            if self._take_over:
                self._prepare()
                cluster.wait_until_joined(JOIN_S)  # so that clients come to a hub that the other nodes know
                self._take_over.take(self.http, self.failed_applications())
            self._restarts.open()
        except StartError as error:
            return error
        self.start()
        signals.ready()
        if self._take_over:
            gevent.spawn(self._take_late, self._take_over)
        self._stopping.wait()
        return None

    def _take_late(self, take_over: TakeOver) -> None:
        if not take_over.take_late():
            self.end(1)

    # ---- what a hot restart asks for

    @property
    def is_successor(self) -> bool:
        """Whether it has taken another process's place."""
        return self._take_over is not None

    def _replaced(self, pid: int) -> None:
        self._systemd.replaced(pid)
        if self._fleet is not None:
            self._fleet.desk.close()  # the others are to ask the new process from now on
        self.end()

    def failed_applications(self) -> list[str]:
        """The names of the applications that do not run, and why."""
        return [f"{_shown_name(one)}: {one.error}" for one in self.applications if one.error is not None]

    def stop_pipelines(self) -> None:
        """Ends the pipelines."""
        if self._pipelines:
            self._pipelines.stop()

    def start_pipelines(self) -> None:
        """Starts them again."""
        for application in self.applications:
            self._start_pipelines(application)

    def _signals(self) -> Signals:
        at_once: dict[int, Callable[[], object]] = {
            signal.SIGTERM: self.end,
            signal.SIGINT: (lambda: None) if self._worker else self.end,  # Ctrl-C reaches the supervisor, too
            signal.SIGUSR1: self.tell_state,
        }
        restart = self._refuse_restart if self._worker else self._restarts.ask
        return Signals(at_once, {signal.SIGHUP: self.reload, signal.SIGUSR2: restart})

    def drain(self, on: bool) -> None:
        """Sends the SMQ clients away, soon, and is unready until it is called with false."""
        log.warning("drained by an operator" if on else "an operator ends the draining; new clients are taken again")
        if on and not self.health.drained:
            gevent.spawn(self._send_away)
        self.health.drained = on
        if not on:
            gevent_broker.let_newcomers_in(True)

    def _send_away(self) -> None:
        gevent.sleep(self.settings.drain.delay_s)
        if self.health.drained and self.state == "serving":
            gevent_broker.let_newcomers_in(False)
            brokers = gevent_broker.opened()
            refuse_newcomers(brokers)
            wait_handled(brokers, self.settings.drain_s)
            count = close_clients(brokers, self.settings.drain.window_s, self.settings.drain_s)
            log.warning("drained: %d SMQ clients were closed", count)

    # ---- what the supervisor of workers asks for

    def accept_for(self, workers: Sequence[int]) -> None:
        """Accepts the connections of these workers, too."""
        self._listeners.accept_for(workers)

    def hand_over(self, channel: FdChannel) -> tuple[str | None, int]:
        """Lets the process at the other end take this one's place; see `Restarts.hand_over`."""
        return self._restarts.hand_over(channel)

    def end_for_good(self) -> None:
        """Ends, and nobody takes this process's place."""
        self._listeners.leave_nobody()
        self.end()

    def _refuse_restart(self) -> None:
        self._report(f"a worker can't restart itself; send SIGUSR2 to its supervisor, process {os.getppid()}")

    def load_certificates(self, in_thread: bool = True) -> str | None:
        """Reads the certificates again; returns why it could not, and nothing has changed then, None when it did.

        Args:
            in_thread: blocks this greenlet, and holds nobody else.
        """
        if not self._listeners.has_certificates:
            return "there are no certificates to read again"
        return self._listeners.reload(in_thread)

    def reload(self) -> None:
        """Reads settings and files again, soon."""
        self._systemd.reloading()
        self.renewal.ask()
        if self.acme is not None:
            self.acme.try_now()

    def tell_state(self) -> None:
        """Logs what the greenlets and the activities of the applications wait for."""
        log.warning("asked for the state\n%s", shutdown.state_report(self.vm.waiting()))

    def ask_to_stop(self, exit_code: int = 0) -> None:
        """Ends the server, of several workers all."""
        if self._worker:
            self._worker.exit(exit_code)
        else:
            self.end(exit_code)

    def end(self, exit_code: int = 0) -> None:
        """Lets `run` of this process go on to its end."""
        self._exit_code = exit_code
        self._stopping.set()

    def stop(self) -> None:
        """Ends everything in order; blocks. What was accepted before is delivered, or counted as lost."""
        has_no_place = self.state == "loading" and self.is_successor
        self.state = "draining"
        if not (self._restarts.is_handed_over or has_no_place):  # the service goes on, in another process
            self._systemd.stopping(self.settings.drain.timeout_s)
        self._ending.run(self._last_steps())

    def _last_steps(self) -> list[Step]:
        """What ends, in this order."""
        drain, patience_s = self.settings.drain, self.settings.drain_s
        brokers = gevent_broker.opened()
        return [
            ("the delay", lambda: gevent.sleep(0 if self._restarts.is_handed_over else drain.delay_s)),
            ("refusing new clients", lambda: self._refuse_newcomers(brokers)),
            # While there is a hub that takes what they have done.
            ("the end of the pipelines", self.stop_pipelines),
            ("compactions", self._compactions.stop),
            ("listeners", self._stop_listening),
            ("HTTP requests under way", lambda: self.http.drain(patience_s)),
            ("messages under way", lambda: wait_handled(brokers, patience_s)),
            # While their clients are there, whom they may tell.
            ("onunload of the applications", self._loader.end),
            ("closing SMQ clients", lambda: close_clients(brokers, drain.window_s, patience_s)),
            ("unloading the applications", self._loader.unload),
            ("processes, sockets and MQTT clients of applications", self._end_services),
            ("SMQ clients of applications", lambda: self.services.smq_clients.end(SMQ_END_S)),
            ("cluster", cluster.close),
            ("hubs", gevent_broker.close_all),
            ("clients of applications that start again", session_migration.drop_all),
            ("the hand-over to the new process", self._restarts.finish),
            ("the last bytes to clients", lambda: wait_sent(LAST_BYTES_S)),
            ("journals", writer.close_all),
            ("the rest", self._end_rest),
        ]

    def _refuse_newcomers(self, brokers: Iterable[gevent_broker.GeventBroker]) -> None:
        if self._watcher:
            self._watcher.kill()
        self._restarts.close()
        self.renewal.stop()
        if self.acme is not None:
            self.acme.stop()
        refuse_newcomers(brokers)

    def _stop_listening(self) -> None:
        self._announcer.stop()
        if self._worker:
            self._worker.left()
        self._listeners.turn_away()
        self._listeners.close()

    def _end_services(self) -> None:
        self.services.processes.shutdown()
        self.services.sockets.shutdown()
        self.services.mqtt.shutdown()
        self.services.mqtt.wait_ended(MQTT_END_S)

    def _end_rest(self) -> None:
        identity.serve(None)
        gevent_broker.set_topic_rules(gevent_broker.TopicRules())
        if self.identities is not None:
            self.identities.close()
        self.http.close()
        self.http.logins.sessions.close()
        self._systemd.close()
        if self.admin is not None:
            self.admin.close()
        if self._fleet is not None:
            self._fleet.desk.close()
        self._parts.stop()
        for one in (self._access_log, self._tracing):
            if one is not None:
                one.close()
        self._watchdog.stop()
        self._collector.stop()
        self.vm.stop()

    def _left(self) -> str:
        """What is there now, for the line of a server that did not end in time."""
        counts = {
            "connections of HTTP": len(self.http),
            "SMQ clients": sum(len(one.sessions) for one in gevent_broker.opened()),
            "running applications": sum(one.running for one in self.applications),
            "open journals": len(writer.opened),
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing"


def _shown_name(application: Application) -> str:
    return application.name or application.path.resolve().stem


def _literal(host: str) -> str:
    """An address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def _outcome(application: Application) -> str:
    return "ok" if application.error is None else f"failed: {application.error.splitlines()[0]}"
