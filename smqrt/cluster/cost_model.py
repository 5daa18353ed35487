"""Cost model of a cluster: the memory, CPU time and traffic of its nodes.

It extrapolates measured costs to clusters that are too large to test. The costs were measured on one core of a virtual
machine in 2026 (`scripts/bench/cluster --only costs --only links`). The memory of a cluster of eight nodes with 16,000
clients agrees with the model within 1 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from smqrt.wire.smq import LOCAL_MASK, MAX_NODE


@dataclass(frozen=True)
class Costs:
    """Measured costs, in bytes of memory and µs of CPU time.

    Attributes:
        process_bytes: a server without clients.
        client_bytes: a client of the node itself, on a raw socket, without subscriptions.
        phantom_bytes, phantom_us: a client of another node; the time is that of a single connect.
        phantom_joining_us: the time for each client in the snapshot of a node that joins.
        topic_bytes, topic_joining_us: a topic with subscribers at another node.
        link_bytes: a link.
        ping_us: the ping of each second and its answer; for NATS including the hello.
        send_us, receive_us: a message of 128 bytes to one other node, in a batch.
        deliver_us: a message to one subscriber of this node, in a batch.
    """

    process_bytes: int = 75_000_000
    client_bytes: int = 1_350
    phantom_bytes: int = 376
    phantom_us: float = 90
    phantom_joining_us: float = 5
    topic_bytes: int = 141
    topic_joining_us: float = 1.6
    link_bytes: int = 93_000
    ping_us: float = 20
    send_us: float = 0.15
    receive_us: float = 0.13
    deliver_us: float = 0.1


MESH = Costs()
NATS = Costs(phantom_us=130, link_bytes=330_000, ping_us=25, send_us=0.22, receive_us=0.22)
ENGINES = {"mesh": MESH, "NATS": NATS}
FRAME_BYTES = 15
"""The header of a Publish frame."""
PHANTOM_BYTES_SENT = 30
"""The approximate size of the packet for a client that has connected or disconnected."""
PING_BYTES_SENT = 40
"""A ping and its answer."""


@dataclass(frozen=True)
class Load:
    """The load of a cluster.

    Attributes:
        nodes: the number of nodes.
        clients: clients of all nodes.
        connects_per_s: clients that connect; as many disconnect.
        topics: topics with subscribers.
        nodes_per_topic: the number of nodes at which a topic has subscribers.
        messages_per_s: messages published at all nodes.
        payload_bytes: the size of a message.
        subscribers: the number of subscribers of a message at all nodes.
    """

    nodes: int
    clients: int
    connects_per_s: float
    topics: int
    nodes_per_topic: float
    messages_per_s: float
    payload_bytes: int
    subscribers: float


@dataclass(frozen=True)
class NodePlan:
    """The resources that each node needs.

    Attributes:
        memory_bytes: the memory of the process, without that of applications.
        cpu: shares of a core, by purpose.
        sent_bytes_per_s: traffic to other nodes.
        join_s: CPU seconds that a joining node needs for the snapshots of all others.
        remarks: limits that the plan exceeds.
    """

    memory_bytes: float
    cpu: dict[str, float]
    sent_bytes_per_s: float
    join_s: float
    remarks: list[str] = field(default_factory=list)


def plan(load: Load, costs: Costs) -> NodePlan:
    """Return the resources that each node needs; the model assumes that clients are spread evenly."""
    others = load.nodes - 1
    own = load.clients / load.nodes
    phantoms = load.clients - own
    # 1 minus the chance that none of the other nodes has a subscriber of a topic.
    wanted_elsewhere = load.topics * (1 - (1 - min(1.0, load.nodes_per_topic / load.nodes)) ** others)
    published = load.messages_per_s / load.nodes
    copies = min(others, load.nodes_per_topic * others / load.nodes)
    # A set of nodes is an integer with one bit for each.
    topic_bytes = costs.topic_bytes + load.nodes // 8
    memory_bytes = (
        costs.process_bytes
        + own * costs.client_bytes
        + phantoms * costs.phantom_bytes
        + wanted_elsewhere * topic_bytes
        + others * costs.link_bytes
    )
    changes_per_s = 2 * load.connects_per_s / load.nodes
    cpu = {
        "links": others * costs.ping_us / 1e6,
        "clients": changes_per_s * others * costs.phantom_us / 1e6,
        "messages": published * copies * (costs.send_us + costs.receive_us) / 1e6,
        "deliveries": load.messages_per_s * load.subscribers / load.nodes * costs.deliver_us / 1e6,
    }
    sent_bytes_per_s = (
        others * PING_BYTES_SENT
        + changes_per_s * others * PHANTOM_BYTES_SENT
        + published * copies * (load.payload_bytes + FRAME_BYTES)
    )
    announced = wanted_elsewhere * load.nodes_per_topic
    join_s = (phantoms * costs.phantom_joining_us + announced * costs.topic_joining_us) / 1e6
    remarks = []
    if load.nodes > MAX_NODE:
        remarks.append(f"{load.nodes:,} nodes: a cluster has at most {MAX_NODE}")
    if own > LOCAL_MASK:
        remarks.append(f"{own:,.0f} clients for each node: a node has numbers for at most {LOCAL_MASK:,}")
    if (cores := sum(cpu.values())) > 1:
        remarks.append(f"{cores:.1f} cores for each node: a process uses one")
    return NodePlan(memory_bytes, cpu, sent_bytes_per_s, join_s, remarks)
