"""`smqrt cluster`: the nodes that a running server works together with, and what larger clusters will cost."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any

import click

from smqrt.cli.admin import AdminClient, AdminError, connection_options, json_option, lasted, print_table, size
from smqrt.cli.terminal import InterruptibleCommand
from smqrt.cluster.cost_model import ENGINES, Load
from smqrt.cluster.cost_model import plan as plan_of
from smqrt.printable import json_line
from smqrt.wire.smq import MAX_NODE

_LINKS = ("node", "peer", "via", "up", "round trip", "queued", "sent", "received")
_PLAN = ("nodes", "engine", "memory", "links", "clients", "messages", "deliveries", "CPU", "sends", "join")
_HUBS = ("cluster", "hub", "node", "nodes", "clients", "phantoms", "interest", "lost")
_CHANNELS = ("channel", "node", "nodes", "sent", "received", "refused", "lost", "dropped")
_LOOK_S = 0.2


@click.group()
def cluster() -> None:
    """Hubs of several processes that work as one: `smqrt help cluster` is the page of the manual."""


@cluster.command(cls=InterruptibleCommand)
@connection_options
@json_option
def status(client: AdminClient, as_json: bool) -> None:
    """Show nodes, links, round trips, queues, interest and losses. Exit code 1 when a link is missing."""
    rows: list[dict[str, Any]] = client.get("clusters")
    if as_json:
        for row in rows:
            click.echo(json_line(row))
    elif rows:
        _show(rows)
    else:
        click.echo("This server is in no cluster.", err=True)
    if any(_missing(row) for row in rows):
        raise SystemExit(1)


@cluster.command(cls=InterruptibleCommand)
@connection_options
@click.argument("node", type=click.IntRange(1, MAX_NODE), required=False)
@click.option("--wait-s", type=click.FloatRange(0), default=60.0, show_default=True, help="For the last client to go.")
@click.option("--undo", is_flag=True, help="Take clients again.")
def drain(client: AdminClient, node: int | None, wait_s: float, undo: bool) -> None:
    """Move the clients of a node to other nodes, before it is stopped or replaced.

    The server is unready at once (`/readyz` answers 503), lets no new SMQ clients in after `drain.delay_s`, and closes
    those that it has over `drain.window_s`; they come back at another node. Exit code 1 when some are still there after
    the wait. NODE is its number, as a safeguard: another node refuses.
    """
    rows: list[dict[str, Any]] = client.get("clusters")
    numbers = sorted(row["node"] for row in rows)
    if not rows:
        raise AdminError(f"{client.url} is in no cluster, so its clients have nowhere to go; stop it instead.")
    if node is not None and node not in numbers:
        own = ", ".join(map(str, numbers))
        raise AdminError(f"{client.url} is node {own}, not {node}; name the server with --url, see smqrt servers.")
    if not undo and not {link["node"] for row in rows for link in row["links"]} - set(numbers):
        raise AdminError("no other node is linked, so the clients have nowhere to go; smqrt cluster status says why.")
    client.post("drain", on=not undo)
    if undo:
        click.echo("takes clients again")
        return
    until_s = monotonic() + wait_s
    while (left := client.get("server")["peers"]) and monotonic() < until_s:
        sleep(_LOOK_S)
    if left:
        raise AdminError(f"{left} clients are still there after {wait_s:g} s; smqrt peers lists them.")
    click.echo("no clients left; the node takes none until it is started again, or smqrt cluster drain --undo")


@cluster.command(cls=InterruptibleCommand)
@click.option("--nodes", multiple=True, type=click.IntRange(2), default=(16, 100, 1000), show_default=True)
@click.option("--clients", type=click.IntRange(0), default=10_000_000, show_default=True, help="Of all nodes together.")
@click.option("--connects-per-s", type=float, default=1000.0, show_default=True, help="Of these, coming and going.")
@click.option("--topics", type=click.IntRange(0), default=1_000_000, show_default=True, help="With subscribers.")
@click.option("--nodes-per-topic", type=float, default=1.0, show_default=True, help="At how many nodes they are.")
@click.option("--messages-per-s", type=float, default=100_000.0, show_default=True, help="Of all nodes together.")
@click.option("--payload-bytes", type=click.IntRange(0), default=128, show_default=True)
@click.option("--subscribers", type=float, default=10.0, show_default=True, help="Of a message, at all nodes together.")
def plan(nodes: tuple[int, ...], **words: Any) -> None:
    """Say what each node of a cluster will need: memory, CPU, network; from costs that were measured."""
    rows, remarks = [], []
    for count in nodes:
        for engine, costs in ENGINES.items():
            found = plan_of(Load(nodes=count, **words), costs)
            shares = (f"{share:.1%}" for share in (*found.cpu.values(), sum(found.cpu.values())))
            sent = f"{size(found.sent_bytes_per_s)}/s"
            rows.append((count, engine, size(found.memory_bytes), *shares, sent, f"{found.join_s:.1f} s"))
            remarks += [f"{count:,} nodes, {engine}: {one}" for one in found.remarks]
    print_table(_PLAN, rows)
    for remark in remarks:
        click.echo(remark, err=True)


def _show(rows: list[dict[str, Any]]) -> None:
    print_table(_LINKS, [_link(row["node"], one) for row in rows for one in row["links"]])
    click.echo()
    print_table(_HUBS, [_hub(row["node"], one) for row in rows for one in row["hubs"]])
    if channels := [_channel(row["node"], one) for row in rows for one in row["channels"]]:
        click.echo()
        print_table(_CHANNELS, channels)
    for row in rows:
        for one in _missing(row):
            click.echo(f"node {row['node']} has no link to {one['to']}: {one['why']}", err=True)
        for why, count in row["refused"].items():
            click.echo(f"node {row['node']}: {count} links refused: {why}", err=True)


def _missing(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a server of an older release: what has no link of its list."""
    listed = [{"to": one["address"], "why": one["why"]} for one in row["addresses"] if one["state"] == "not linked"]
    missing: list[dict[str, Any]] = row.get("missing", listed)
    return missing


def _link(node: int, one: dict[str, Any]) -> tuple[object, ...]:
    round_trip = "" if one["round_trip_ms"] is None else f"{one['round_trip_ms']:.1f} ms"
    sizes = (size(one[name]) for name in ("queued_bytes", "sent_bytes", "received_bytes"))
    return (node, one["node"], one["via"], lasted(one["since_s"]), round_trip, *sizes)


def _hub(node: int, one: dict[str, Any]) -> tuple[object, ...]:
    counts = (one["peers"], one["phantoms"], one["interest"], sum(one["lost"].values()))
    return (one["cluster"], one["hub"], node, len(one["nodes"]), *counts)


def _channel(node: int, one: dict[str, Any]) -> tuple[object, ...]:
    return (one["channel"], node, len(one["nodes"]), *(one[name] for name in _CHANNELS[3:]))
