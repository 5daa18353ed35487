"""Commands that use the admin listener of a server, and the health check.

On a terminal `top` redraws a page; in a pipe it prints lines. With `--json` every command prints JSON lines.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from importlib import resources
from time import monotonic, sleep
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from smqrt.cli.terminal import InterruptibleCommand
from smqrt.cluster.cost_model import ENGINES, Load
from smqrt.cluster.cost_model import plan as plan_of
from smqrt.errors import SmqrtError, StartError
from smqrt.printable import json_line, printable
from smqrt.settings.server_settings import Settings
from smqrt.settings.sources import Sources, settings_file
from smqrt.wire.smq import MAX_NODE

# ---- HTTP client of the admin listener

PASSWORD_VARIABLE = "SMQRT_ADMIN_PASSWORD"
TIMEOUT_S = 10.0
# Errors of servers, including older releases, for unknown paths.
_NO_SUCH_ADDRESS = ("There is no such address; /api/v1/ lists them.", "There is nothing to do at this address.")


class AdminError(SmqrtError):
    """The admin listener is unreachable or rejects the request."""


def connection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: add the options --url, --ca and --user, and pass the command an `AdminClient` made from them."""

    @wraps(command)
    def with_client(url: str | None, user: str | None, ca: str | None, **arguments: object) -> None:
        command(client=AdminClient(url, user, ca), **arguments)

    decorated: Callable[..., None] = with_client
    for option in (
        click.option(
            "--user",
            metavar="NAME",
            help=f"User to log in as. The password comes from {PASSWORD_VARIABLE}, else from a prompt.",
        ),
        click.option(
            "--ca",
            type=click.Path(exists=True, dir_okay=False),
            metavar="FILE",
            help="CA certificates, or the server's own certificate (PEM).  [default: the system's]",
        ),
        click.option(
            "--url", metavar="URL", help="URL of the admin listener.  [default: the running server of this user]"
        ),
    ):
        decorated = option(decorated)
    return decorated


class AdminClient:
    """HTTP client of an admin listener.

    Args:
        url: its URL; None for the server that this user started last on this machine.
        user: the user to log in as; None for no login.
        ca: file with CA certificates, or the server's own certificate; None for the system's. Not needed for a server
            of this user on this machine.

    Raises:
        AdminError: no server of this user is running, or the URL is invalid.
    """

    def __init__(self, url: str | None = None, user: str | None = None, ca: str | None = None) -> None:
        server = None if url else _choose_server()
        self.url = (url or str(server and server["url"])).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AdminError(f"--url {url} is not an HTTP URL. Example: http://127.0.0.1:9356/")
        pinned = server.get("certificate") if server else None  # of a server of this user, which may be self-signed
        self._connection = connection(parts, TIMEOUT_S, ca, str(pinned) if pinned else None)
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Accept": "application/json"}
        name = user or parts.username
        if name:
            password = parts.password or os.environ.get(PASSWORD_VARIABLE) or click.prompt("Password", hide_input=True)
            self._headers["Authorization"] = "Basic " + b64encode(f"{name}:{password}".encode()).decode()

    def get(self, path: str, **arguments: object) -> Any:
        """Return the JSON response of GET `/api/v1/PATH`. Raises AdminError."""
        with self._response(path, arguments) as response:
            return json.loads(response.read())

    def post(self, path: str, **body: object) -> Any:
        """Return the JSON response of POST `/api/v1/PATH` with a JSON body. Raises AdminError."""
        with self._response(path, {}, json.dumps(body)) as response:
            return json.loads(response.read())

    def lines(self, path: str, **arguments: object) -> Iterator[Any]:
        """Yield each JSON line of the response of GET `/api/v1/PATH` as it arrives. Raises AdminError."""
        with self._response(path, arguments) as response:
            if self._connection.sock is not None:
                self._connection.sock.settimeout(None)  # the next event may take hours
            while line := response.readline():
                if line.strip():
                    yield json.loads(line)

    def _response(self, path: str, arguments: dict[str, object], body: str | None = None) -> HTTPResponse:
        query = urlencode({name: value for name, value in arguments.items() if value not in (None, "")})
        target = f"{self._prefix}/api/v1/{path}" + (f"?{query}" if query else "")
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        try:
            self._connection.request("GET" if body is None else "POST", target, body, headers)
            response = self._connection.getresponse()
        except (OSError, HTTPException) as error:
            self._connection.close()
            is_untrusted = isinstance(error, ssl.SSLCertVerificationError)
            remedy = "Trust its certificate with --ca." if is_untrusted else "Is the server running?"
            raise AdminError(f"Cannot connect to {self.url}: {error}. {remedy}") from None
        if response.status == 200:
            return response
        data = response.read()
        if response.status == 401:
            raise AdminError(f"{self.url} requires a login. Pass --user with a user of the group admin.")
        try:
            error_text = str(json.loads(data)["error"])
        except (ValueError, KeyError, TypeError):
            error_text = f"{self.url} responded {response.status} {response.reason}."
        if response.status == 404 and error_text in _NO_SUCH_ADDRESS:
            error_text = f"The server at {self.url} runs an older release without {path}. Upgrade it first."
        raise AdminError(error_text)


