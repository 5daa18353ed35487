"""Settings of clusters of hubs."""

from __future__ import annotations

from dataclasses import dataclass

from smqrt.settings.option_types import number, option, optional, path, size, switch, text, texts, whole


@dataclass(frozen=True)
class ClusterSettings:
    """Clusters of hubs over several processes (help: cluster)."""

    listen: str = option(
        "", text(), "Address and port for links of other nodes: `0.0.0.0:1900`. When not given: no port is opened."
    )
    nodes: tuple[str, ...] = option(
        (),
        texts(),
        "Other nodes, `10.0.0.2:1900`; the list may also contain this node. Or servers of NATS, "
        "`nats://10.0.0.9`, through which all nodes find each other.",
        shown="none",
    )
    password: str | None = option(
        None, optional(text()), "Password of the cluster, the same at all nodes. Required for links.", secret=True
    )
    ca: str | None = option(
        None,
        optional(path()),
        "Authority that signs certificates of nodes only, a PEM file. "
        "Links then use TLS with certificates on both sides. For NATS: the authority of its servers.",
    )
    cert: str | None = option(None, optional(path()), "This node's certificate with its chain, a PEM file.")
    key: str | None = option(None, optional(path()), "Private key of `cluster.cert`; by default in the same file.")
    credentials: str | None = option(None, optional(path()), "File with a user's credentials for NATS (`.creds`).")
    node: int = option(
        0, whole(0, 1023), "Fixed number of this node; its workers have the next numbers. 0: a random one."
    )
    hubs: bool = option(
        False,
        switch(),
        "Join all hubs, also those that were created without `cluster`: each with the hubs of the same application "
        "and name.",
    )
    directory: str | None = option(
        None, optional(path()), "Join all processes of this machine that set the same folder, without a network."
    )
    ping_s: float = option(1.0, number(0.05, 3600), "Seconds between pings of another node.")
    silence_s: float = option(5.0, number(0.2, 3600), "Seconds without data from a node after which it counts as lost.")
    queue_bytes: int = option(
        16 << 20, size(1 << 18), "Limit of the send queue of a node; beyond, its link is reset.", shown="`16MiB`"
    )
    kept_s: float = option(120.0, number(0, 86400), "Seconds for which QoS 1 and 2 are kept for a lost node.")
    kept_bytes: int = option(64 << 20, size(1 << 18), "Memory of a hub for these messages.", shown="`64MiB`")
    session_wait_s: float = option(15.0, number(0, 60), "Seconds for which CONNECT waits for a node that was lost.")
