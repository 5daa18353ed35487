"""Startup checks and live changes of settings, and reload of changed files.

A poll compares size, time and inode of the files, which works on every file system. A changed file is read once two
consecutive polls find the same state, so that a half-written file is not read. The polls run in a thread, so that a
network disk that hangs does not block the server.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

import gevent
from gevent.lock import BoundedSemaphore

from smqrt.acme.files import AcmeFiles
from smqrt.acme.orders import check_library
from smqrt.apps.lua.vm import lupa_of
from smqrt.auth.service import IdentityService
from smqrt.broker.last_values import LastValueLimits, check_filters
from smqrt.cluster.engines.process_cluster import ClusterPlan, check_plan
from smqrt.errors import ArgumentError, SmqrtError, StartError
from smqrt.http.access import Access
from smqrt.http.body import HttpLimits
from smqrt.http.forwarded import Proxies
from smqrt.http.server import HttpServer
from smqrt.loop.threads import DiskThreads
from smqrt.process.current_process import state_folder
from smqrt.server.listeners import Listeners, admin_files, lacks_certificate, ports
from smqrt.server.mako_conf import MakoConf
from smqrt.server.restart.control_socket import check_socket_path
from smqrt.settings.cluster_settings import ClusterSettings
from smqrt.settings.limits import apply_limits
from smqrt.settings.option_types import Path as SettingPath
from smqrt.settings.option_types import named_settings_of, options_of, settings_of, value_at, with_values
from smqrt.settings.server_settings import Settings
from smqrt.smq import gevent_broker
from smqrt.transport import server_tls
from smqrt.transport.admission import TrustedNetworks, open_connections
from smqrt.transport.origins import Hosts, Origins, is_loopback

log = logging.getLogger("smqrt")

POLL_S = 1.0
Reload = Callable[[], str | None]
"""Reads files again. Returns the error, one sentence, or None. May block its greenlet."""
Paths = Callable[[], Iterable[str | Path]]
FileState = tuple[int, int, int]
"""Modification time in ns, size in bytes and inode."""


def file_state(path: str | Path) -> FileState | None:
    """Return the state of a file, None when it can't be read. Blocks."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size, info.st_ino


def _states(paths: Iterable[str | Path]) -> list[FileState | None]:
    return [file_state(path) for path in paths]


class _Part:
    """A set of files that is reloaded as one.

    Attributes:
        loaded: the states of the files when they were read.
        last: the states at the last poll.
    """

    def __init__(self, name: str, reload: Reload, paths: Paths) -> None:
        self.name, self.reload, self.paths = name, reload, paths
        self.loaded = self.last = _states(paths())

    def has_changed(self, now: list[FileState | None]) -> bool:
        """Whether the files differ from the loaded ones, and have not changed since the last poll."""
        settled, self.last = now == self.last, now
        return settled and now != self.loaded


class FileReloader:
    """The parts of a server that reload their files.

    Args:
        report: called with each line for the terminal.
        poll_s: seconds between two polls of the files.

    Attributes:
        on_reloaded: called after each reload that `ask` has requested.
    """

    def __init__(self, report: Callable[[str], None], poll_s: float = POLL_S) -> None:
        self._report, self._poll_s = report, poll_s
        self._parts: list[_Part] = []
        self._threads = DiskThreads("of the configuration")
        self._one_at_a_time = BoundedSemaphore()  # SIGHUP and the poll may reload the same part
        self.on_reloaded: Callable[[], object] = lambda: None
        self._is_asked = False
        self._asked: gevent.Greenlet[..., None] | None = None
        self._poller: gevent.Greenlet[..., None] | None = None

    def add(self, name: str, reload: Reload, paths: Paths = tuple) -> None:
        """Add a part. The current files count as loaded.

        Args:
            name: the name of the part for the log, in the plural: "certificates".
            reload: reads the files again. A failure changes nothing.
            paths: returns the files, called at every poll because a reload may change them. Without files, the part
                is reloaded at SIGHUP only.
        """
        self._parts.append(_Part(name, reload, paths))

    def start(self) -> None:
        """Start polling the files."""
        if self._poller is None:
            self._poller = gevent.spawn(self._poll)

    def stop(self) -> None:
        """Stop polling and reloading."""
        for greenlet in (self._poller, self._asked):
            if greenlet is not None:
                greenlet.kill(block=False)
        self._poller = self._asked = None

    def ask(self) -> None:
        """Start a reload of all parts; never blocks. Many calls at once cause one or two reloads."""

        def reload_all() -> None:
            while self._is_asked:
                self._is_asked = False
                self.run()
            self.on_reloaded()

        self._is_asked = True
        if not self._asked:
            self._asked = gevent.spawn(reload_all)

    def run(self) -> dict[str, str]:
        """Reload all parts; blocks this greenlet. A failed part does not stop the others.

        Returns:
            The errors by the names of the parts.
        """
        if not self._parts:
            self._report("nothing to reload")
        outcomes = {part.name: self._reload(part) for part in list(self._parts)}
        return {name: fault for name, fault in outcomes.items() if fault is not None}

    def _poll(self) -> None:
        while True:
            gevent.sleep(self._poll_s)
            for part in list(self._parts):
                try:
                    if part.has_changed(self._threads.call(_states, list(part.paths()))):
                        self._reload(part)
                except TimeoutError as error:
                    log.error("%s: cannot check the files for changes: %s", part.name, error)
                except Exception:
                    log.exception("%s: checking the files for changes failed", part.name)

    def _reload(self, part: _Part) -> str | None:
        with self._one_at_a_time:
            try:
                # Before the reload: the next poll finds a change that happens during the reload.
                part.loaded = part.last = self._threads.call(_states, list(part.paths()))
                fault = part.reload()
            except TimeoutError as error:
                fault = str(error)
            except Exception as error:
                log.exception("%s: reload failed", part.name)
                fault = f"{type(error).__name__}: {error}"
        if fault is None:
            self._report(f"{part.name} reloaded")
        else:
            log.error("%s not reloaded: %s", part.name, fault)
        return fault