def connection(parts: SplitResult, timeout_s: float, ca: str | None, pinned: str | None = None) -> HTTPConnection:
    """Return an HTTP connection to an admin listener, which connects at its first request.

    Args:
        parts: the URL.
        timeout_s: seconds for each step.
        ca: file with CA certificates; None for the system's.
        pinned: file with the only accepted certificate, for any host name; None for verification by `ca`.

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
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # accepts the server's own certificate without its issuer
    return HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)


def servers() -> list[dict[str, Any]]:
    """Return the servers of this user on this machine, the newest first: `url`, `pid` and `folder` of each."""
    from smqrt.operations.server import announced  # slow to import; `--help` and `--url` do not need it

    return announced()


def _choose_server() -> dict[str, Any]:
    """Return the server to use without `--url`, and print its address on standard error.

    With several servers, prompt on a terminal; elsewhere take the newest one that was started in this folder, or the
    newest of all.
    """
    found = servers()
    if not found:
        raise AdminError(
            "No server of this user is running on this machine. Pass --url, such as http://127.0.0.1:9356/."
        )
    names = [f"{one['url']}, process {one['pid']}, in {one['folder']}" for one in found]
    is_here = [one["folder"] == os.getcwd() for one in found]
    chosen = is_here.index(True) if any(is_here) else 0
    if len(found) > 1:
        click.echo("Servers of this user:", err=True)
        for number, name in enumerate(names, 1):
            click.echo(printable(f"  {number}  {name}"), err=True)
        if sys.stdin.isatty() and sys.stdout.isatty():
            chosen = click.prompt("Which one", type=click.IntRange(1, len(found)), default=chosen + 1, err=True) - 1
        else:
            which = "the newest that was started in this folder" if any(is_here) else "the newest"
            click.echo(f"Using {which}; choose another one with --url.", err=True)
    click.echo(printable(f"server {names[chosen]}"), err=True)
    return found[chosen]


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
_TOPIC_COLUMNS = ("name", "messages", "subscribers", "observers", "id")
_RATES_S = 1.0
"""The time between the two readings of `smqrt topics --rates`."""
_HUB_COLUMNS = ("hub", "app", "peers", "topics", "subs", "in/s", "out/s", "dropped", "queued", "refused")
_RIGHT_ALIGNED = {
    "connected", "subs", "received", "sent", "queued", "dropped", "subscribers", "observers", "peers", "topics",
    "in/s", "out/s", "refused", "round trip", "nodes", "clients", "phantoms", "interest", "lost", "in flight", "qos",
    "bytes", "messages", "messages/s",
}  # fmt: skip

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
limit_option = click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Maximum number of rows."
)
_HUB_HELP = "Number of the hub; required when there are several."


def size(count: float | None) -> str:
    """Return a number with a decimal prefix: 1.5M."""
    if count is None:
        return ""
    for unit in ("", "k", "M", "G"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if not unit or count >= 100 else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units: 3 d 4 h."""
    for unit_s, unit, below_s, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit} {seconds % unit_s // below_s:.0f} {below}"
    return f"{seconds:.0f} s"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table for the terminal; control characters in cells are escaped."""
    result = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        is_right = column in _RIGHT_ALIGNED
        result.add_column(column, justify="right" if is_right else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        result.add_row(*(Text(printable(str(cell))) for cell in row))
    return result


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on a terminal, tab-separated lines elsewhere."""
    if sys.stdout.isatty():
        Console().print(table(columns, rows))
        return
    for row in (columns, *rows):
        click.echo("\t".join(printable(str(cell)).replace("\t", "\\t") for cell in row))  # tabs separate columns


@click.command("servers")
@json_option
def list_servers(as_json: bool) -> None:
    """List the servers of this user on this machine, the newest first."""
    found = servers()
    if as_json:
        for one in found:
            click.echo(json_line(one))
        return
    print_table(_SERVER_COLUMNS, [[one[column] for column in _SERVER_COLUMNS] for one in found])


@click.command(cls=InterruptibleCommand)
@connection_options
@click.option("--hub", type=int, help="Only clients of the hub with this number.")
@click.option("--search", default="", help="Only clients whose uid, info, address, user or ETID contains this text.")
@click.option(
    "--sort",
    type=click.Choice(["dropped", "queued_bytes", "subscriptions", "newest"]),
    help="Sort by this, in descending order.",
)
@limit_option
@json_option
def peers(client: AdminClient, hub: int | None, search: str, sort: str | None, limit: int, as_json: bool) -> None:
    """List the clients of a running server."""
    listing = client.get("peers", hub=hub, search=search, sort=sort, limit=limit)
    if as_json:
        for one in listing["items"]:
            click.echo(json_line(one))
        return
    rows = [
        (
            one["id"], one["uid"], one["user"], one["address"], one["transport"], duration_text(one["connected_s"]),
            one["subscriptions"], size(one["bytes_received"]), size(one["bytes_sent"]), size(one["queued_bytes"]),
            one["dropped"],
        )
        for one in listing["items"]
    ]  # fmt: skip
    print_table(_PEER_COLUMNS, rows)
    print_remainder(listing)


@click.command(cls=InterruptibleCommand)
@connection_options
@click.option("--hub", type=int, help=_HUB_HELP)
@click.option("--search", default="", help="Only topics whose name contains this text.")
@click.option("--sort", type=click.Choice(["subscribers", "messages"]), help="Sort by this, in descending order.")
@limit_option
@click.option("--rates", is_flag=True, help="Count for a second, and show messages per second.")
@json_option
def topics(
    client: AdminClient, hub: int | None, search: str, sort: str | None, limit: int, rates: bool, as_json: bool
) -> None:
    """List the topics of a hub, in all workers of the server."""
    if not hub:
        by_key: dict[object, Any] = {}
        for one in client.get("hubs"):
            by_key.setdefault(one.get("key", one["id"]), one)  # the hubs of workers with the same key are one hub
        if len(by_key) != 1:
            listed = ", ".join(f"{one['id']} ({one['app'] or one['made_at']})" for one in by_key.values())
            raise click.UsageError(f"select a hub with --hub. Hubs of this server: {listed or 'none'}.")
        hub = int(next(iter(by_key.values()))["id"])
    read = partial(client.get, "topics", hub=hub, search=search, sort=sort, limit=limit)
    listing, columns = read(), list(_TOPIC_COLUMNS)
    if rates:
        before, began_s = {one["name"]: one["messages"] for one in listing["items"]}, monotonic()
        sleep(_RATES_S)
        listing, columns = read(), ["name", "messages/s", *_TOPIC_COLUMNS[1:]]
        elapsed_s = monotonic() - began_s
        for one in listing["items"]:
            count = one["messages"] - before.get(one["name"], one["messages"])
            one["messages/s"] = round(count / elapsed_s, 1)
    if as_json:
        for one in listing["items"]:
            click.echo(json_line(one))
        return
    print_table(columns, [[one[column] for column in columns] for one in listing["items"]])
    print_remainder(listing)


def print_remainder(listing: dict[str, Any]) -> None:
    """Print on standard error how many items of a list are not shown."""
    if listing["total"] > len(listing["items"]):
        click.echo(f"{len(listing['items'])} of {listing['total']} shown; see more with --limit or --search.", err=True)


@click.command(cls=InterruptibleCommand)
@connection_options
@click.option("--peer", default="", metavar="ID|UID", help="Trace this client; `smqrt peers` lists the IDs.")
@click.option("--topic", default="", help="Trace the messages of this topic.")
@click.option("--hub", type=int, help=_HUB_HELP)
@click.option("--count", type=click.IntRange(1), help="Exit after this many events.")
@json_option
def trace(client: AdminClient, peer: str, topic: str, hub: int | None, count: int | None, as_json: bool) -> None:
    """Show the events of a client or a topic, live.

    Pass --peer or --topic. The trace runs until Ctrl-C.
    """
    if bool(peer) == bool(topic):
        raise click.UsageError("pass either --peer or --topic.")
    seen = 0
    for event in client.lines("trace", peer=peer, topic=topic, hub=hub):
        if event["event"] == "tracing":
            click.echo("Tracing; stop with Ctrl-C.", err=True)
            continue
        click.echo(json_line(event) if as_json else trace_line(event))
        seen += 1
        if seen == count:
            return


def trace_line(event: dict[str, Any]) -> str:
    """Return an event of a trace as a line of text."""
    client = ("to " if event.get("sent") else "") + (printable(str(event.get("uid", ""))) or str(event.get("etid", "")))
    time_of_day = event.get("time", "")[11:23]  # of an ISO time, with milliseconds
    parts = [time_of_day, f"{event['event']:11}", client]
    if "topic" in event:
        parts.append(printable(str(event["topic"])) + (f" / {event['subtopic']}" if event.get("subtopic") else ""))
    parts += [f"{name} {event[name]}" for name in ("id", "qos", "version", "will") if name in event]
    if "keepalive_s" in event:
        parts.append(f"keep-alive {event['keepalive_s']} s")
    if "bytes" in event:
        parts.append(f"{event['bytes']} bytes")
    parts += [
        str(event[name]) for name in ("flags", "code", "codes", "reason", "detail", "info", "events") if event.get(name)
    ]
    if "payload" in event:
        parts.append(json_line(event["payload"]))
    return printable("  ".join(filter(None, parts)))


@click.command()
def dashboard() -> None:
    """Print a Grafana dashboard, as JSON to import."""
    click.echo(resources.files("smqrt.operations").joinpath("grafana.json").read_text("utf-8"), nl=False)


# ---- `smqrt top`


@click.command(cls=InterruptibleCommand)
@connection_options
@click.option(
    "--interval", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, help="Seconds between updates."
)
@click.option("--count", type=click.IntRange(1), help="Exit after this many updates.")
@json_option
def top(client: AdminClient, interval: float, count: int | None, as_json: bool) -> None:
    """Show the load of a running server, live.

    On a terminal, the command shows a page until Ctrl-C. In a pipe, it prints one line per update.
    """
    view = _Top(client)
    if as_json or not sys.stdout.isatty():
        for number in range(count or sys.maxsize):
            if number:
                sleep(interval)
            server, hubs = view.fetch()
            click.echo(json_line({"server": server, "hubs": hubs}) if as_json else view.line(server, hubs))
        return
    # With --count the last page stays on the screen.
    with Live(console=Console(), screen=count is None, auto_refresh=False) as live:
        for number in range(count or sys.maxsize):
            if number:
                sleep(interval)
            live.update(view.page(*view.fetch()), refresh=True)


class _Top:
    """The views of `top`; stores the previous counters to compute rates."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client
        self._last: dict[str, tuple[float, float]] = {}

    def fetch(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the server and its hubs, with rates."""
        server, hubs = self._client.get("server"), self._client.get("hubs")
        at_s = monotonic()
        server["cpu_percent"] = self._rate("cpu", server["cpu_s"] * 100, at_s)
        for one in hubs:
            for name in ("messages", "copies"):
                if name in one:
                    one[f"{name}_per_s"] = self._rate(f"{one['id']} {name}", one[name], at_s)
        return server, hubs

    def _rate(self, name: str, value: float, at_s: float) -> float | None:
        """Return the increase of a counter per second since the last call; None at the first call."""
        before, then_s = self._last.get(name, (None, at_s))
        self._last[name] = value, at_s
        return None if before is None or at_s <= then_s else round((value - before) / (at_s - then_s), 1)

    def line(self, server: dict[str, Any], hubs: list[dict[str, Any]]) -> str:
        """Return a summary in one line."""
        cpu = "" if server["cpu_percent"] is None else f" cpu {server['cpu_percent']:.0f} %"
        dropped = sum(sum(one["drops"].values()) for one in hubs)
        return (
            f"{server['phase']} up {duration_text(server['uptime_s'])}{cpu} memory {size(server['memory_bytes'])} "
            f"lag {server['loop_lag_worst_s'] * 1000:.0f} ms connections {server['connections']} "
            f"peers {server['peers']} dropped {dropped} queued {size(server['queued_bytes'])}"
        )

    def page(self, server: dict[str, Any], hubs: list[dict[str, Any]]) -> Group:
        """Return the page for the terminal."""
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
        return Group(*parts, Text(), table(_HUB_COLUMNS, rows), Text("Stop with Ctrl-C.", "dim"))


# ---- `smqrt cluster`

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
        raise AdminError(
            f"{client.url} is not in a cluster: clients can't reconnect elsewhere. Stop the server instead."
        )
    if node is not None and node not in numbers:
        own = ", ".join(map(str, numbers))
        raise AdminError(f"{client.url} is node {own}, not {node}. Select the server with --url; see smqrt servers.")
    # A server with several clusters has a node number in each; links to itself do not count.
    if not undo and not {link["node"] for row in rows for link in row["links"]} - set(numbers):
        raise AdminError("no other node is linked: clients can't reconnect elsewhere. See smqrt cluster status.")
    client.post("drain", on=not undo)
    if undo:
        click.echo("the node accepts clients again")
        return
    deadline_s = monotonic() + wait_s
    while (left := client.get("server")["peers"]) and monotonic() < deadline_s:
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
    "--nodes-per-topic", type=float, default=1.0, show_default=True, help="Nodes with subscribers to each topic."
)
@click.option(
    "--messages-per-s",
    type=float,
    default=100_000.0,
    show_default=True,
    help="Messages published per second, on all nodes.",
)
@click.option(
    "--payload-bytes", type=click.IntRange(0), default=128, show_default=True, help="Payload of a message, in bytes."
)
@click.option(
    "--subscribers", type=float, default=10.0, show_default=True, help="Subscribers of each message, on all nodes."
)
def plan(nodes: tuple[int, ...], **load: Any) -> None:
    """Estimate memory, CPU and network of each node of a cluster.

    The estimate uses measured costs of both engines, mesh and NATS.
    """
    rows, remarks = [], []
    for count in nodes:
        for engine, costs in ENGINES.items():
            estimate = plan_of(Load(nodes=count, **load), costs)
            shares = (f"{share:.1%}" for share in (*estimate.cpu.values(), sum(estimate.cpu.values())))
            sent = f"{size(estimate.sent_bytes_per_s)}/s"
            rows.append((count, engine, size(estimate.memory_bytes), *shares, sent, f"{estimate.join_s:.1f} s"))
            remarks += [f"{count:,} nodes, {engine}: {one}" for one in estimate.remarks]
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
            links.append((node, one["node"], one["via"], duration_text(one["since_s"]), round_trip, *sizes))
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


