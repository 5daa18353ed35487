"""Ports of links between nodes: strangers, records that are played back, nodes that are broken, slow or many."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import requests

from smqrt.cluster.link import MAX_UNAUTHENTICATED
from smqrt.wire import cluster_packets, smq
from smqrt.wire import cluster_packets as wire
from smqrt.wire.cluster_packets import LinkType, Packet, Refusal
from smqrt.wire.smq import TOPIC_BIT, NameNumbers
from tests.cluster.peer import PASSWORD, Peer, key
from tests.conftest import REPOSITORY, Served, free_port
from tests.hostile.conftest import APPS, Besieged
from tests.hostile.strangers import Stranger
from tests.support.factory import Factory
from tests.support.pki import Authority
from tests.support.waiting import wait_until

MAX_LINES = 20
"""Of the log, in a case of a few seconds."""


class Port:
    """The port of links of a server under attack.

    Attributes:
        number: the port.
        node: the real node that is linked; None without one.
    """

    def __init__(self, besieged: Besieged, number: int) -> None:
        self.besieged, self.number = besieged, number
        self.node: Served | None = None
        self._first_line = 0

    def begin(self) -> Port:
        """Count the lines of the log from here on: another test has this port."""
        self._first_line = len(self.besieged.served.lines)
        return self

    def open(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.number), 20)

    def peer(self, number: int = 1000) -> Peer:
        return Peer(self.open, number)

    def status(self) -> Any:
        (row,) = requests.get(self.besieged.served.admin_url + "/api/v1/clusters", timeout=20).json()
        return row

    def refusals(self, limit: str) -> int:
        limits = requests.get(self.besieged.served.admin_url + "/api/v1/limits", timeout=20).json()
        return next(int(one["reached"]) for one in limits if one["name"] == limit)

    @property
    def logged(self) -> list[str]:
        """All lines of the log."""
        return self.besieged.served.lines[self._first_line :]

    def lines(self) -> list[str]:
        """What was logged of links."""
        return [one for one in self.logged if "link" in one or "Traceback" in one or "refused" in one]

    @property
    def is_good(self) -> bool:
        """Whether another test can have it."""
        if not self.besieged.alive:
            return False
        links = [link for link in self.status()["links"] if link["since_s"] > 0]
        return len(links) == (0 if self.node is None else 1)

    def close(self) -> None:
        if self.node is not None:
            self.node.stop()
        self.besieged.stop()


def settings(number: int, *more: str) -> list[str]:
    words = ["--cluster-listen", f"127.0.0.1:{number}", "--cluster-password", PASSWORD, "--cluster-hubs"]
    return [*words, *more]


def new_port(besiege: Callable[..., Besieged]) -> Port:
    number = free_port()
    return Port(besiege(APPS / "lua", *settings(number)), number)


@pytest.fixture
def port(besiege: Callable[..., Besieged]) -> Port:
    """A port of links, of a server whose hub /watch/smq is in a cluster."""
    return new_port(besiege)


def arguments(port: Port) -> list[str]:
    return ["--cluster-nodes", f"127.0.0.1:{port.number}", "--cluster-password", PASSWORD, "--cluster-hubs"]


@pytest.fixture
def start_node() -> Iterator[Callable[..., Served]]:
    """Starts a real node that looks for the one under attack."""
    with Factory(Served, Served.stop) as start:
        yield lambda port, *more: start(APPS / "watch", *arguments(port), *more)


class Kept:
    """Ports that the tests of this file share: one without and one with a real node, anew when a test spoiled it."""

    def __init__(self) -> None:
        self._ports: dict[bool, Port] = {}

    def port(self, with_node: bool) -> Port:
        found = self._ports.get(with_node)
        if found is not None and not found.is_good:
            found.close()
            found = None
        if found is None:
            found = self._ports[with_node] = new_port(Besieged)
            if with_node:
                found.node = Served(APPS / "watch", *arguments(found))
                wait_until(lambda: found.status()["links"], "the real node is linked")
        return found.begin()

    def close(self) -> None:
        for port in self._ports.values():
            port.close()


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    ports = Kept()
    yield ports
    ports.close()


@pytest.fixture
def kept_port(kept: Kept) -> Port:
    """As `port`, of a server that tests share."""
    return kept.port(with_node=False)


@pytest.fixture
def kept_pair(kept: Kept) -> Port:
    """As `pair`, of servers that tests share."""
    return kept.port(with_node=True)


def many(port: Port, count: int) -> list[socket.socket]:
    return [port.open() for _ in range(count)]


# ---- strangers


def test_silent_connections_block_no_node(port: Port, start_node: Callable[..., Served]) -> None:
    stop = threading.Event()

    def come_again() -> None:
        sockets: list[socket.socket] = []
        while not stop.is_set():
            sockets = [*sockets[-3 * MAX_UNAUTHENTICATED :], port.open()]
            time.sleep(0.002)

    with port.besieged.attack(f"links: {3 * MAX_UNAUTHENTICATED} silent strangers, and 500 more each second") as attack:
        sockets = many(port, 3 * MAX_UNAUTHENTICATED)
        others = threading.Thread(target=come_again)
        others.start()
        try:
            start_node(port)
            wait_until(lambda: port.status()["links"], "the real node is linked")
        finally:
            stop.set()
            others.join()
        attack.sent(0)
    assert port.refusals("cluster_strangers") >= 2 * MAX_UNAUTHENTICATED
    assert port.status()["links_lost"] == 0
    assert len(sockets) == 3 * MAX_UNAUTHENTICATED
    assert len(port.lines()) <= MAX_LINES


def test_slow_handshakes_get_no_extra_time(port: Port) -> None:
    peer, began_s = port.peer(), time.monotonic()
    with port.besieged.attack("links: a Hello, a byte every 0.2 s") as attack:
        for byte in smq.frame(peer.own):
            try:
                attack.sent(peer.sock.send(bytes((byte,))))
            except OSError:
                break
            if peer.ended(within_s=0.2):
                break
    assert 4 < time.monotonic() - began_s < 7


def test_clients_sending_too_much_are_closed_at_once(port: Port) -> None:
    peer = port.peer()
    with port.besieged.attack("links: a frame of 64 KiB before the password") as attack:
        peer.sock.sendall(b"\xff\xff" + b"x" * 20_000)
        attack.sent(20_002)
        assert peer.ended(SOON_S)


NONSENSE = {
    "nothing, and the end": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    "frames of no length": b"\0\0" * 1000,
    "frames of two bytes": b"\0\2" * 1000,
    "one frame without an end": b"\xff\xff" + b"x" * 9000,
    "a Publish frame": smq.publish_frame(7, 8, 9, b"x" * 100) * 50,
    "Ping": smq.frame(wire.u64(Packet.PING, 7)) * 500,
    "a reason of 64 KiB": smq.frame(wire.refused(Refusal.PASSWORD, "x" * 8000)),
    "an unknown reason": smq.frame(bytes((Packet.REFUSED, 99)) + b"because\n\x1b[31m" * 20),
    "two Hellos": b"",
    "random": b"",
}


@pytest.mark.parametrize("case", NONSENSE)
def test_connections_of_other_programs_are_closed_silently(kept_port: Port, case: str) -> None:
    rng, lost = random.Random(case), kept_port.status()["links_lost"]
    with kept_port.besieged.attack(f"links: 150 times {case}", grows_bytes=16 << 20) as attack:
        for _ in range(150):
            peer = kept_port.peer()
            data = NONSENSE[case]
            if case == "two Hellos":
                data = smq.frame(peer.own) * 2
            elif case == "random":
                data = rng.randbytes(9000)
            try:
                peer.sock.sendall(data)
                peer.sock.shutdown(socket.SHUT_WR)
                assert peer.ended()
            except OSError:
                pass  # it was ended while we spoke
            peer.close()
            attack.sent(len(data))
    assert kept_port.status()["links"] == []
    assert kept_port.status()["links_lost"] == lost
    lines = kept_port.lines()
    assert len(lines) <= MAX_LINES
    assert all(len(line) < 500 and "\x1b" not in line for line in lines), lines


def test_wrong_passwords_do_not_fill_the_log(port: Port) -> None:
    with port.besieged.attack("links: 500 wrong proofs") as attack:
        for _ in range(500):
            peer = port.peer().greeted()
            peer.say(wire.proof(b"another key", True, peer.own + peer.theirs))
            assert peer.refused() == Refusal.PASSWORD
            peer.close()
            attack.sent(500)
    assert port.status()["refused"] == {"password": 500}
    assert 1 <= len([line for line in port.lines() if "passwords" in line]) <= MAX_LINES


def test_unauthenticated_clients_write_no_log_line_of_their_own(port: Port) -> None:
    peer = port.peer()
    peer.say(bytes((Packet.REFUSED, Refusal.PASSWORD)) + b"evil\nERROR a forged line")
    assert peer.ended()
    peer = port.peer().greeted()
    peer.say(bytes((Packet.REFUSED, Refusal.PASSWORD)) + b"evil\nERROR a forged line")
    assert peer.ended()
    wait_until(lambda: any("evil" in line for line in port.lines()), port.lines)
    assert all("evil" in line for line in port.besieged.served.lines if "a forged line" in line)
    assert port.status()["refused"] == {"password": 1}, "who has not said Hello refuses nothing"


# ---- proofs


def test_a_proof_is_for_one_connection_and_one_direction(port: Port) -> None:
    recorded = port.peer().proved()
    proof = wire.proof(key(), True, recorded.own + recorded.theirs)

    again = port.peer()
    again.own = recorded.own
    again.greeted().say(proof)
    assert again.theirs != recorded.theirs, "the other side says something new each time"
    assert again.refused() == Refusal.PASSWORD

    wrong_way = port.peer().greeted()
    wrong_way.say(wire.proof(key(), False, wrong_way.own + wrong_way.theirs))
    assert wrong_way.refused() == Refusal.PASSWORD

    hellos_swapped = port.peer().greeted()
    hellos_swapped.say(wire.proof(key(), True, hellos_swapped.theirs + hellos_swapped.own))
    assert hellos_swapped.refused() == Refusal.PASSWORD

    reflected = port.peer()
    reflected.own = port.peer().greeted().theirs
    assert reflected.greeted().refused() == Refusal.SELF
    assert port.status()["links"] == []


def test_a_node_does_not_accept_its_own_messages(besiege: Callable[..., Besieged]) -> None:
    """An echo, and somebody who sends the node's own proof back to it."""
    echo, mirror = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    nodes = ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in (echo, mirror))
    number = free_port()
    port = Port(besiege(APPS / "lua", *settings(number, "--cluster-nodes", nodes)), number)
    near, _ = echo.accept()
    near.settimeout(20)
    while data := near.recv(1 << 16):
        near.sendall(data)
    peer = Peer(lambda: mirror.accept()[0])
    peer.theirs = peer.until(Packet.HELLO)
    peer.say(peer.own)
    peer.say(peer.until(Packet.PROOF))
    assert peer.refused() == Refusal.PASSWORD
    assert port.status()["links"] == []
    for one in (near, echo, mirror):
        one.close()
    peer.close()


