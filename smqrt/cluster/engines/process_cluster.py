"""Cluster of this process, from the settings of the server.

Workers of the server and of gunicorn are linked without settings. The links are made when the first hub joins.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import gevent

from smqrt.cluster.engines.mesh import PORT, LinkTls, Mesh, key_of
from smqrt.cluster.leaving_nodes import ABSENT_S
from smqrt.cluster.mqtt_sessions import LOST_S
from smqrt.cluster.mqtt_streams import KEPT_BYTES
from smqrt.cluster.node import PING_S, QUEUE_BYTES, SILENCE_S
from smqrt.errors import ArgumentError
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.smq.hub_registry import hub_registry
from smqrt.wire.smq import MAX_NODE
from smqrt.workers.worker_rpc import WorkerPlace, worker_place

log = logging.getLogger("smqrt")

SECRET_BYTES = 32
MAX_DIRECTORY_BYTES = 85
"""The maximum length of the path of a shared directory: that of a socket is 107 bytes, of which its name takes 22."""
_NO_PASSWORD = "cluster: links over the network need a password; give cluster.password to all nodes"


@dataclass(frozen=True)
class ClusterPlan:
    """The configuration of the links of this process.

    Attributes:
        listen: `host:port` at which links are accepted; empty for none.
        nodes: `host:port` of other nodes, or `nats://…` of servers through which nodes find each other.
        directory: a directory that processes of this machine share; None for none.
        secret: the secret of these processes; empty: that in a file of the directory.
        password: the password of links over the network.
        ca, cert, key: PEM files for mutual TLS of these links, and for NATS; empty for none.
        credentials: a file with a user's credentials for NATS; empty for none.
        number: this node's number; 0 to draw one.
        hubs: whether every hub joins, even if its options name no cluster.
        workers: whether other nodes may be workers of this server.
        ping_s, silence_s, queue_bytes: see `Mesh`.
        kept_s, kept_bytes, session_wait_s: see `Node`.
    """

    listen: str = ""
    nodes: tuple[str, ...] = ()
    directory: Path | None = None
    secret: bytes = b""
    password: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    credentials: str = ""
    number: int = 0
    hubs: bool = False
    workers: bool = False
    ping_s: float = PING_S
    silence_s: float = SILENCE_S
    queue_bytes: int = QUEUE_BYTES
    kept_s: float = ABSENT_S
    kept_bytes: int = KEPT_BYTES
    session_wait_s: float = LOST_S

    @property
    def joins(self) -> bool:
        """Whether the plan leads to links."""
        return bool(self.listen or self.nodes or self.directory)


class ProcessCluster:
    """The plan of this process, and its mesh."""

    def __init__(self) -> None:
        self.plan = ClusterPlan()
        self._key = b""
        self.mesh: Mesh | None = None
        self._nats_servers: set[str] = set()

    def set_plan(self, plan: ClusterPlan) -> None:
        """Set the plan for hubs that join later, with the workers of this server added."""
        check_plan(plan)
        self.plan = _with_workers(plan, worker_place())
        self._key = _key(self.plan) if self.plan.joins or self.plan.password else b""

    def join(self, broker: GeventBroker, options: HubOptions) -> None:
        """Add a new hub to the cluster in its options; if all hubs join, the default name is its key.

        `nats://server/chat` is the cluster `chat`, whose nodes find each other through that server.

        Raises:
            ArgumentError: another hub is in the cluster, or the plan is invalid.
        """
        name = options.cluster or (broker.key if self.plan.hubs and broker.number else None)
        if name is None:
            return
        if "://" in name:  # nats://a,nats://b/chat; the name is optional
            scheme, _, rest = name.rpartition("://")
            host, _, name = rest.partition("/")
            servers, name = f"{scheme}://{host}", name or broker.key
            if not self.plan.password:
                raise ArgumentError(f"cluster: {servers} needs a password; give cluster.password to all nodes")
            if servers not in self._nats_servers:
                self.opened().link_through_nats(servers, **_nats_options(self.plan))
                self._nats_servers.add(servers)
        clustered = self.opened().join(broker, name)
        if hub_registry.names_for(broker.key) is not None:
            clustered.migration.expect()
        if (options.observe or self.observes()) == "cluster":
            clustered.counts.count_all()

    def observes(self) -> str:
        """Return the default of the option `observe` of hubs: `cluster` or `node` (spec: smq §6).

        Without other nodes, workers are one server, so that their subscribers are counted together.
        """
        has_nodes = self.plan.listen or self.plan.nodes or self._nats_servers
        return "cluster" if self.plan.workers and not has_nodes else "node"

    def opened(self) -> Mesh:
        """Return the mesh of the process, opened if necessary. Raises ArgumentError when the plan is invalid."""
        if self.mesh is not None:
            return self.mesh
        plan = self.plan
        if not plan.joins and "gunicorn" in sys.modules:  # its workers are the children of one process
            parent = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
            plan = ClusterPlan(directory=parent / f"smqrt-{os.geteuid()}-{os.getppid()}")
        elif not plan.joins:
            plan = ClusterPlan()
        # `set_plan` has derived the key of a password, which takes long: a call from Lua would block the loop here.
        key = self._key or _key(plan)
        tls = _link_tls(plan)
        mesh = Mesh(key, plan.number, ping_s=plan.ping_s, silence_s=plan.silence_s, queue_bytes=plan.queue_bytes)
        own = mesh.node
        own.kept_s, own.kept_bytes, own.session_wait_s = plan.kept_s, plan.kept_bytes, plan.session_wait_s
        try:
            if plan.workers and worker_place().count > 1:
                place = worker_place()
                # The port of worker 0: `_with_workers` has added the number of this worker.
                first = address(plan.listen)[1] - place.number if plan.listen else -1
                ports = range(first, first + place.count) if first > 0 else [0] * place.count
                mesh.node.server.take_place(place.secret, place.number, ports)
            if plan.directory:
                mesh.share_directory(plan.directory)
            if plan.listen:
                mesh.listen(*address(plan.listen), tls.server if tls else None)
        except BaseException:
            mesh.close()
            raise
        if servers := ",".join(one for one in plan.nodes if "://" in one):
            mesh.link_through_nats(servers, **_nats_options(plan))
            self._nats_servers.add(servers)
        for node in plan.nodes:
            if "://" not in node:
                mesh.dial(*address(node), tls.client if tls else None, any_name=True)
        self.mesh = mesh
        return mesh

    def wait_until_joined(self, within_s: float) -> None:
        """Wait until every hub has the snapshots of other processes; at most `within_s`, since there may be none."""
        end_s = monotonic() + within_s
        while self.mesh is not None and self.mesh.has_begun and monotonic() < end_s:
            hubs = self.mesh.node.members.values()
            if all(one.remotes and all(node.synced for node in one.remotes) for one in hubs):
                return
            gevent.sleep(0.01)

    def close(self) -> None:
        """Leave all clusters."""
        mesh, self.mesh = self.mesh, None
        self._nats_servers.clear()
        if mesh is not None:
            mesh.close()


def check_plan(plan: ClusterPlan) -> None:
    """Check a plan as far as that is possible before a hub joins; this reads the files of TLS.

    Raises:
        ArgumentError: a value is invalid, or two contradict each other; the text is one sentence.
        StartError: a file of the links' TLS cannot be read.
    """
    if plan.listen:
        address(plan.listen)
    plain = [one for one in plan.nodes if "://" not in one]
    for node in plain:
        address(node)
    if plain and len(plain) < len(plan.nodes):
        through = next(one for one in plan.nodes if "://" in one)
        raise ArgumentError(
            f"cluster.nodes: both {through} and {plain[0]}; nodes find each other through NATS or at addresses, so give"
            " one kind only"
        )
    if plan.directory and len(os.fsencode(plan.directory.absolute())) > MAX_DIRECTORY_BYTES:
        raise ArgumentError(
            f"cluster.directory: {plan.directory} is longer than {MAX_DIRECTORY_BYTES} bytes, too long for Unix"
            " sockets; give a shorter path"
        )
    if plan.joins and not plan.directory and not plan.password:
        raise ArgumentError(_NO_PASSWORD)
    _link_tls(plan)


def _with_workers(plan: ClusterPlan, place: WorkerPlace) -> ClusterPlan:
    """Return the plan of one worker: workers of a server are linked, and all their hubs join.

    Each worker accepts links at another port. The port and a fixed number in the plan are those of the first worker;
    the other workers use the following ones.
    """
    if place.directory is None or place.count == 1:
        return plan
    listen = plan.listen
    if listen:
        host, port = address(listen)
        if port > 0x10000 - place.count:
            last = 0x10000 - place.count
            raise ArgumentError(f"cluster.listen: port {port}; with {place.count} workers it is {last} at most")
        host = f"[{host}]" if ":" in host else host
        listen = f"{host}:{port and port + place.number}"
    max_number = MAX_NODE + 1 - place.count
    if plan.number > max_number:
        raise ArgumentError(f"cluster.node: {plan.number}; with {place.count} workers it is {max_number} at most")
    directory = place.directory / "links"
    directory.mkdir(mode=0o700, exist_ok=True)
    number = plan.number and plan.number + place.number
    return replace(
        plan, hubs=True, workers=True, directory=directory, secret=place.secret, listen=listen, number=number
    )


def address(text: str) -> tuple[str, int]:
    """Split `host:port`, `host`, or `[ipv6]:port` into host and port.

    Raises:
        ArgumentError: the port is invalid.
    """
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]") or (":" in host and not host.endswith("]")):
        return text.strip("[]"), PORT
    if not port.isdigit() or not int(port) <= 0xFFFF:
        raise ArgumentError(f"{text!r} is not an address of a node; write host:port, such as 10.0.0.2:{PORT}")
    return host.strip("[]"), int(port)


def _link_tls(plan: ClusterPlan) -> LinkTls | None:
    if not (plan.cert or plan.ca) or not (plan.listen or any("://" not in one for one in plan.nodes)):
        return None
    if not (plan.cert and plan.ca):
        raise ArgumentError("cluster: links over TLS need both cluster.ca and cluster.cert")
    return LinkTls.from_files(plan.ca, plan.cert, plan.key or None)


def _nats_options(plan: ClusterPlan) -> dict[str, str]:
    files = {"tls_ca": plan.ca, "tls_cert": plan.cert, "tls_key": plan.key, "credentials_file": plan.credentials}
    return {name: file for name, file in files.items() if file}


def _key(plan: ClusterPlan) -> bytes:
    if plan.directory and not plan.password:
        return plan.secret or _secret_of(plan.directory)
    if plan.joins and not plan.password:
        raise ArgumentError(_NO_PASSWORD)
    return key_of(plan.password.encode()) if plan.password else os.urandom(SECRET_BYTES)


def _secret_of(directory: Path) -> bytes:
    """Return the secret of the processes that share a directory; the first process creates it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.geteuid() or directory.stat().st_mode & 0o077:
        raise ArgumentError(f"{directory} must be owned and readable by this user only: chmod 700")
    path, own = directory / "secret", directory / f"secret.{os.getpid()}"
    own.write_bytes(os.urandom(SECRET_BYTES))
    own.chmod(0o600)
    with contextlib.suppress(FileExistsError):
        os.link(own, path)  # atomic: the file is complete, or does not exist
    own.unlink()
    return path.read_bytes()


cluster = ProcessCluster()
"""The cluster of this process."""
