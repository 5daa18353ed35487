"""The clusters that this process is in, as an operator sees them: its links to other nodes, the addresses where it
looks for some, its hubs, and the channels of its applications (help: cluster).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smqrt.broker.outbox import Drop
from smqrt.cluster.channel import AppChannel
from smqrt.cluster.clustered_broker import Member
from smqrt.cluster.engines.expected_links import Missing
from smqrt.cluster.engines.mesh import Dialer, Mesh, open_meshes
from smqrt.cluster.link import Link
from smqrt.smq.gevent_broker import GeventBroker, all_brokers
from smqrt.wire.link_packets import Refusal

Snapshot = dict[str, object]

_SHOWN = 1024
"""Links, addresses, hubs and channels that are shown: a node has at most 1023 others."""


def clusters() -> list[Snapshot]:
    """Returns a row for each node that this process is: one, unless an application has made more with `smq.mtl`."""
    return [_node(one) for one in list(open_meshes)]


def _node(mesh: Mesh) -> Snapshot:
    node = mesh.node
    return {
        "node": node.number,
        "fixed": node.is_fixed,
        "links": [_link(one) for one in links(mesh)[:_SHOWN]],
        "links_lost": node.links_lost,
        "refused": {Refusal(code).name.lower(): count for code, count in sorted(node.refused.items()) if code},
        "addresses": [_address(one) for one in mesh.dialers[:_SHOWN]],
        "missing": [_missing(mesh, one) for one in mesh.expected.missing()[:_SHOWN]],
        "hubs": [_hub(one) for one in list(node.members.values())[:_SHOWN]],
        "channels": [_channel(one) for one in list(node.channels.values())[:_SHOWN]],
    }


def links(mesh: Mesh) -> list[Link]:
    """Returns the links that are up, in the order of the other nodes' numbers."""
    return sorted(mesh.node.links.values(), key=lambda link: link.number)


def _link(link: Link) -> Snapshot:
    now_s = link.node.clock_s()
    return {
        "node": link.number,
        "via": link.transport.via,
        "since_s": round(now_s - link.since_s, 3),
        "silent_s": round(now_s - link.heard_s, 3),
        "round_trip_ms": None if link.round_trip_s is None else round(link.round_trip_s * 1000, 3),
        "queued_bytes": link.transport.outbox.queued_bytes,
        "unacknowledged_bytes": link.unacked_bytes,
        "sent_bytes": link.sent_bytes,
        "received_bytes": link.transport.worked_off_bytes,
    }


def _address(dialer: Dialer) -> Snapshot:
    state = "this node" if dialer.is_self else "linked" if dialer.up else "not linked"
    return {"address": dialer.address, "state": state, "why": "" if dialer.up or dialer.is_self else dialer.why}


def _missing(mesh: Mesh, one: Missing) -> Snapshot:
    return {"to": one.to, "why": one.why, "for_s": round(mesh.node.clock_s() - one.since_s, 3)}


def _hub(member: Member) -> Snapshot:
    broker: Any = member.broker
    return {
        "cluster": member.name,
        "hub": broker.number,
        "app": broker.app,
        "nodes": sorted(one.number for one in member.remotes),
        "joining": sorted(one.number for one in member.remotes if not one.synced),
        "peers": len(broker.sessions),
        "phantoms": len(member.phantoms),
        "interest": len(member.interest),
        "lost": {reason.name.lower(): broker.stats.drops[reason] for reason in (Drop.LINK_LOST, Drop.LINK_SLOW)},
    }


def _channel(channel: AppChannel) -> Snapshot:
    name = channel.name.decode("utf-8", "replace")
    return {"channel": name, "nodes": sorted(channel.nodes()), **channel.counts()}


def members() -> Iterable[tuple[GeventBroker, Member]]:
    """Returns the hubs of this process that are in a cluster."""
    return [(one, one.cluster) for one in all_brokers() if isinstance(one.cluster, Member)]