# ---- nodes that know the password, and are broken

KINDS = [*Packet, *LinkType, 0x08, 0x00, 0xFF]


def spoiled(rng: random.Random, kind: int) -> bytes:
    size = rng.choice((0, 1, 2, 4, 8, 12, 64, 1000, 65_000))
    if kind == LinkType.END:  # which may end all clients, and so must not name all
        return bytes((kind,)) + b"\x7f" + rng.randbytes(size)
    return bytes((kind,)) + (rng.randbytes(size) if rng.random() < 0.7 else bytes((rng.choice((0, 1, 255)),)) * size)


@pytest.fixture
def pair(port: Port, start_node: Callable[..., Served]) -> Port:
    """A port with a real node that is linked, and has to stay so."""
    start_node(port)
    wait_until(lambda: port.status()["links"], "the real node is linked")
    return port


def is_well(port: Port) -> bool:
    """Whether the real node is still there, and no error was logged."""
    row = port.status()
    errors = [line for line in port.logged if "Traceback" in line or "error" in line.lower()]
    assert errors == []
    return any(link["since_s"] > 0 for link in row["links"]) and len(port.lines()) <= MAX_LINES


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "name", f"{kind:#x}"))
def test_packets_of_every_type_with_anything_in_them(kept_pair: Port, kind: int) -> None:
    rng = random.Random(kind)
    real = kept_pair.status()["links"][0]["node"]
    before = kept_pair.status()["links"][0]["since_s"]
    began_s = time.monotonic()
    with kept_pair.besieged.attack(f"links: a broken node, type {kind:#x}") as attack:
        for _ in range(30):
            peer = kept_pair.peer().joined()
            try:
                for _ in range(10):
                    packet = spoiled(rng, kind)
                    peer.say(packet[:65_530])
                    attack.sent(len(packet))
                peer.sock.shutdown(socket.SHUT_WR)
                assert peer.ended()
            except OSError:
                pass
            peer.close()
    assert is_well(kept_pair)
    (link,) = [one for one in kept_pair.status()["links"] if one["node"] == real] or [None]
    if kind != Packet.TAKEN:  # it may ask for another number
        assert link is not None
        assert link["since_s"] >= before + time.monotonic() - began_s - 2


