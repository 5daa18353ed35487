"""`smqrt cluster`: status, drain and capacity planning of clusters."""

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
_POLL_S = 0.2


@click.group()
def cluster() -> None:
    """Show, drain and plan the nodes of a cluster.

    `smqrt help cluster` is the page of the manual.
    """


@cluster.command(cls=InterruptibleCommand)
@connection_options
@json_option
def status(client: AdminClient, as_json: bool) -> None:
    """Show the nodes, links, hubs and channels of a cluster.

    Exit code 1 when a link is missing.
    """
    rows: list[dict[str, Any]] = client.get("clusters")
    if as_json:
        for row in rows:
            click.echo(json_line(row))
    elif rows:
        _print_status(rows)
    else:
        click.echo("This server is not in a cluster.", err=True)
    if any(_missing_links(row) for row in rows):
        raise SystemExit(1)


@cluster.command(cls=InterruptibleCommand)
@connection_options
@click.argument("node", type=click.IntRange(1, MAX_NODE), required=False)
@click.option(
    "--wait-s",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds to wait until all clients are disconnected.",
)
@click.option("--undo", is_flag=True, help="Accept clients again.")
def drain(client: AdminClient, node: int | None, wait_s: float, undo: bool) -> None:
    """Disconnect the clients of a node before it is stopped.

    The server becomes unready at once: `/readyz` responds 503. After `drain.delay_s` it rejects new SMQ clients, and
    closes the connected ones over `drain.window_s`. They reconnect to other nodes.

    NODE is a safeguard: the command fails when the server is not the node with this number. Exit code 1 when clients
    are still connected after --wait-s.
    """
    rows: list[dict[str, Any]] = client.get("clusters")
    numbers = sorted(row["node"] for row in rows)
    if not rows:
        raise AdminError(f"{client.url} is not in a cluster: clients can't reconnect elsewhere. Stop it instead.")
    if node is not None and node not in numbers:
        own = ", ".join(map(str, numbers))
        raise AdminError(f"{client.url} is node {own}, not {node}. Select the server with --url; see smqrt servers.")
    if not undo and not {link["node"] for row in rows for link in row["links"]} - set(numbers):
        raise AdminError("no other node is linked: clients can't reconnect elsewhere. See smqrt cluster status.")
    client.post("drain", on=not undo)
    if undo:
        click.echo("accepts clients again")
        return
    until_s = monotonic() + wait_s
    while (left := client.get("server")["peers"]) and monotonic() < until_s:
        sleep(_POLL_S)
    if left:
        raise AdminError(f"{left} clients are still connected after {wait_s:g} s. List them with smqrt peers.")
    click.echo("no clients left; the node rejects clients until a restart or smqrt cluster drain --undo")


@cluster.command(cls=InterruptibleCommand)
@click.option(
    "--nodes",
    multiple=True,
    type=click.IntRange(2),
    default=(16, 100, 1000),
    show_default=True,
    help="Number of nodes; repeatable.",
)
@click.option("--clients", type=click.IntRange(0), default=10_000_000, show_default=True, help="Clients of all nodes.")
@click.option(
    "--connects-per-s", type=float, default=1000.0, show_default=True, help="Clients that connect per second, in total."
)
@click.option(
    "--topics", type=click.IntRange(0), default=1_000_000, show_default=True, help="Topics with subscribers, in total."
)
@click.option(
    "--nodes-per-topic", type=float, default=1.0, show_default=True, help="Nodes with subscribers of the same topic."
)
@click.option(
    "--messages-per-s", type=float, default=100_000.0, show_default=True, help="Messages per second, of all nodes."
)
@click.option(
    "--payload-bytes", type=click.IntRange(0), default=128, show_default=True, help="Payload of a message, in bytes."
)
@click.option(
    "--subscribers", type=float, default=10.0, show_default=True, help="Subscribers of a message, at all nodes."
)
def plan(nodes: tuple[int, ...], **load: Any) -> None:
    """Estimate memory, CPU and network of each node of a cluster.

    The estimate uses measured costs of both engines, mesh and NATS.
    """
    rows, remarks = [], []
    for count in nodes:
        for engine, costs in ENGINES.items():
            found = plan_of(Load(nodes=count, **load), costs)
            shares = (f"{share:.1%}" for share in (*found.cpu.values(), sum(found.cpu.values())))
            sent = f"{size(found.sent_bytes_per_s)}/s"
            rows.append((count, engine, size(found.memory_bytes), *shares, sent, f"{found.join_s:.1f} s"))
            remarks += [f"{count:,} nodes, {engine}: {one}" for one in found.remarks]
    print_table(_PLAN, rows)
    for remark in remarks:
        click.echo(remark, err=True)


def _print_status(rows: list[dict[str, Any]]) -> None:
    links: list[tuple[object, ...]] = []
    hubs: list[tuple[object, ...]] = []
    channels: list[tuple[object, ...]] = []
    for row in rows:
        node = row["node"]
        for one in row["links"]:
            round_trip = "" if one["round_trip_ms"] is None else f"{one['round_trip_ms']:.1f} ms"
            sizes = (size(one[name]) for name in ("queued_bytes", "sent_bytes", "received_bytes"))
            links.append((node, one["node"], one["via"], lasted(one["since_s"]), round_trip, *sizes))
        for one in row["hubs"]:
            counts = (one["peers"], one["phantoms"], one["interest"], sum(one["lost"].values()))
            hubs.append((one["cluster"], one["hub"], node, len(one["nodes"]), *counts))
        for one in row["channels"]:
            channels.append((one["channel"], node, len(one["nodes"]), *(one[name] for name in _CHANNELS[3:])))
    print_table(_LINKS, links)
    click.echo()
    print_table(_HUBS, hubs)
    if channels:
        click.echo()
        print_table(_CHANNELS, channels)
    for row in rows:
        for one in _missing_links(row):
            click.echo(f"node {row['node']} has no link to {one['to']}: {one['why']}", err=True)
        for why, count in row["refused"].items():
            click.echo(f"node {row['node']}: {count} links refused: {why}", err=True)


def _missing_links(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the missing links; servers of older releases report only the state of each configured address."""
    listed = [{"to": one["address"], "why": one["why"]} for one in row["addresses"] if one["state"] == "not linked"]
    missing: list[dict[str, Any]] = row.get("missing", listed)
    return missing
