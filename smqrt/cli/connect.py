"""Connections of the commands: their options, and their ends as exit codes.

Exit codes: 0 done, 1 no connection or a lost one, 2 called wrongly, 3 refused by the broker, 4 time ran out.
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

PAGES = ("smq.lsp", "smq")
CREDENTIALS_VARIABLE = "SMQRT_CREDENTIALS"

Item = TypeVar("Item")
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Failure(click.ClickException):
    """One sentence for the terminal, and the exit code for scripts."""

    exit_code = 1

    def format_message(self) -> str:
        """See `click.ClickException.format_message`; the broker's own words are in it."""
        return printable(self.message, lines=True)


class RefusedByBroker(Failure):
    """The broker said no."""

    exit_code = 3


class TimeRanOut(Failure):
    """What was waited for did not come."""

    exit_code = 4


def failure(end: ConnectionEnd | None, address: str = "", url: str = "") -> Failure:
    """The failure that the end of a connection to `address` means; it names the `url` that the user gave."""
    if end is None:
        return Failure("no connection")
    if end.word == "nonsmq":
        return Failure(f"{end}; name the page that connects clients, such as {PAGES[0]}")
    return RefusedByBroker(str(end)) if end.code else Failure(str(end).replace(address, url) if address else str(end))


_OPTIONS = (
    click.option(
        "--uid", help="The client's own identity, 6 to 255 bytes; the same uid takes over the older connection."
    ),
    click.option("--info", help="Text about this client for the broker's application."),
    click.option(
        "--user",
        help="Log in as this user. The password is what the credentials hold, or it is asked for.",
    ),
    click.option(
        "--credentials-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help=f"File with the credentials; the variable {CREDENTIALS_VARIABLE} holds them otherwise.",
    ),
    click.option(
        "--cafile", type=click.Path(exists=True, dir_okay=False), help="Certificates to trust instead of the system's."
    ),
    click.option("--insecure", is_flag=True, help="Accept any certificate."),
    click.option(
        "--connect-timeout", type=float, default=5.0, show_default=True, help="Seconds for making the connection."
    ),
)


class ConnectionOptions(TypedDict, total=False):
    """The values of the options of `connection_options`, see their help texts; `connect_timeout` is seconds."""

    uid: str | None
    user: str | None
    info: str | None
    credentials_file: Path | None
    cafile: str | None
    insecure: bool
    connect_timeout: float


def connection_options(command: _Command) -> _Command:
    """Add the options that `open_client` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def open_client(url: str, reconnect_delay_s: float | None = None, **connection: Unpack[ConnectionOptions]) -> SmqClient:
    """A connected client, which does not come back by itself after a lost connection; its `onclose` may have it do so,
    after `reconnect_delay_s`.

    The URL may be that of an application, see `addresses`.

    Raises:
        Failure: the broker could not be reached or refused.
        click.UsageError: a wrong URL or option.
    """
    gevent.get_hub().NOT_ERROR += (KeyboardInterrupt,)  # gevent would print it
    given = {"reconnect_delay": reconnect_delay_s, **{name: connection.get(name) for name in ("uid", "info", "cafile")}}
    chosen = {name: value for name, value in given.items() if value is not None}
    credentials = credentials_for(connection)
    own: ConnectionEnd | None = None
    for address in addresses(url):
        try:
            client = SmqClient(
                address,
                chosen,
                verify=not connection.get("insecure"),
                timeout=connection.get("connect_timeout", 5.0),
                reconnect=False,
                onauth=lambda rnd, ip: credentials,
            )
        except ArgumentError as error:
            raise click.UsageError(str(error)) from None
        if client.wait_connected():
            return client
        if client.end is None or client.end.word != "nonsmq":
            raise failure(client.end, address, url)
        if address == url:
            own = client.end
    raise failure(own)


def received(messages: Queue[Item | Failure], count: int | None, timeout_s: float | None) -> Iterator[Item]:
    """Yields what comes into `messages`, until there were `count`, or `timeout_s` seconds are over.

    Raises:
        TimeRanOut: there were fewer than `count`.
        Failure: one that came.
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
        raise TimeRanOut(f"{number} of {count} messages came within {timeout_s:g} seconds")


def addresses(url: str) -> list[str]:
    """Where the broker of a URL may be, in the order in which it is looked for.

    At the URL of an application these are first the pages that connect clients by custom, `smq.lsp` in Lua applications
    and `smq` in Python ones: a request for the URL itself runs the application's index page, which may do anything.
    """
    parts = urlsplit(url)
    name = parts.path.rpartition("/")[2]
    if "." in name:
        return [url]
    folder = parts.path if parts.path.endswith("/") else f"{parts.path}/"
    pages = [urlunsplit(parts._replace(path=folder + page)) for page in PAGES]
    return [url, *pages] if name in PAGES else [*pages, url]


def credentials_for(connection: ConnectionOptions) -> bytes:
    """What a client says to be let in: the credentials as they are, or with `--user` the name and the password.

    Raises:
        click.UsageError: there is no password, and no terminal to ask for it at.
    """
    given, user = credentials_of(connection.get("credentials_file")), connection.get("user")
    if user is None:
        return given
    if not given:
        if not sys.stdin.isatty():
            raise click.UsageError(f"--user takes a password in {CREDENTIALS_VARIABLE} or --credentials-file")
        given = click.prompt(f"Password of {user}", hide_input=True, err=True).encode()
    return user.encode() + b":" + given


def credentials_of(file: Path | None) -> bytes:
    """What the file, or without one the environment, holds; empty when there are none."""
    if file is not None:
        return file.read_bytes().rstrip(b"\r\n")
    return os.environb.get(CREDENTIALS_VARIABLE.encode(), b"")


def topic_of(text: str, is_id: bool) -> str | int:
    """The topic that an argument names: a name, or with `--id` a number.

    Raises:
        click.UsageError: `--id` without a number.
    """
    if not is_id:
        return text
    try:
        return int(text)
    except ValueError:
        raise click.UsageError(f"{text!r} must be a number with --id") from None