SOON_S = 3.0
"""The other side has an end put to it so soon; who only falls silent is lost later."""


LAST_PING = 1 << 40


def floods(peer: Peer, frames: bytes, times: int) -> bool:
    """Says the frames so often, and reads what comes meanwhile; whether the other side puts an end to it.

    Who puts no end to it answers the ping behind all of it.
    """
    ends: list[bool] = []

    def read() -> None:
        peer.sock.settimeout(60)
        try:
            while peer.packet() != wire.u64(Packet.PONG, LAST_PING):
                pass
        except OSError:
            ends.append(True)
        else:
            ends.append(False)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(times):
            peer.sock.sendall(frames)
        peer.say(wire.u64(Packet.PING, LAST_PING))
    except OSError:
        pass
    reader.join(60)
    is_ended = ends == [True]
    if not is_ended:
        peer.sock.shutdown(socket.SHUT_RDWR)
    reader.join()
    peer.close()
    return is_ended


def packed(kind: int, item: Callable[[int], bytes], count: int) -> bytes:
    return smq.frame(bytes((kind,)) + b"".join(map(item, range(count))))


def topic(number: int) -> bytes:
    return struct.pack(">II", random.getrandbits(31) | TOPIC_BIT, number)


def client(number: int, uid: bytes = b"") -> bytes:
    return struct.pack(">IQB", random.getrandbits(31), 1 << 40, len(uid)) + uid + b"\0\0\0"


