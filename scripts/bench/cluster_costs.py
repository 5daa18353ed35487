"""Costs of a node for the other nodes, for the plan of larger clusters (`smqrt cluster plan`)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack

import brokers
from cluster_nodes import Client, Figure, Server, ended, joined, wait_for

CLIENTS = 15_000
TOPICS = 200_000
NODES = 8
PING_S = 0.05
"""Twenty times as often as usual: what a link costs is little beside what an idle process does."""


def costs(options: argparse.Namespace) -> Iterator[Figure]:
    """Memory and CPU of a client, a topic and a link of other nodes."""
    yield from client_costs()
    yield from topic_costs()
    yield from link_costs()


def client_costs() -> Iterator[Figure]:
    port = brokers.free_port()
    first = Server("--cluster-listen", f"127.0.0.1:{port}")
    other = Server("--cluster-nodes", f"127.0.0.1:{port}")
    try:
        wait_for(lambda: bool(other.hub()["nodes"]), "the nodes did not meet")
        empty, idle_share = joined(port), cpu_share(other)
        before_s, before_bytes, start_s = sum(other.cpu_s()), link_bytes(other), time.monotonic()
        clients = [Client(first.port, b"client-%d" % number) for number in range(CLIENTS)]
        wait_for(lambda: other.hub()["phantoms"] >= CLIENTS, "the clients did not become known")
        told_s = (sum(other.cpu_s()) - before_s - idle_share * (time.monotonic() - start_s)) / CLIENTS
        yield Figure("a client that connects: CPU of each other node", told_s * 1e6, "us")
        yield Figure("a client that connects: bytes to it", (link_bytes(other) - before_bytes) / CLIENTS, "bytes")
        full = joined(port, clients=CLIENTS)
        yield Figure("a client: memory of each other node", (full.memory_bytes - empty.memory_bytes) / CLIENTS, "bytes")
        yield Figure("a client: CPU of a node that joins", (full.cpu_s - empty.cpu_s) / CLIENTS * 1e6, "us")
        for client in clients:
            client.close()
    finally:
        first.stop()
        other.stop()


def topic_costs() -> Iterator[Figure]:
    port = brokers.free_port()
    first = Server("--cluster-listen", f"127.0.0.1:{port}", "--limits-client-names-bytes", "100000000")
    other = Server("--cluster-nodes", f"127.0.0.1:{port}")
    try:
        wait_for(lambda: bool(other.hub()["nodes"]), "the nodes did not meet")
        empty, before_s, before_bytes = joined(port), sum(other.cpu_s()), link_bytes(other)
        subscriber = Client(first.port, b"subscriber")
        for begin in range(0, TOPICS, 1000):
            subscriber.subscribe(*(b"building/%d/temperature" % number for number in range(begin, begin + 1000)))
        wait_for(lambda: other.hub()["interest"] >= TOPICS, "the interest did not arrive")
        yield Figure("a topic: CPU of each other node", (sum(other.cpu_s()) - before_s) / TOPICS * 1e6, "us")
        yield Figure("a topic: bytes to it", (link_bytes(other) - before_bytes) / TOPICS, "bytes")
        full = joined(port, topics=TOPICS)
        yield Figure("a topic: memory of each other node", (full.memory_bytes - empty.memory_bytes) / TOPICS, "bytes")
        yield Figure("a topic: CPU of a node that joins", (full.cpu_s - empty.cpu_s) / TOPICS * 1e6, "us")
    finally:
        first.stop()
        other.stop()


def cpu_share(server: Server, seconds: float = 2) -> float:
    """The share of a core that a server uses."""
    before_s = sum(server.cpu_s())
    time.sleep(seconds)
    return (sum(server.cpu_s()) - before_s) / seconds


def link_bytes(server: Server) -> int:
    """What came over links."""
    return sum(int(link["received_bytes"]) for link in server.row()["links"])


def link_costs() -> Iterator[Figure]:
    alone = idle(1, "")
    for name in ["link", *(["NATS"] if "nats" in brokers.available() else [])]:
        found = idle(NODES, name)
        yield Figure(f"a {name}: CPU of a ping", (found[0] - alone[0]) / (NODES - 1) * PING_S * 1e6, "us")
        yield Figure(f"a {name}: memory", (found[1] - alone[1]) / (NODES - 1) / 1024, "KiB")


def idle(count: int, by: str) -> tuple[float, float]:
    """CPU a second, and bytes of memory, of one of so many idle nodes."""
    ports = [brokers.free_port() for _ in range(count)]
    nodes = ",".join(f"127.0.0.1:{port}" for port in ports)
    with ExitStack() as ending:
        if by == "NATS":
            nats = brokers.start("nats")
            ending.callback(nats.stop)
            url = f"nats://127.0.0.1:{nats.port}"
            servers = [ended(ending, "--cluster-nodes", url, "--cluster-ping-s", str(PING_S)) for _ in ports]
        else:
            more = ["--cluster-nodes", nodes, "--cluster-ping-s", str(PING_S)]
            words = [["--cluster-listen", f"127.0.0.1:{port}", *more] for port in ports]
            servers = [ended(ending, *(each if by else [])) for each in words]
        wait_for(lambda: all(len(one.row()["links"]) == count - 1 for one in servers if by), "the nodes did not meet")
        time.sleep(1)
        before = [sum(one.cpu_s()) for one in servers]
        time.sleep(10)
        used = [(sum(one.cpu_s()) - was) / 10 for one, was in zip(servers, before, strict=True)]
        return sum(used) / count, sum(one.memory_bytes() for one in servers) / count