# ---- Live settings
#
# A reload applies changed settings that are marked `live`. For the others it logs that they need a restart.


Apply = Callable[[Settings], None]


class LiveSettings:
    """The settings of a running server.

    Args:
        current: the settings at the start.
        report: called with each line for the terminal.

    Attributes:
        current: the settings as they are applied now.
    """

    def __init__(self, current: Settings, report: Callable[[str], None]) -> None:
        self.current = self._last = current
        self._read: Callable[[], Settings] | None = None
        self._report = report
        self._watchers: list[tuple[tuple[str, ...], Apply]] = []

    def read_with(self, read: Callable[[], Settings], last: Settings) -> None:
        """Set the function by which `reload` reads the settings.

        Args:
            read: reads all sources; raises StartError.
            last: its last result, without the changes that the program made afterwards.
        """
        self._read, self._last = read, last

    def watch(self, names: tuple[str, ...], apply: Apply) -> None:
        """Call `apply` with all settings after one of these has changed.

        Args:
            names: settings or groups: "max_connections", "limits".
            apply: applies the settings. On failure, it raises SmqrtError and changes nothing.
        """
        self._watchers.append((names, apply))

    def reload(self) -> str | None:
        """Read the settings and apply changes of live ones. Return the errors as one text, None for success."""
        if self._read is None:
            return None
        try:
            found = self._read()
        except StartError as error:
            return str(error)
        # The last result of `_read`, not `current`: the program itself has changed some values of `current`.
        changed = dict(_changes(self._last, found))
        live = {path for path, is_live in changed.items() if is_live}
        if fixed := sorted(".".join(path) for path in changed.keys() - live):
            log.warning("settings that need a restart to change: %s", ", ".join(fixed))
        if not live:
            return None
        self._last = _with(self._last, found, live)
        self.current = _with(self.current, found, live)
        self._report(f"settings changed: {', '.join(sorted(map('.'.join, live)))}")
        # A watcher names groups or single settings.
        names = {path[0] for path in live} | {".".join(path) for path in live}
        faults = []
        for watched, apply in self._watchers:
            if not names.isdisjoint(watched):
                try:
                    apply(self.current)
                except SmqrtError as error:
                    faults.append(str(error))
        return "; ".join(faults) or None


def _with(base: Settings, found: Settings, paths: set[SettingPath]) -> Settings:
    """Return `base` with the values of `found` at these paths. The path (group, name) means a whole named table."""
    named = _named_groups()
    tables: dict[str, dict[str, object]] = {path[0]: dict(getattr(base, path[0])) for path in paths if path[0] in named}
    for group, name in (path for path in paths if path[0] in named):
        found_tables: Mapping[str, object] = getattr(found, group)
        tables[group].pop(name, None)
        tables[group] |= {name: found_tables[name]} if name in found_tables else {}
    others = {path: value_at(found, path) for path in paths if path[0] not in named}
    return with_values(replace(base, **tables), others)  # type: ignore[arg-type]  # tables of settings, by their groups