def opens(names: int, size: int) -> bytes:
    return b"".join(
        smq.frame(wire.channel(Packet.OPEN, 1000 + number, os.urandom(8) + b"n" * (size - 8)))
        for number in range(names)
    )


FLOODS: dict[str, Callable[[], tuple[bytes, int]]] = {
    "65,535 channels": lambda: (opens(64_000, 8), 1),
    "channels with names of 64 KiB": lambda: (opens(1, 65_000), 1000),
    "100,000 ends of channels that are not there": lambda: (smq.frame(wire.channel(Packet.CLOSE, 60_000)), 100_000),
    "a channel that opens and closes 20,000 times": lambda: (b"", 20_000),
    "320,000 topics that it wants": lambda: (packed(LinkType.INTEREST, topic, 8000), 40),
    "topics whose numbers are the same": lambda: (
        packed(LinkType.INTEREST, lambda of: struct.pack(">II", TOPIC_BIT | 5, random.getrandbits(32)), 8000)
        + packed(LinkType.NO_INTEREST, lambda of: struct.pack(">II", TOPIC_BIT | 5, random.getrandbits(32)), 8000),
        15,
    ),
    "80,000 clients": lambda: (packed(LinkType.PEERS, client, 4000), 20),
    "clients of one uid, each older than the one before": lambda: (
        b"".join(
            smq.frame(
                bytes((LinkType.PEERS,))
                + b"".join(
                    struct.pack(">IQB", random.getrandbits(31), (1 << 40) - 3600 * part - of, 1) + b"u\0\0\0"
                    for of in range(3600)
                )
            )
            for part in range(10)
        ),
        2,
    ),
    "120,000 sub-topics": lambda: (
        packed(LinkType.SUBTOPICS, lambda of: struct.pack(">IH", random.getrandbits(32), 4) + os.urandom(4), 6000),
        20,
    ),
    "counts of subscribers that it was not asked for": lambda: (
        packed(LinkType.COUNT, lambda of: topic(of) + b"\0\0\0\7", 5000),
        30,
    ),
    "all numbers of nodes are taken": lambda: (smq.frame(wire.numbers(Packet.TAKEN, range(1, 1024))), 100),
    "pings": lambda: (smq.frame(wire.u64(Packet.PING, 7)) * 1000, 100),
    "messages before it has said of which hub": lambda: (smq.publish_frame(7, 8, 9, b"x" * 1000) * 60, 100),
    "messages that nobody wants": lambda: (smq.publish_frame(TOPIC_BIT | 3, 8, 9, b"x") * 3000, 40),
}


