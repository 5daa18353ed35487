"""A cluster beside one process, in one interleaved run: what a link and NATS cost, what workers cost and bring, how
long interest takes to reach a node that joins, and how soon the clients of a lost node are gone. The processor is the
figure to trust; rates are those of a machine that the generators share."""

from __future__ import annotations

import argparse
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

import brokers
from cluster_costs import costs
from cluster_nodes import PIECE, Client, Figure, Server, ended, joined, wait_for
from load import Generator
from shapes import Shape
from tls_handshakes import certificate, handshakes

from smqrt.wire import smq

SIZE_BYTES = 128
TOPICS = 200_000
CLIENTS = 10_000
PAIRS = "--pubs 100 --topics 100 --subs 100"
SHAPES = [
    *(
        Shape(f"fan{fan}", f"1 to {fan}", f"--subs {fan} --size {SIZE_BYTES} --batch 1 --window 1000")
        for fan in (1, 10, 100, 1000)
    ),
    Shape("pairs", "100 pairs", f"{PAIRS} --batch 1 --window 64"),
    Shape("pairs-batched", "100 pairs, batched", f"{PAIRS} --batch 8 --window 512"),
]
"""Windows that keep all processes busy: a worker with little to do has fewer messages in each turn, and what a turn
costs is divided by fewer."""
OTHER_SHAPES = [
    Shape("fan10-idle", "1 to 10, few on their way", f"--subs 10 --size {SIZE_BYTES} --batch 1 --window 64"),
    Shape("pairs-idle", "100 pairs, one at a time", f"{PAIRS} --batch 1 --window 1"),
    Shape("fan1000-full", "1 to 1000, 8,000 on their way", f"--subs 1000 --size {SIZE_BYTES} --batch 1 --window 8000"),
    Shape("pairs-rate", "100 pairs, 20,000 messages/s", f"{PAIRS} --batch 1 --window 0 --rate 20000"),
]
"""Beside them, without a bar."""
TUNED_NATS = "NATS with GOMEMLIMIT"
NATS: dict[str, dict[str, str]] = {"NATS": {}, TUNED_NATS: {"GOGC": "off", "GOMEMLIMIT": "256MiB"}}
"""By default nats-server spends half of its time in clearing its few MiB of memory; see the manual of clusters."""
MANY_CLIENTS = 100
"""With fewer the kernel can't spread them evenly."""
TLS_CLIENTS = 16
"""So many that a worker has several handshakes under way, as the one process has: with 4, a turn of a worker's loop is
for one of them, and handshakes of two workers seem to cost 1.15 times as much.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit code: 1 when a bar was not met."""
    parser = argparse.ArgumentParser(prog="scripts/bench/cluster", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(PARTS), help="only this part; repeatable")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts (default 5)")
    parser.add_argument("--seconds", type=float, default=2, help="how long one measurement lasts (default 2)")
    options = parser.parse_args(words)
    brokers.raise_file_limit()
    figures = []
    for name in options.only or PARTS:
        for figure in PARTS[name](options):
            print(figure, flush=True)
            figures.append(figure)
    return not all(figure.is_met for figure in figures)


# ---- links and NATS


@contextmanager
def pairs_of_nodes() -> Iterator[dict[str, tuple[Server, Server]]]:
    """Two nodes at a TCP link, and two at each NATS server where there is one: as it comes, and as the manual says."""
    with ExitStack() as ending:
        port = brokers.free_port()
        listen, nodes = f"127.0.0.1:{port}", {"link": f"127.0.0.1:{port}"}
        found = {"link": (ended(ending, "--cluster-listen", listen), ended(ending, "--cluster-nodes", nodes["link"]))}
        for kind, environment in NATS.items() if "nats" in brokers.available() else ():
            nats = brokers.start("nats", environment=environment)
            ending.callback(nats.stop)
            url = f"nats://127.0.0.1:{nats.port}"
            found[kind] = ended(ending, "--cluster-nodes", url), ended(ending, "--cluster-nodes", url)
        for pair in found.values():
            wait_for(lambda pair=pair: all(len(one.hub()["nodes"]) == 1 for one in pair), "the nodes did not meet")
        yield found


