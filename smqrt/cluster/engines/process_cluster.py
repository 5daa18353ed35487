"""Cluster of this process, as the settings of the server, its workers or gunicorn's describe it.

Its links are made for the first hub that joins.
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
from smqrt.cluster.node import PING_S, QUEUE_BYTES, SILENCE_S
from smqrt.errors import ArgumentError
from smqrt.smq.gevent_broker import GeventBroker, HubOptions
from smqrt.smq.hub_registry import hub_registry
from smqrt.wire.smq import MAX_NODE
from smqrt.workers.worker_rpc import WorkerPlace, worker_place

log = logging.getLogger("smqrt")

SECRET_BYTES = 32
MAX_DIRECTORY_BYTES = 85
"""The longest path of a shared directory: a socket's path has at most 107 bytes, its name in the directory takes 22."""
_NO_PASSWORD = "cluster: links over the network need a password; give cluster.password to all nodes"


@dataclass(frozen=True)
class ClusterPlan:
    """How this process is linked with others.

    Attributes:
        listen: `host:port` for links of other nodes; empty for none.
        nodes: `host:port` of other nodes, or `nats://…` of servers through which nodes find each other.
        directory: a directory that processes of this machine share; None for none.
        secret: the secret of these processes; when empty, it is in a file of the directory.
        password: the password of links over the network.
        ca, cert, key: PEM files for mutual TLS of these links, and for NATS; empty for none.
        credentials: a file with a user's credentials for NATS; empty for none.
        number: this node's number; 0 to draw one.
        hubs: whether every hub joins, also those whose options name no cluster.
        workers: whether other nodes may be workers of this server.
        ping_s, silence_s, queue_bytes: see `Mesh`.
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

    @property
    def joins(self) -> bool:
        """Whether there may be other nodes."""
        return bool(self.listen or self.nodes or self.directory)


class ProcessCluster:
    """The plan of this process, and the mesh that follows it."""

    def __init__(self) -> None:
        self.plan = ClusterPlan()
        self._key = b""
        self.mesh: Mesh | None = None
        self._nats_servers: set[str] = set()

    def follow(self, plan: ClusterPlan) -> None:
        """Set the plan for the next hub that joins; workers of this server are added to it."""
        check_plan(plan)
        self.plan = _with_workers(plan, worker_place())
        self._key = _key(self.plan) if self.plan.joins or self.plan.password else b""

    def join(self, broker: GeventBroker, options: HubOptions) -> None:
        """Add a new hub to the cluster that its options name, or to that of its key if all hubs join.

        `nats://server/chat` is the cluster `chat`, whose nodes find each other through that server.

        Raises:
            ArgumentError: another hub is in it, or the plan cannot be followed.
        """
        name = options.cluster or (broker.key if self.plan.hubs and broker.number else None)
        if name is None:
            return
        servers, name = _servers_and_name(name, broker.key)
        if servers:
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
        """Return whose subscribers `observe` counts in hubs without that option: `cluster` or `node` (spec: smq §6).

        Workers alone are one server, so their subscribers are counted together.
        """
        has_nodes = self.plan.listen or self.plan.nodes or self._nats_servers
        return "cluster" if self.plan.workers and not has_nodes else "node"

    def opened(self) -> Mesh:
        """Return the mesh of the process; raise ArgumentError when the plan cannot be followed."""
        if self.mesh is None:
            self.mesh = self._open()
        return self.mesh

    def _open(self) -> Mesh:
        plan = self.plan if self.plan.joins else _of_gunicorn()
        # `follow` makes the key of a password: that takes long, and Lua may be waiting here.
        key = self._key or _key(plan)
        tls = _link_tls(plan)
        mesh = Mesh(key, plan.number, ping_s=plan.ping_s, silence_s=plan.silence_s, queue_bytes=plan.queue_bytes)
        try:
            if plan.workers and worker_place().count > 1:
                place = worker_place()
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
        return mesh

    def wait_until_joined(self, within_s: float) -> None:
        """Wait until every hub has the snapshots of other processes, `within_s` at most: there may be none."""
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
    """Check all of a plan that can be checked before a hub is made; this reads files.

    Raises:
        ArgumentError: a value is invalid, or two contradict each other; one sentence.
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
            f"cluster.nodes: {through} beside {plain[0]}; nodes find each other through NATS or at addresses, so give"
            " one kind only"
        )
    if plan.directory and len(os.fsencode(plan.directory.absolute())) > MAX_DIRECTORY_BYTES:
        raise ArgumentError(
            f"cluster.directory: {plan.directory} is longer than {MAX_DIRECTORY_BYTES} bytes, and there are Unix"
            " sockets in it; give a shorter path"
        )
    if plan.joins and not plan.directory and not plan.password:
        raise ArgumentError(_NO_PASSWORD)
    _link_tls(plan)


def _with_workers(plan: ClusterPlan, place: WorkerPlace) -> ClusterPlan:
    """Return the plan of one worker: workers of a server are linked, with all their hubs.

    Each accepts links over the network at a port of its own. A fixed number is that of the first worker; the others
    have the numbers after it.
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


def _servers_and_name(cluster: str, key: str) -> tuple[str, str]:
    """Split `nats://a,nats://b/chat` into the servers and the name, which is `key` by default."""
    if "://" not in cluster:
        return "", cluster
    scheme, _, rest = cluster.rpartition("://")
    host, _, name = rest.partition("/")
    return f"{scheme}://{host}", name or key


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
        raise ArgumentError("cluster: links over TLS need cluster.ca and cluster.cert: both sides need a certificate")
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
    """Return the secret of the processes that share a directory; the first one makes it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.geteuid() or directory.stat().st_mode & 0o077:
        raise ArgumentError(f"{directory} must belong to this user, and no other may read it: chmod 700")
    path, own = directory / "secret", directory / f"secret.{os.getpid()}"
    own.write_bytes(os.urandom(SECRET_BYTES))
    own.chmod(0o600)
    with contextlib.suppress(FileExistsError):
        os.link(own, path)  # atomic: the file is complete, or does not exist
    own.unlink()
    return path.read_bytes()


def _of_gunicorn() -> ClusterPlan:
    """Return a plan that links the workers of one gunicorn; an empty one outside gunicorn."""
    if "gunicorn" not in sys.modules:
        return ClusterPlan()
    place = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    return ClusterPlan(directory=place / f"smqrt-{os.geteuid()}-{os.getppid()}")


cluster = ProcessCluster()
"""The cluster of this process."""