ENDED = {
    "65,535 channels",
    "channels with names of 64 KiB",
    "100,000 ends of channels that are not there",
    "a channel that opens and closes 20,000 times",
    "all numbers of nodes are taken",
}


@pytest.mark.parametrize("case", FLOODS)
def test_a_broken_node_delays_no_other(pair: Port, case: str) -> None:
    frames, times = FLOODS[case]()
    peer = pair.peer().joined()
    if "opens and closes" in case:
        name, number = next(iter(peer.there.items()))
        frames = smq.frame(wire.channel(Packet.CLOSE, number)) + smq.frame(wire.channel(Packet.OPEN, number, name))
    if "before it has said" in case:
        peer.close()
        peer = pair.peer().up()
    with pair.besieged.attack(f"links: a broken node, {case}", grows_bytes=256 << 20) as attack:
        assert floods(peer, frames, times) or case not in ENDED
        attack.sent(len(frames) * times)
        wait_until(lambda: pair.status()["links_lost"] >= 1, "the broken node is lost")
    assert is_well(pair)


def test_a_node_that_acknowledges_what_was_never_sent(kept_pair: Port) -> None:
    peer = kept_pair.peer().joined()
    peer.say(wire.u64(Packet.ACK, 1 << 60))
    assert peer.ended(SOON_S)
    assert is_well(kept_pair)


@pytest.mark.parametrize("numbers", [[0], [1024], [65_535], [7, 65_535], []])
def test_a_node_without_a_number(kept_pair: Port, numbers: list[int]) -> None:
    peer = kept_pair.peer().proved()
    peer.say(wire.numbers(Packet.NODE, numbers))
    assert peer.ended(SOON_S)
    assert is_well(kept_pair)


def test_a_node_that_takes_nothing(pair: Port) -> None:
    """It stands still, while clients here publish what it wants."""
    besieged = pair.besieged
    device = Stranger(besieged, b"publisher")
    tid = device.create(b"wanted")
    peer = pair.peer().joined()
    peer.say(*cluster_packets.keys(LinkType.INTEREST, [key_at(tid, peer)]))
    wait_until(lambda: any(one["interest"] for one in pair.status()["hubs"]), "interest")
    frame = smq.frame(bytes((smq.Type.PUBLISH,)) + struct.pack(">III", tid, device.etid, 0) + b"x" * 60_000)
    with besieged.attack("links: 40 MB for a node that takes nothing") as attack:
        for _ in range(700):
            device.send_bytes(frame)
            attack.sent(len(frame))
        wait_until(lambda: pair.status()["links_lost"] == 1, "the slow node is lost")
    # Publishers wait when half of the queue (8 MiB) is used, so that the node is lost for its silence in most cases.
    lost = max(sum(one["lost"].values()) for one in pair.status()["hubs"])
    assert 130 < lost <= 700
    assert is_well(pair)
    peer.close()
    device.close()


def key_at(tid: int, peer: Peer) -> cluster_packets.Key:
    name = next(iter(peer.there))
    numbers = NameNumbers(blake2b(name, key=key(), digest_size=32).digest())
    found = numbers.topic(b"wanted")
    assert found[0] == tid
    return found


# ---- TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def tls_port(besiege: Callable[..., Besieged], authority: Authority) -> Port:
    number = free_port()
    return Port(besiege(APPS / "lua", *settings(number, *files(authority, "first"))), number)


def files(authority: Authority, name: str) -> list[str]:
    cert, private = authority.pair(name)
    return [
        "--cluster-ca", str(authority.path), "--cluster-cert", str(cert), "--cluster-key", str(private)
    ]  # fmt: skip