def links(options: argparse.Namespace) -> Iterator[Figure]:
    """What a message costs at both sides, and how long it takes."""
    rows: dict[str, list[float]] = {}
    with pairs_of_nodes() as nodes, raw_echo() as echo_port:
        for _ in range(options.rounds):
            for name, value in one_round(nodes, echo_port, options.seconds):
                rows.setdefault(name, []).append(value)
    found = {name: median(values) for name, values in rows.items()}
    for name, value in found.items():
        yield Figure(name, value, "us" if "us" in name else "msg/s")
    yield from verdicts(rows)


def one_round(nodes: dict[str, tuple[Server, Server]], echo_port: int, seconds: float) -> Iterator[tuple[str, float]]:
    local = nodes["link"][0]
    for shape, batch, window in (("bulk", 64, 8192), ("single", 1, 64)):
        (cost, *_), rate = flow(local, local, batch, window, seconds)
        yield f"local, {shape}: us of CPU a message", cost
        yield f"local, {shape}: rate", rate
        for kind, pair in nodes.items():
            (sending, receiving), rate = flow(*pair, batch, window, seconds)
            yield f"{kind}, {shape}: us of CPU a message, sending side", sending
            yield f"{kind}, {shape}: us of CPU a message, receiving side", receiving
            yield f"{kind}, {shape}: rate", rate
    yield "loopback TCP echo in Python: us, p50", raw_ping(echo_port, seconds / 2)
    yield "local: us one way, p50", one_way(local, local, seconds / 2)
    for kind, pair in nodes.items():
        yield f"{kind}: us one way, p50", one_way(*pair, seconds / 2)


def verdicts(rows: dict[str, list[float]]) -> Iterator[Figure]:
    def ratio(one: str, other: str) -> float:
        return median(a / b for a, b in zip(rows[one], rows[other], strict=True))

    cpu = "us of CPU a message"
    for side in ("sending side", "receiving side"):
        yield Figure(f"link, bulk, {side}", median(rows[f"link, bulk: {cpu}, {side}"]), "us", 0.35)
        single = ratio(f"link, single: {cpu}, {side}", f"local, single: {cpu}")
        yield Figure(f"link, single, {side} / local", single, "x", 1.6)
    yield Figure("link, one way", median(rows["link: us one way, p50"]), "us", 250)
    for kind in NATS if f"{TUNED_NATS}, bulk: rate" in rows else ():
        bulk = ratio(f"{kind}, bulk: rate", "link, bulk: rate")
        yield Figure(f"{kind} / link, bulk rate", bulk, "x", 0.6 if kind == TUNED_NATS else None, at_least=True)
        yield Figure(f"{kind} / link, one way", ratio(f"{kind}: us one way, p50", "link: us one way, p50"), "x", 2)


def flow(first: Server, second: Server, batch: int, window: int, seconds: float) -> tuple[list[float], float]:
    """From a publisher at one node to a subscriber at another: µs of each process a message, and messages a second."""
    subscriber, publisher = Client(second.port, b"subscriber"), Client(first.port, b"publisher")
    subscriber.subscribe(b"flow")
    frame = smq.publish_frame(publisher.create(b"flow"), publisher.etid, 0, b"x" * SIZE_BYTES)
    time.sleep(0.1)  # the interest is at the other node
    servers = [first] if first is second else [first, second]
    carry(publisher, subscriber, frame, batch, window, seconds / 4)
    before, start_s = [one.cpu_s()[0] for one in servers], time.monotonic()
    count = carry(publisher, subscriber, frame, batch, window, seconds)
    took_s = time.monotonic() - start_s
    costs = [(one.cpu_s()[0] - was) / count * 1e6 for one, was in zip(servers, before, strict=True)]
    publisher.close()
    subscriber.close()
    return costs, count / took_s