# ---- `smqrt health`

DEFAULT_PORT = 9356
_SHOWN_BYTES = 300  # of the response


@click.command()
@click.option("--ready", is_flag=True, help="Also check that all applications are loaded and no shutdown has begun.")
@click.option("--url", metavar="URL", help="URL of the admin listener.  [default: from the settings]")
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="CA certificates, or the server's own certificate (PEM).  [default: the system's]",
)
@click.option("--timeout", "timeout_s", default=3.0, show_default=True, help="Seconds to wait for the response.")
def health(ready: bool, url: str | None, ca: str | None, timeout_s: float) -> None:
    """Check whether the server is running.

    Sends a request to the admin listener. Its address comes from the settings of the server (SMQRT_ADMIN__PORT,
    smqrt.toml). Exit code 0 when the server is healthy, else 1.
    """
    pinned = None
    if url:
        base = url
    else:
        from smqrt.server.listeners import admin_files  # slow to import, and --url does not need it

        settings: Settings = Sources(environment=os.environ, file=settings_file()).read().settings
        admin = settings.admin
        if not admin.enabled:
            raise StartError(
                "the admin listener is disabled: set admin.enabled = true, or name another server with --url."
            )
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)  # all addresses: use loopback
        files = admin_files(settings)
        if files:
            pinned = files.pairs[0][0]
        base = f"{'https' if files else 'http'}://{f'[{host}]' if ':' in host else host}:{admin.port or DEFAULT_PORT}"
    try:
        status, text = fetch(base, "/readyz" if ready else "/healthz", timeout_s, ca, pinned)
    except (OSError, http.client.HTTPException) as error:
        click.echo(f"{base} does not respond: {error or type(error).__name__}")
        sys.exit(1)
    click.echo(printable(" ".join(text.split())) or str(status))
    sys.exit(0 if status == 200 else 1)


def fetch(base: str, path: str, timeout_s: float, ca: str | None = None, pinned: str | None = None) -> tuple[int, str]:
    """Return status and text of a page; `ca` and `pinned` are as in `connection`.

    Raises:
        StartError: `base` is not an HTTP URL.
        OSError: no connection, or no response in time.
        http.client.HTTPException: the response is not HTTP.
    """
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartError(f"--url {base!r}: not an HTTP URL. Example: http://127.0.0.1:{DEFAULT_PORT}")
    http_connection = connection(parts, timeout_s, ca, pinned)
    try:
        http_connection.request("GET", parts.path.rstrip("/") + path)  # a reverse proxy may add a path
        response = http_connection.getresponse()
        return response.status, response.read(_SHOWN_BYTES).decode("utf-8", "replace")
    finally:
        http_connection.close()