def test_tls_handshakes_that_are_never_done(
    tls_port: Port, authority: Authority, start_node: Callable[..., Served]
) -> None:
    with tls_port.besieged.attack("links over TLS: 300 handshakes that are not done") as attack:
        sockets = many(tls_port, 300)
        for sock in sockets[::2]:
            sock.sendall(b"\x16\x03\x01\x02\x00\x01")
            attack.sent(6)
        start_node(tls_port, *files(authority, "second"))
        wait_until(lambda: tls_port.status()["links"], "the real node is linked")
    assert tls_port.refusals("tls_handshake") >= 200
    assert len(tls_port.lines()) <= MAX_LINES
    assert len(sockets) == 300


def is_let_in(context: ssl.SSLContext, port: Port) -> bool:
    """Whether the other side goes on after the handshake: it waits for Hello then."""
    try:
        with context.wrap_socket(port.open()) as sock:
            sock.settimeout(1)
            return bool(sock.recv(99))
    except TimeoutError:
        return True
    except OSError:
        return False


def test_certificates_of_another_authority(tls_port: Port, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    cert, private = Authority(tmp_path / "other").pair("intruder")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(cert, private)
    with tls_port.besieged.attack("links over TLS: 100 certificates of another authority") as attack:
        for _ in range(100):
            assert is_let_in(context, tls_port) is False
            attack.sent(2000)
    assert tls_port.status()["links"] == []
    assert 1 <= len([line for line in tls_port.lines() if "TLS" in line]) <= MAX_LINES


# ---- Unix sockets

IN_A_FOLDER = """
import resource
import sys
import time
from pathlib import Path

import gevent

from smqrt.cluster.engines.mesh import Mesh

mesh = Mesh(b"k" * 32)
mesh.share_directory(Path(sys.argv[1]))
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
began_s = time.process_time()
while True:
    gevent.sleep(0.05)
    print("links", len(mesh.node.links), len(mesh.node.all_links), time.process_time() - began_s, flush=True)
"""


class InAFolder:
    """A process that is joined with those that share its folder; `files` bounds how many it may open."""

    def __init__(self, folder: Path, files: int = 0) -> None:
        words = [sys.executable, "-c", IN_A_FOLDER, str(folder), *([str(files)] if files else [])]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(words, cwd=REPOSITORY, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(self._counts, "the process has begun")

    def _counts(self) -> list[str]:
        """What it prints besides lines of its log."""
        return [line for line in self.lines if line.startswith("links ")]

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self.lines.append(line.strip())

    @property
    def said(self) -> tuple[int, int, float]:
        """How many links are up, how many there are, and the CPU that it has used, in seconds."""
        _, up, links, cpu_s = self._counts()[-1].split()
        return int(up), int(links), float(cpu_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="smqrt-") as path:  # a short one: paths of sockets have a limit
        yield Path(path)


@pytest.fixture
def start_in() -> Iterator[Callable[..., InAFolder]]:
    with Factory(InAFolder) as start:
        yield start


def strangers_in(folder: Path, count: int) -> list[socket.socket]:
    (path,) = folder.glob("*.sock")
    sockets = [socket.socket(socket.AF_UNIX) for _ in range(count)]
    for sock in sockets:
        sock.connect(str(path))
    return sockets


def test_foreign_connections_do_not_block_a_unix_socket(folder: Path, start_in: Callable[..., InAFolder]) -> None:
    first = start_in(folder)
    sockets = strangers_in(folder, 3 * MAX_UNAUTHENTICATED)
    second = start_in(folder)
    wait_until(lambda: first.said[0] == second.said[0] == 1, "the processes are joined")
    assert first.said[1] <= MAX_UNAUTHENTICATED + 1
    assert len(sockets) == 3 * MAX_UNAUTHENTICATED


def test_a_unix_socket_pauses_without_free_descriptors(folder: Path, start_in: Callable[..., InAFolder]) -> None:
    one = start_in(folder, 60)
    sockets = strangers_in(folder, 100)
    wait_until(lambda: one.said[1] > 20, "it has taken some")
    before_s = one.said[2]
    time.sleep(2)
    assert one.said[2] - before_s < 0.3, "it asks again and again for what it can't get"
    for sock in sockets:
        sock.close()
    second = start_in(folder)
    wait_until(lambda: one.said[0] == second.said[0] == 1, "it goes on when there are files again")
    assert not [line for line in one.lines if "Error" in line or "Traceback" in line]