def carry(publisher: Client, subscriber: Client, frame: bytes, batch: int, window: int, seconds: float) -> int:
    """Keep `window` messages on their way for so long, then wait for all; returns how many arrived."""
    buffer, chunk, sent, got_bytes = bytearray(1 << 20), frame * batch, 0, 0
    deadline_s = time.monotonic() + seconds
    while (is_on := time.monotonic() < deadline_s) or got_bytes < sent * len(frame):
        while is_on and sent - got_bytes // len(frame) < window:
            publisher.sock.sendall(chunk)
            sent += batch
        if not select.select([subscriber.sock], [], [], 10)[0]:
            raise SystemExit(f"{sent - got_bytes // len(frame)} of {sent} messages did not arrive")
        got_bytes += subscriber.sock.recv_into(buffer)
    return sent


def one_way(first: Server, second: Server, seconds: float) -> float:
    """Median µs from a client of one node to a client of the other."""
    sender, receiver = Client(first.port, b"sender"), Client(second.port, b"receiver")
    time.sleep(0.1)
    frame = smq.publish_frame(receiver.etid, sender.etid, 0, b"x" * 16)
    result = pings(sender.sock, receiver.sock, frame, seconds)
    sender.close()
    receiver.close()
    return result


def pings(out: socket.socket, back: socket.socket, message: bytes, seconds: float) -> float:
    took_s, deadline_s = [], time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        start_s = time.perf_counter()
        out.sendall(message)
        back.recv(PIECE)
        took_s.append(time.perf_counter() - start_s)
    return median(took_s) * 1e6


ECHO = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    while True:
        one, _ = listener.accept()
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := one.recv(65536):
            one.sendall(data)
"""


@contextmanager
def raw_echo() -> Iterator[int]:
    """A process that sends back what it gets; gives its port."""
    process = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def raw_ping(port: int, seconds: float) -> float:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return pings(sock, sock, b"x" * 31, seconds)


# ---- workers


def workers(options: argparse.Namespace) -> Iterator[Figure]:
    """One process and two workers, by turns."""
    generator = Generator()
    if generator.name != "smqload":
        raise SystemExit(f"workers need the fast generator, and this is {generator.name}")
    with ExitStack() as ending:
        servers = {"one process": ended(ending), "two workers": ended(ending, "--workers", "2")}
        for shape in SHAPES + OTHER_SHAPES:
            yield from workers_at(generator, shape, servers, options)


def workers_at(
    generator: Generator, shape: Shape, servers: dict[str, Server], options: argparse.Namespace
) -> Iterator[Figure]:
    ratios, spreads, rates, shares = [], [], [], []
    for _ in range(options.rounds):
        reports = {}
        for name, server in servers.items():
            before = server.cpu_s()
            reports[name] = generator.run(shape, server, options.seconds)
            used_s = [now - was for now, was in zip(server.cpu_s(), before, strict=True)]
        one, two = reports["one process"], reports["two workers"]
        ratios.append(two["cpu_us_per_dlv"] / one["cpu_us_per_dlv"])
        spreads.append((max(used_s) - min(used_s)) / max(used_s))
        rates.append(two["dlv_per_s"] / one["dlv_per_s"])
        shares.append(two["gen_cpu_pct"])
    is_busy = shape in SHAPES
    yield Figure(f"two workers / one process, {shape.title}: CPU", median(ratios), "x", 1.25 if is_busy else None)
    if is_busy and int(shape.options.split("--subs ")[1].split()[0]) >= MANY_CLIENTS:
        yield Figure(f"two workers, {shape.title}: less at the one that does less", median(spreads), "of 1", 0.2)
    yield Figure(f"two workers / one process, {shape.title}: rate", median(rates), "x")
    yield Figure(f"two workers, {shape.title}: the generator's share of a core", median(shares) / 100, "of 1")


def tls(options: argparse.Namespace) -> Iterator[Figure]:
    """Connects over TLS."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        cert, key = certificate(folder, "ec")
        words = ["--tls-port", "0", "--cert", cert, "--key", key]
        one, two = ended(ending, *words), ended(ending, *words, "--workers", "2")
        for _ in range(options.rounds):
            costs = []
            for server in (one, two):
                before = server.cpu_s()
                seconds = max(2, int(options.seconds))
                count = handshakes(server.tls_port, "tls1_3", seconds, TLS_CLIENTS, os.sched_getaffinity(0))
                used_s = [now - was for now, was in zip(server.cpu_s(), before, strict=True)]
                costs.append(max(used_s) / count)
            ratios.append(costs[0] / costs[1])
    yield Figure("TLS connects per second of the busier worker / of one", median(ratios), "x", 1.7, at_least=True)


