"""Client connections of commands: options, credentials, exit codes.

Exit codes: 0 success, 1 no connection or connection lost, 2 wrong usage, 3 rejected by the broker, 4 timeout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit, urlunsplit

import click
import gevent
from gevent.queue import Empty, Queue

from smqrt.client import ConnectionEnd, SmqClient
from smqrt.errors import ArgumentError
from smqrt.printable import printable
from smqrt.wire.smq import ConnackCode

PAGES = ("smq.lsp", "smq")  # of Lua and Python applications
CREDENTIALS_VARIABLE = "SMQRT_CREDENTIALS"

Item = TypeVar("Item")
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Failure(click.ClickException):
    """A connection error: one sentence for the terminal, and an exit code."""

    exit_code = 1

    def format_message(self) -> str:
        """See `click.ClickException.format_message`; escapes control characters in the broker's text."""
        return printable(self.message, lines=True)


class RejectedByBroker(Failure):
    """The broker rejected the client or its request."""

    exit_code = 3


class TimedOut(Failure):
    """The expected messages did not arrive in time."""

    exit_code = 4


def failure(end: ConnectionEnd | None, address: str = "", url: str = "") -> Failure:
    """Return the error for a close reason; its text names the `url` of the user in place of `address`."""
    if end is None:
        return Failure("no connection")
    if end.word == "nonsmq":
        return Failure(f"{end}. Use the URL of the page that connects clients, such as {PAGES[0]}.")
    if end.code == ConnackCode.BAD_CREDENTIALS:
        return RejectedByBroker(f"{end}; give --user, and the password in {CREDENTIALS_VARIABLE} or --credentials-file")
    text = str(end).replace(address, url) if address else str(end)
    if end.word == "socketclosed" and url.startswith(("http:", "ws:")):
        text += "; if the server uses TLS on this port, the URL begins with https:// or wss://"
    return RejectedByBroker(text) if end.code else Failure(text)


_OPTIONS = (
    click.option(
        "--uid", help="Unique client ID, 6 to 255 bytes. The broker closes an older connection with the same ID."
    ),
    click.option("--info", help="Text about this client for the broker's application."),
    click.option("--user", help="User to log in as. The password comes from the credentials, else from a prompt."),
    click.option(
        "--credentials-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help=f"File with the credentials.  [default: the variable {CREDENTIALS_VARIABLE}]",
    ),
    click.option(
        "--cafile",
        type=click.Path(exists=True, dir_okay=False),
        help="CA certificates to trust.  [default: the system's]",
    ),
    click.option("--insecure", is_flag=True, help="Accept any certificate."),
    click.option(
        "--connect-timeout", type=float, default=5.0, show_default=True, help="Seconds to establish the connection."
    ),
)


class ConnectionOptions(TypedDict, total=False):
    """Values of the options of `connection_options`, see their help texts; `connect_timeout` is in seconds."""

    uid: str | None
    user: str | None
    info: str | None
    credentials_file: Path | None
    cafile: str | None
    insecure: bool
    connect_timeout: float


def connection_options(command: _Command) -> _Command:
    """Decorator: add the options of `open_client`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def open_client(url: str, reconnect_delay_s: float | None = None, **connection: Unpack[ConnectionOptions]) -> SmqClient:
    """Return a connected client.

    The client does not reconnect automatically. Its `onclose` may request a reconnect after `reconnect_delay_s`.

    Args:
        url: the broker, or an application, see `addresses`.
        reconnect_delay_s: seconds before a reconnect; None for the client's default.
        connection: values of the options of `connection_options`.

    Raises:
        Failure: no connection, or the broker rejected it.
        click.UsageError: an invalid URL or option.
    """
    gevent.get_hub().NOT_ERROR += (KeyboardInterrupt,)  # otherwise gevent prints a traceback for it
    # Options that are not given keep the defaults of `SmqClient`.
    options = {"reconnect_delay": reconnect_delay_s, "uid": connection.get("uid")}
    options |= {"info": connection.get("info"), "cafile": connection.get("cafile")}
    credentials = credentials_for(connection)
    url_end: ConnectionEnd | None = None
    for address in addresses(url):
        try:
            client = SmqClient(
                address,
                {name: value for name, value in options.items() if value is not None},
                verify=not connection.get("insecure"),
                timeout=connection.get("connect_timeout", 5.0),
                reconnect=False,
                onclose=lambda word, can_reconnect: False,  # the error of this command has the reason
                onauth=lambda rnd, ip: credentials,
            )
        except ArgumentError as error:
            raise click.UsageError(str(error)) from None
        if client.wait_connected():
            return client
        if client.end is None or client.end.word != "nonsmq":  # "nonsmq": try the next page
            raise failure(client.end, address, url)
        if address == url:
            url_end = client.end
    raise failure(url_end)


def received(messages: Queue[Item | Failure], count: int | None, timeout_s: float | None) -> Iterator[Item]:
    """Yield items of a queue until `count` items have arrived or `timeout_s` seconds have passed; None for no limit.

    Raises:
        TimedOut: fewer than `count` items arrived.
        Failure: an item of the queue.
    """
    end_s = None if timeout_s is None else monotonic() + timeout_s
    number = 0
    while number != count:
        left_s = None if end_s is None else end_s - monotonic()
        try:
            if left_s is not None and left_s <= 0:
                raise Empty
            message = messages.get(timeout=left_s)
        except Empty:
            break
        if isinstance(message, Failure):
            raise message
        yield message
        number += 1
    if count is not None and number < count:
        raise TimedOut(f"{number} of {count} messages received within {timeout_s:g} seconds")


def addresses(url: str) -> list[str]:
    """Return the addresses to try for a URL, in order.

    For the URL of an application, the conventional pages that connect clients come first: `smq.lsp` in Lua
    applications, `smq` in Python applications. The URL itself comes last, because a request for it runs the
    application's index page.
    """
    parts = urlsplit(url)
    name = parts.path.rpartition("/")[2]
    if "." in name:  # a page
        return [url]
    folder = parts.path if parts.path.endswith("/") else f"{parts.path}/"
    pages = [urlunsplit(parts._replace(path=folder + page)) for page in PAGES]
    return [url, *pages] if name in PAGES else [*pages, url]


def credentials_for(connection: ConnectionOptions) -> bytes:
    """Return the credentials of a client: those of the file or the variable; with `--user`, "user:credentials".

    Raises:
        click.UsageError: there is no password, and no terminal for a prompt.
    """
    file, user = connection.get("credentials_file"), connection.get("user")
    if file is not None:
        credentials = file.read_bytes().rstrip(b"\r\n")  # editors add a line end
    else:
        credentials = os.environb.get(CREDENTIALS_VARIABLE.encode(), b"")  # they may be binary
    if user is None:
        return credentials
    if not credentials:
        if not sys.stdin.isatty():
            raise click.UsageError(f"--user needs a password in {CREDENTIALS_VARIABLE} or --credentials-file")
        credentials = click.prompt(f"Password of {user}", hide_input=True, err=True).encode()
    return user.encode() + b":" + credentials


def topic_of(text: str, is_id: bool) -> str | int:
    """Return the topic of an argument: its name, or with `--id` its number.

    Raises:
        click.UsageError: `--id` without a number.
    """
    if not is_id:
        return text
    try:
        return int(text)
    except ValueError:
        raise click.UsageError(f"{text!r} must be a number with --id") from None
