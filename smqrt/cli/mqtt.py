"""`smqrt retained` and `smqrt sessions`: what a hub keeps for its MQTT clients."""

from __future__ import annotations

from typing import Any

import click

from smqrt.cli.admin import (
    AdminClient,
    connection_options,
    duration_text,
    json_option,
    limit_option,
    print_remainder,
    print_table,
    size,
)
from smqrt.cli.terminal import InterruptibleCommand
from smqrt.printable import json_line

_RETAINED = ("topic", "qos", "bytes", "expires in", "payload")
_SESSIONS = ("client", "user", "state", "version", "subs", "in flight", "queued", "lost", "expiry")
_MAX_PAYLOAD_CHARS = 60

_hub_option = click.option("--hub", type=int, help="Number of the hub; required when several hubs accept MQTT clients.")


def _hub_of(client: AdminClient, hub: int | None) -> int:
    if hub is not None:
        return hub
    found = [one for one in client.get("hubs") if one.get("mqtt") is not None]
    if len(found) != 1:
        listed = ", ".join(f"{one['id']} ({one['app'] or one['made_at']})" for one in found)
        raise click.UsageError(f"select a hub with --hub. Hubs with MQTT clients: {listed or 'none'}.")
    return int(found[0]["id"])


def _print_items(listing: dict[str, Any]) -> None:
    for one in listing["items"]:
        click.echo(json_line(one))


# ---- `smqrt retained`


@click.group()
def retained() -> None:
    """List and delete the retained messages of a hub.

    FILTER is a topic filter of MQTT, such as "house/+/temp" or "house/#".
    """


@retained.command("list", cls=InterruptibleCommand)
@connection_options
@click.argument("filter", default="")
@_hub_option
@click.option("--after", metavar="TOPIC", help="Begin after this topic: the last one of the previous page.")
@limit_option
@json_option
def list_retained(
    client: AdminClient, filter: str, hub: int | None, after: str | None, limit: int, as_json: bool
) -> None:
    """List the retained messages that match FILTER, or all."""
    listing = client.get("mqtt-retained", hub=_hub_of(client, hub), filter=filter, after=after, limit=limit)
    if as_json:
        _print_items(listing)
        return
    rows = [
        (
            one["topic"],
            one["qos"],
            size(one["bytes"]),
            "" if one["expires_in_s"] is None else duration_text(one["expires_in_s"]),
            one["payload"][:_MAX_PAYLOAD_CHARS],
        )
        for one in listing["items"]
    ]
    print_table(_RETAINED, rows)
    print_remainder(listing)


@retained.command("delete", cls=InterruptibleCommand)
@connection_options
@click.argument("filter")
@_hub_option
def delete_retained(client: AdminClient, filter: str, hub: int | None) -> None:
    """Delete the retained messages that match FILTER.

    "#" deletes all but those of topics that begin with "$".
    """
    answer = client.post(f"hubs/{_hub_of(client, hub)}/mqtt-retained/delete", filter=filter)
    click.echo(f"deleted {answer['deleted']} retained messages")


# ---- `smqrt sessions`


@click.group()
def sessions() -> None:
    """List, disconnect and delete the sessions of MQTT clients.

    CLIENT is the client identifier of a session.
    """


@sessions.command("list", cls=InterruptibleCommand)
@connection_options
@_hub_option
@click.option(
    "--state",
    type=click.Choice(["offline", "connected", "all"]),
    default="all",
    show_default=True,
    help="Sessions without a connection, with one, or both.",
)
@click.option("--search", default="", help="Only sessions whose client identifier or user contains this text.")
@click.option("--after", metavar="CLIENT", help="Begin after this client: the last one of the previous page.")
@limit_option
@json_option
def list_sessions(
    client: AdminClient, hub: int | None, state: str, search: str, after: str | None, limit: int, as_json: bool
) -> None:
    """List the sessions of the MQTT clients of a hub."""
    number = _hub_of(client, hub)
    listing = client.get("mqtt-sessions", hub=number, state=state, search=search, after=after, limit=limit)
    if as_json:
        _print_items(listing)
        return
    rows = [
        (
            one["client_id"], one["user"], _state(one), one["version"], one["subscriptions"], one["in_flight"],
            one["waiting"], one["lost"], duration_text(one["expiry_s"]),
        )
        for one in listing["items"]
    ]  # fmt: skip
    print_table(_SESSIONS, rows)
    print_remainder(listing)


def _state(one: dict[str, Any]) -> str:
    if one["connected"]:
        return "connected"
    return "offline" if one["ends_in_s"] is None else f"ends in {duration_text(max(one['ends_in_s'], 0))}"


@sessions.command("disconnect", cls=InterruptibleCommand)
@connection_options
@click.argument("client_id", metavar="CLIENT")
@_hub_option
def disconnect_session(client: AdminClient, client_id: str, hub: int | None) -> None:
    """Disconnect an MQTT client. Its session is kept for its expiry."""
    answer = client.post(f"hubs/{_hub_of(client, hub)}/mqtt-sessions/disconnect", client=client_id)
    click.echo("disconnected" if answer["disconnected"] else "the client is not connected")


@sessions.command("delete", cls=InterruptibleCommand)
@connection_options
@click.argument("client_id", metavar="CLIENT")
@_hub_option
def delete_session(client: AdminClient, client_id: str, hub: int | None) -> None:
    """Disconnect an MQTT client, and delete its session with its subscriptions and messages."""
    client.post(f"hubs/{_hub_of(client, hub)}/mqtt-sessions/delete", client=client_id)
    click.echo("the session is deleted")