# ---- what a cluster must know


def interest(options: argparse.Namespace) -> Iterator[Figure]:
    """200,000 topics that a node learns of when it joins."""
    took_s, each_bytes = [], []
    for _ in range(min(options.rounds, 3)):
        port = brokers.free_port()
        first = Server("--cluster-listen", f"127.0.0.1:{port}", "--limits-client-names-bytes", "100000000")
        try:
            base_bytes = joined(port).memory_bytes
            subscriber = Client(first.port, b"subscriber")
            for begin in range(0, TOPICS, 1000):
                subscriber.subscribe(*(b"building/%d/temperature" % number for number in range(begin, begin + 1000)))
            found = joined(port, topics=TOPICS)
        finally:
            first.stop()
        took_s.append(found.seconds)
        each_bytes.append((found.memory_bytes - base_bytes) / TOPICS)
    yield Figure(f"{TOPICS:,} topics: until a node that joins knows them", median(took_s), "s", 3)
    yield Figure(f"{TOPICS:,} topics: memory at that node, each", median(each_bytes), "bytes", 150)


def vanish(options: argparse.Namespace) -> Iterator[Figure]:
    """A node with 10,000 clients, each of them observed at the other node, that is killed."""
    rows = [vanished() for _ in range(min(options.rounds, 3))]
    yield Figure(f"{CLIENTS:,} clients: until all who observe them know", median(row[0] for row in rows), "s", 0.5)
    yield Figure(f"{CLIENTS:,} clients: longest wait of another client", median(row[1] for row in rows), "ms", 50)


def vanished() -> tuple[float, float]:
    port = brokers.free_port()
    stays, goes = Server("--cluster-listen", f"127.0.0.1:{port}"), Server("--cluster-nodes", f"127.0.0.1:{port}")
    try:
        clients = [Client(goes.port, b"client-%d" % number) for number in range(CLIENTS)]
        observer = Client(stays.port, b"observer")
        wait_for(lambda: stays.hub()["phantoms"] >= CLIENTS, "the clients did not become known")
        for begin in range(0, CLIENTS, 1000):
            observer.send(*(smq.with_id(smq.Type.OBSERVE, one.etid) for one in clients[begin : begin + 1000]))
        with waits(stays) as longest_s:
            time.sleep(0.5)
            start_s = time.monotonic()
            goes.kill()
            for _ in clients:
                observer.packet()
            took_s = time.monotonic() - start_s
        return took_s, longest_s[0] * 1000
    finally:
        stays.stop()
        goes.kill()


@contextmanager
def waits(server: Server) -> Iterator[list[float]]:
    """Writes to itself through a server, again and again; the longest wait in seconds is in the list that it gives."""
    client, longest_s, is_over = Client(server.port, b"waiting"), [0.0], threading.Event()
    frame = smq.publish_frame(client.etid, client.etid, 0, b"x")

    def ping() -> None:
        while not is_over.is_set():
            start_s = time.perf_counter()
            client.sock.sendall(frame)
            if not client.sock.recv(PIECE):
                raise SystemExit("the client that measures was disconnected")
            longest_s[0] = max(longest_s[0], time.perf_counter() - start_s)

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        yield longest_s
    finally:
        is_over.set()
        thread.join()


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "links": links,
    "workers": workers,
    "tls": tls,
    "interest": interest,
    "vanish": vanish,
    "costs": costs,
}

if __name__ == "__main__":
    sys.exit(main())