def _changes(old: Settings, new: Settings) -> Iterator[tuple[SettingPath, bool]]:
    """Yield the path of each difference, and whether the server can apply it without a restart."""
    for setting in settings_of(Settings):
        if value_at(old, setting.path) != value_at(new, setting.path):
            yield setting.path, setting.live
    for group, is_live in _named_groups().items():
        before: Mapping[str, object] = getattr(old, group)
        after: Mapping[str, object] = getattr(new, group)
        for name in before.keys() | after.keys():
            old_table, new_table = before.get(name), after.get(name)
            if old_table is None or new_table is None:  # a table was added or removed
                yield (group, name), is_live
            elif old_table != new_table:
                items = options_of(type(old_table)).values()
                changed = [item for item in items if getattr(old_table, item.name) != getattr(new_table, item.name)]
                yield (group, name), all(item.metadata["live"] for item in changed)


def _named_groups() -> dict[str, bool]:
    """Return the groups of named tables; True when all settings of their tables are live."""
    groups: dict[str, bool] = {}
    for setting in named_settings_of(Settings):
        groups[setting.path[0]] = groups.get(setting.path[0], True) and setting.live
    return groups


# ---- Functions that apply settings


def apply_settings(live: LiveSettings, http: HttpServer, listeners: Listeners) -> None:
    """Apply the settings of HTTP, topics, proxies and limits, now and after each change of live ones.

    Raises:
        StartError: topic filters contradict one another.
    """

    def apply_access(settings: Settings) -> None:
        # Unix sockets have no address: without another listener, all names are accepted.
        address = next((one.address[0] for one in listeners.values() if not one.is_unix), "")
        own = {settings.host.strip("[]"), address}  # pipelines of this machine connect to it
        hosts = Hosts([*settings.hosts.split(","), *own] if settings.hosts else ())
        http.access = Access(Origins(settings.origins), hosts, is_loopback(address), settings.debug)

    def apply_topics(settings: Settings) -> None:
        filters = tuple(name for name, topics in settings.topics.items() if topics.last_value)
        limits = LastValueLimits(settings.last_value.max_values, settings.last_value.max_bytes)
        try:
            check_filters(settings.topics)
            gevent_broker.set_topic_rules(gevent_broker.TopicRules(filters, limits, settings.last_value.sync_s))
        except ArgumentError as error:
            raise StartError(f"topics: {error}.") from None

    def apply_proxies(settings: Settings) -> None:
        trusted = open_connections.proxies = TrustedNetworks(settings.proxy.trusted)
        http.proxies = Proxies(trusted, settings.proxy.headers) if trusted else None

    def apply_all_limits(settings: Settings) -> None:
        apply_limits(settings.limits, settings.topics)
        http.limits = http_limits(settings)

    for names, apply in (
        (("hosts", "origins", "debug"), apply_access),
        (("topics",), apply_topics),
        (("proxy",), apply_proxies),
    ):
        apply(live.current)
        live.watch(names, apply)
    # The constructors of these parts have applied the settings already.
    live.watch(("max_connections", "connections_per_address"), apply_connection_limits)
    live.watch(("cert", "key", "client_ca", "tls", "listener", "admin"), listeners.change)
    live.watch(("limits", "topics"), apply_all_limits)


def apply_connection_limits(settings: Settings) -> None:
    """Apply the limits on connections of the process."""
    open_connections.limit = settings.max_connections
    open_connections.per_address = settings.connections_per_address


def cluster_plan(settings: ClusterSettings) -> ClusterPlan:
    """Return the plan by which the hubs of this process form clusters with other processes."""
    return ClusterPlan(
        listen=settings.listen,
        nodes=settings.nodes,
        directory=Path(settings.directory) if settings.directory else None,
        password=settings.password or "",
        ca=settings.ca or "",
        cert=settings.cert or "",
        key=settings.key or "",
        credentials=settings.credentials or "",
        number=settings.node,
        hubs=settings.hubs,
        ping_s=settings.ping_s,
        silence_s=settings.silence_s,
        queue_bytes=settings.queue_bytes,
        kept_s=settings.kept_s,
        kept_bytes=settings.kept_bytes,
        session_wait_s=settings.session_wait_s,
    )


def http_limits(settings: Settings) -> HttpLimits:
    """Return the limits of HTTP requests."""
    limits = settings.limits
    return HttpLimits(
        first_byte_s=limits.first_byte_s,
        header_s=limits.head_s,
        body_idle_s=limits.body_pause_s,
        keep_alive_s=limits.keep_alive_s,
        head_bytes=limits.head_bytes,
        body_bytes=limits.body_bytes,
        bodies_bytes=settings.bodies_mib << 20,
    )


