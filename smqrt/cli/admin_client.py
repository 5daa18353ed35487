"""The admin listener of a server, asked by commands: where it is, how one logs in, and what it answers."""

from __future__ import annotations

import json
import os
import ssl
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import wraps
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

import click

from smqrt.errors import SmqrtError
from smqrt.printable import printable

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
    from smqrt.operations.discovery import announced  # here: `--help` needs none of it

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
