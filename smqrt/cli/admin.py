"""`smqrt servers`, `top`, `peers`, `topics` and `trace`: a running server as its operator sees it.

On a terminal `top` is live; piped, it writes lines. With `--json` each answer is a line of JSON.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from importlib import resources
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from smqrt.cli.terminal import InterruptibleCommand
from smqrt.errors import SmqrtError
from smqrt.printable import json_line, printable

# ---- The admin listener of a server, asked by commands: where it is, how one logs in, and what it answers.

PASSWORD_VARIABLE = "SMQRT_ADMIN_PASSWORD"
TIMEOUT_S = 10.0
_NO_SUCH_ADDRESS = ("There is no such address; /api/v1/ lists them.", "There is nothing to do at this address.")
"""What servers, those of older releases too, say of addresses that they don't know."""


class AdminError(SmqrtError):
    """The admin listener can't be asked, or refuses; one sentence."""


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: the options that say which server, and as whom; the command gets an `AdminClient` in place of them."""

    @wraps(command)
    def with_client(url: str | None, user: str | None, ca: str | None, **arguments: object) -> None:
        command(client=AdminClient(url, user, ca), **arguments)

    asking: Callable[..., None] = with_client
    for add in (
        click.option(
            "--user", metavar="NAME", help=f"Log in; the password is asked for, or is in {PASSWORD_VARIABLE}."
        ),
        click.option(
            "--ca",
            type=click.Path(exists=True, dir_okay=False),
            metavar="FILE",
            help="Authorities of its certificate, or the certificate itself.  [default: those of this machine]",
        ),
        click.option(
            "--url", metavar="URL", help="Of the admin listener.  [default: the server of this user on this machine]"
        ),
    ):
        asking = add(asking)
    return asking


class AdminClient:
    """Asks an admin listener.

    Args:
        url: where it is; None for the server that this user started last on this machine.
        user: who logs in; None for nobody.
        ca: file with the authorities of its certificate, or the certificate itself; None for those of this machine. A
            server of this user on this machine needs none.

    Raises:
        AdminError: there is no such server.
    """

    def __init__(self, url: str | None = None, user: str | None = None, ca: str | None = None) -> None:
        own = None if url else _own_server()
        self.url = (url or str(own and own["url"])).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AdminError(f"--url {url} is no URL of an admin listener; it is like http://127.0.0.1:9356/")
        pinned = own.get("certificate") if own else None
        self._connection = connection(parts, TIMEOUT_S, ca, str(pinned) if pinned else None)
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Accept": "application/json"}
        name = user or parts.username
        if name:
            password = parts.password or os.environ.get(PASSWORD_VARIABLE) or click.prompt("Password", hide_input=True)
            self._headers["Authorization"] = "Basic " + b64encode(f"{name}:{password}".encode()).decode()

    def get(self, path: str, **arguments: object) -> Any:
        """Returns what `/api/v1/PATH` answers. Raises AdminError."""
        with self._answer(path, arguments) as answer:
            return json.loads(answer.read())

    def post(self, path: str, **body: object) -> Any:
        """Has `/api/v1/PATH` do what the body says, and returns what it answers. Raises AdminError."""
        with self._answer(path, {}, json.dumps(body)) as answer:
            return json.loads(answer.read())

    def lines(self, path: str, **arguments: object) -> Iterator[Any]:
        """Yields each line that `/api/v1/PATH` answers, as they come. Raises AdminError."""
        with self._answer(path, arguments) as answer:
            if self._connection.sock is not None:
                self._connection.sock.settimeout(None)
            while line := answer.readline():
                if line.strip():
                    yield json.loads(line)

    def _answer(self, path: str, arguments: dict[str, object], body: str | None = None) -> HTTPResponse:
        query = urlencode({name: value for name, value in arguments.items() if value not in (None, "")})
        target = f"{self._prefix}/api/v1/{path}" + (f"?{query}" if query else "")
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        try:
            self._connection.request("GET" if body is None else "POST", target, body, headers)
            answer = self._connection.getresponse()
        except (OSError, HTTPException) as error:
            self._connection.close()
            is_distrusted = isinstance(error, ssl.SSLCertVerificationError)
            remedy = "name whom to trust with --ca." if is_distrusted else "is the server running?"
            raise AdminError(f"{self.url} can't be asked: {error}; {remedy}") from None
        if answer.status == 200:
            return answer
        data = answer.read()
        if answer.status == 401:
            raise AdminError(f"{self.url} asks for a login: give --user, of the group admin.")
        try:
            why = str(json.loads(data)["error"])
        except (ValueError, KeyError, TypeError):
            why = f"{self.url} answered {answer.status} {answer.reason}."
        if answer.status == 404 and why in _NO_SUCH_ADDRESS:
            why = f"The server at {self.url} is of an older release, which does not know {path}; upgrade it first."
        raise AdminError(why)


def connection(parts: SplitResult, timeout_s: float, ca: str | None, pinned: str | None = None) -> HTTPConnection:
    """Returns a connection to an admin listener, that is not made yet.

    Args:
        parts: of its URL.
        timeout_s: seconds that each step may take.
        ca: file with the authorities of its certificate; None for those of this machine.
        pinned: file with the one certificate that it shows, whatever name that is for; None for any good one.

    Raises:
        AdminError: a file can't be read.
    """
    host = parts.hostname or ""
    if parts.scheme != "https":
        return HTTPConnection(host, parts.port, timeout=timeout_s)
    context = ssl.create_default_context()
    try:
        if pinned and not ca:
            context = ssl.create_default_context(cafile=pinned)
            context.check_hostname = False
        elif ca:
            context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise AdminError(f"{ca or pinned} can't be read as certificates: {error}") from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate that is named is trusted as it is
    return HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)


def servers() -> list[dict[str, Any]]:
    """Return the servers of this user on this machine, the newest first: `url`, `pid` and `folder` of each."""
    from smqrt.operations.server import announced  # here: `--help` needs none of it

    return announced()


def _own_server() -> dict[str, Any]:
    """The server that is meant without `--url`. It is named on the error output; with several a person is asked, and a
    script gets the newest.
    """
    found = servers()
    if not found:
        raise AdminError("No server of this user runs on this machine; give --url, such as http://127.0.0.1:9356/.")
    chosen = 0
    if len(found) > 1:
        click.echo("Servers of this user:", err=True)
        for number, one in enumerate(found, 1):
            click.echo(printable(f"  {number}  {_shown(one)}"), err=True)
        if sys.stdin.isatty() and sys.stdout.isatty():
            chosen = click.prompt("Which one", type=click.IntRange(1, len(found)), default=1, err=True) - 1
        else:
            click.echo("The newest is asked; --url names another.", err=True)
    click.echo(printable(f"server {_shown(found[chosen])}"), err=True)
    return found[chosen]


def _shown(server: dict[str, Any]) -> str:
    return f"{server['url']}, process {server['pid']}, in {server['folder']}"


_PEER_COLUMNS = (
    "id",
    "uid",
    "user",
    "address",
    "transport",
    "connected",
    "subs",
    "received",
    "sent",
    "queued",
    "dropped",
)
_SERVER_COLUMNS = ("url", "pid", "folder")
_TOPIC_COLUMNS = ("name", "subscribers", "observers", "id")
_HUB_COLUMNS = ("hub", "app", "peers", "topics", "subs", "in/s", "out/s", "dropped", "queued", "refused")
_RIGHT = {"connected", "subs", "received", "sent", "queued", "dropped", "subscribers", "observers", "peers", "topics",
          "in/s", "out/s", "refused", "round trip", "nodes", "clients", "phantoms", "interest", "lost"}  # fmt: skip

json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON, an object in each line.")
_limit = click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="How many.")


def size(count: float | None) -> str:
    """Returns a number of bytes, or of anything, in few characters: 1.5M."""
    if count is None:
        return ""
    for unit in ("", "k", "M", "G"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if not unit or count >= 100 else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def lasted(seconds: float) -> str:
    """Returns a time in few characters: 3 d 4 h."""
    for unit_s, unit, below_s, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit} {seconds % unit_s // below_s:.0f} {below}"
    return f"{seconds:.0f} s"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Returns a table for the terminal; what strangers wrote in it steers no terminal."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        shown.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        shown.add_row(*(Text(printable(str(cell))) for cell in row))
    return shown


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    if sys.stdout.isatty():
        Console().print(table(columns, rows))
        return
    for row in (columns, *rows):
        click.echo("\t".join(printable(str(cell)).replace("\t", "\\t") for cell in row))  # a tab would shift columns


@click.command("servers")
@json_option
def servers_(as_json: bool) -> None:
    """List the servers of this user on this machine, the newest first."""
    found = servers()
    if as_json:
        for one in found:
            click.echo(json_line(one))
        return
    print_table(_SERVER_COLUMNS, [[one[column] for column in _SERVER_COLUMNS] for one in found])


@click.command(cls=InterruptibleCommand)
@connection_options
@click.option("--hub", type=int, help="Only of this hub.")
@click.option("--search", default="", help="Only those whose uid, info, address, user or ETID holds this.")
@click.option(
    "--sort", type=click.Choice(["dropped", "queued_bytes", "subscriptions", "newest"]), help="The largest first."
)
@_limit
@json_option
def peers(client: AdminClient, hub: int | None, search: str, sort: str | None, limit: int, as_json: bool) -> None:
    """List the clients of a running server."""
    found = client.get("peers", hub=hub, search=search, sort=sort, limit=limit)
    if as_json:
        for one in found["items"]:
            click.echo(json_line(one))
        return
    print_table(_PEER_COLUMNS, [_peer_row(one) for one in found["items"]])
    _tell_rest(found)


def _peer_row(one: dict[str, Any]) -> tuple[object, ...]:
    return (
        one["id"], one["uid"], one["user"], one["address"], one["transport"], lasted(one["connected_s"]),
        one["subscriptions"], size(one["bytes_received"]), size(one["bytes_sent"]), size(one["queued_bytes"]),
        one["dropped"],
    )  # fmt: skip


@click.command(cls=InterruptibleCommand)
@connection_options
@click.option("--hub", type=int, help="Of this hub; needed when there are several.")
@click.option("--search", default="", help="Only those whose name holds this.")
@click.option("--sort", type=click.Choice(["subscribers"]), help="The largest first.")
@_limit
@json_option
def topics(client: AdminClient, hub: int | None, search: str, sort: str | None, limit: int, as_json: bool) -> None:
    """List the topics of a hub."""
    found = client.get("topics", hub=hub or _only_hub(client), search=search, sort=sort, limit=limit)
    if as_json:
        for one in found["items"]:
            click.echo(json_line(one))
        return
    print_table(_TOPIC_COLUMNS, [[one[column] for column in _TOPIC_COLUMNS] for one in found["items"]])
    _tell_rest(found)


def _only_hub(client: AdminClient) -> int:
    hubs = client.get("hubs")
    if len(hubs) != 1:
        listed = ", ".join(f"{one['id']} ({one['app'] or one['made_at']})" for one in hubs)
        raise click.UsageError(f"Which hub? Give --hub; there are: {listed or 'none'}.")
    return int(hubs[0]["id"])


def _tell_rest(found: dict[str, Any]) -> None:
    if found["total"] > len(found["items"]):
        click.echo(f"{len(found['items'])} of {found['total']}; --limit and --search show others.", err=True)


@click.command(cls=InterruptibleCommand)
@connection_options
@click.option("--peer", default="", metavar="ID|UID", help="What this client does; `smqrt peers` lists the IDs.")
@click.option("--topic", default="", help="What goes through this topic.")
@click.option("--hub", type=int, help="Of this hub; needed when there are several.")
@click.option("--count", type=click.IntRange(1), help="End after so many events.")
@json_option
def trace(client: AdminClient, peer: str, topic: str, hub: int | None, count: int | None, as_json: bool) -> None:
    """Show what a client does, or what goes through a topic, while it happens."""
    if bool(peer) == bool(topic):
        raise click.UsageError("Give --peer or --topic, one of both.")
    seen = 0
    for event in client.lines("trace", peer=peer, topic=topic, hub=hub):
        if event["event"] == "tracing":
            click.echo("Tracing; Ctrl-C ends.", err=True)
            continue
        click.echo(json_line(event) if as_json else trace_line(event))
        seen += 1
        if seen == count:
            return


def trace_line(event: dict[str, Any]) -> str:
    """Returns an event of a trace as a line for people."""
    who = printable(str(event.get("uid", ""))) or str(event.get("etid", ""))
    parts = [event.get("time", "")[11:23], f"{event['event']:11}", who]
    if "topic" in event:
        parts.append(printable(str(event["topic"])) + (f" / {event['subtopic']}" if event.get("subtopic") else ""))
    if "bytes" in event:
        parts.append(f"{event['bytes']} bytes")
    parts += [str(event[name]) for name in ("reason", "detail", "info", "events") if event.get(name)]
    if "payload" in event:
        parts.append(json_line(event["payload"]))
    return printable("  ".join(filter(None, parts)))


@click.command()
def dashboard() -> None:
    """Print a dashboard for Grafana, as JSON."""
    click.echo(resources.files("smqrt.operations").joinpath("grafana.json").read_text("utf-8"), nl=False)


# ---- top


@click.command(cls=InterruptibleCommand)
@connection_options
@click.option("--interval", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, help="Seconds between.")
@click.option("--count", type=click.IntRange(1), help="So often, and then end.")
@json_option
def top(client: AdminClient, interval: float, count: int | None, as_json: bool) -> None:
    """Show how a running server does, live."""
    view = _Top(client)
    if as_json or not sys.stdout.isatty():
        for number in range(count or sys.maxsize):
            if number:
                time.sleep(interval)
            server, hubs = view.look()
            click.echo(json_line({"server": server, "hubs": hubs}) if as_json else view.line(server, hubs))
        return
    with Live(console=Console(), screen=count is None, auto_refresh=False) as live:
        for number in range(count or sys.maxsize):
            if number:
                time.sleep(interval)
            live.update(view.shown(*view.look()), refresh=True)


class _Top:
    """What `top` shows; remembers the counters of the last look for the rates."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client
        self._last: dict[str, tuple[float, float]] = {}

    def look(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Returns the server and its hubs, with rates."""
        server, hubs = self._client.get("server"), self._client.get("hubs")
        at_s = time.monotonic()
        server["cpu_percent"] = self._rate("cpu", server["cpu_s"] * 100, at_s)
        for one in hubs:
            for name in ("messages", "copies"):
                if name in one:
                    one[f"{name}_per_s"] = self._rate(f"{one['id']} {name}", one[name], at_s)
        return server, hubs

    def _rate(self, name: str, value: float, at_s: float) -> float | None:
        before, then_s = self._last.get(name, (None, at_s))
        self._last[name] = value, at_s
        return None if before is None or at_s <= then_s else round((value - before) / (at_s - then_s), 1)

    def line(self, server: dict[str, Any], hubs: list[dict[str, Any]]) -> str:
        """Returns all in a line."""
        cpu = "" if server["cpu_percent"] is None else f" cpu {server['cpu_percent']:.0f} %"
        dropped = sum(sum(one["drops"].values()) for one in hubs)
        return (
            f"{server['phase']} up {lasted(server['uptime_s'])}{cpu} memory {size(server['memory_bytes'])} "
            f"lag {server['loop_lag_worst_s'] * 1000:.0f} ms connections {server['connections']} "
            f"peers {server['peers']} dropped {dropped} queued {size(server['queued_bytes'])}"
        )

    def shown(self, server: dict[str, Any], hubs: list[dict[str, Any]]) -> Group:
        """Returns all as a page for the terminal."""
        rows = [
            (
                one["id"], one["app"] or one["made_at"], one["peers"], one["topics"], one["subscriptions"],
                size(one.get("messages_per_s")), size(one.get("copies_per_s")), sum(one["drops"].values()),
                size(one["queued_bytes"]), sum(one["refused"].values()),
            )
            for one in sorted(hubs, key=lambda one: -one["peers"])
        ]  # fmt: skip
        parts: list[Any] = [Text(self.line(server, hubs), "bold")]
        parts += [Text(one, "yellow") for one in server["obstacles"]]
        return Group(*parts, Text(), table(_HUB_COLUMNS, rows), Text("Ctrl-C ends.", "dim"))