# ---- Startup checks, for `smqrt serve` and `smqrt config check`
#
# They open no sockets and create no files. They do not check, for instance, whether a port is free.

_SELF_SIGNED = "a self-signed certificate, which is made when the server starts"
"""Takes the place of both file names, and is removed before the files are checked."""


def check_startable(settings: Settings, conf: MakoConf | None = None) -> None:
    """Check settings, and the files that they name.

    Args:
        settings: all settings, with or without the self-signed certificate.
        conf: the mako.conf.

    Raises:
        StartError: the server would not start, or a part of it would not work; one sentence.
    """
    check_certificate(settings)
    acme_files(settings)
    lupa_of(settings.lua.version)
    check_socket_path("restart.socket", settings.restart.socket)
    try:
        check_plan(cluster_plan(settings.cluster))
        Origins(settings.origins)
        Hosts(settings.hosts.split(","))
    except ArgumentError as error:
        raise StartError(f"{error}.") from None
    try:
        check_filters(settings.topics)
    except ArgumentError as error:
        raise StartError(f"topics: {error}.") from None
    if lacks_certificate(settings):
        settings = replace(settings, cert=_SELF_SIGNED, key=_SELF_SIGNED)
    for files in filter(None, [*(one.tls for one in ports(settings, conf)), admin_files(settings)]):
        pairs = tuple(pair for pair in files.pairs if _SELF_SIGNED not in pair)
        server_tls.check(replace(files, pairs=pairs), datetime.now(UTC))
    _check_access_log(settings.log.access)
    if IdentityService.is_wanted(settings.auth):
        lists = [settings.tls.client_crl, *(one.client_crl for one in settings.listener.values())]
        IdentityService.check(settings.auth, list(filter(None, lists)))
    is_open = False
    with suppress(ValueError):  # for a host name, which is resolved when the server starts
        is_open = not ip_address(settings.admin.host.strip("[]")).is_loopback
    if settings.admin.enabled and is_open and not settings.auth.users:
        raise StartError(
            f"admin.host = {settings.admin.host} gives access to everyone who can reach this machine; set auth.users"
            " to a users file, or leave the admin listener on 127.0.0.1."
        )


def check_certificate(settings: Settings) -> None:
    """Raise StartError when the certificate or its key is missing and the other one is set."""
    if bool(settings.cert) != bool(settings.key):
        given, missing = ("--cert", "--key") if settings.cert else ("--key", "--cert")
        raise StartError(f"{given} needs {missing} too; a certificate and its private key belong together.")


def acme_files(settings: Settings) -> AcmeFiles | None:
    """Return the files of the certificate that the server orders by ACME; None when ACME is off.

    Raises:
        StartError: the settings contradict one another, the library is missing, or there is no folder for the files.
    """
    tls = settings.tls
    if not tls.acme:
        return None
    if bool(tls.acme_eab_id) != bool(tls.acme_eab_key):
        raise StartError("tls.acme_eab_id and tls.acme_eab_key belong together; set both or neither.")
    check_library()
    if tls.acme_folder:
        folder = Path(tls.acme_folder).absolute()
    elif state := os.environ.get("STATE_DIRECTORY"):  # of systemd
        folder = Path(state.partition(":")[0]) / "acme"
    else:
        try:
            folder = state_folder() / "acme"
        except FileNotFoundError as error:
            raise StartError(
                f"tls.acme has no folder for its files: {error.strerror}; or set tls.acme_folder."
            ) from None
    files = AcmeFiles(folder, tls.acme_directory, tls.acme)
    if settings.cert and settings.cert != str(files.cert):
        raise StartError("tls.acme would order a second certificate; remove tls.acme, or cert and key.")
    if not settings.cert and not lacks_certificate(settings):
        raise StartError("tls.acme orders a certificate, but no port with TLS needs one; set tls_port.")
    return files


def _check_access_log(path: str) -> None:
    if path in ("", "-"):  # none, or standard output
        return
    folder = Path(path).absolute().parent
    fault = 0
    if not folder.is_dir():
        fault = errno.ENOENT
    elif Path(path).is_dir():
        fault = errno.EISDIR
    elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
        fault = errno.EACCES
    if fault:
        raise StartError(f"log.access: {path} can't be written: {os.strerror(fault)}.")
