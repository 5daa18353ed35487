"""`smqrt health`: whether a server lives, for the health checks of containers and scripts."""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from smqrt.cli.admin import connection
from smqrt.errors import StartError
from smqrt.printable import printable
from smqrt.settings.settings import FILE_NAME, Settings
from smqrt.settings.sources import Sources

DEFAULT_PORT = 9356
_SHOWN_BYTES = 300


@click.command()
@click.option("--ready", is_flag=True, help="Ask whether it is ready, too: no application loads, it is not stopping.")
@click.option("--url", metavar="URL", help="Of the admin listener.  [default: where the settings have it]")
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Authorities of its certificate, or the certificate itself.  [default: those of this machine]",
)
@click.option("--timeout", "timeout_s", default=3.0, show_default=True, help="Seconds that the answer may take.")
def health(ready: bool, url: str | None, ca: str | None, timeout_s: float) -> None:
    """Tell whether the server lives: exit code 0 when it does, 1 when not.

    Asks the admin listener, found by the same settings as the server's: SMQRT_ADMIN__PORT, smqrt.toml.
    """
    base, pinned = (url, None) if url else _own_server()
    try:
        status, text = ask(base, "/readyz" if ready else "/healthz", timeout_s, ca, pinned)
    except (OSError, http.client.HTTPException) as error:
        click.echo(f"{base} does not answer: {error or type(error).__name__}")
        sys.exit(1)
    click.echo(printable(" ".join(text.split())) or str(status))
    sys.exit(0 if status == 200 else 1)


def ask(base: str, path: str, timeout_s: float, ca: str | None = None, pinned: str | None = None) -> tuple[int, str]:
    """Returns status and text of a page; `ca` and `pinned` are as in `admin_client.connection`.

    Raises:
        StartError: `base` is no URL.
        OSError: no answer.
        http.client.HTTPException: none in HTTP.
    """
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartError(f"--url {base!r}: an address such as http://127.0.0.1:{DEFAULT_PORT} is needed.")
    asked = connection(parts, timeout_s, ca, pinned)
    try:
        asked.request("GET", parts.path.rstrip("/") + path)
        answer = asked.getresponse()
        return answer.status, answer.read(_SHOWN_BYTES).decode("utf-8", "replace")
    finally:
        asked.close()


def _own_server() -> tuple[str, str | None]:
    """Its URL, and its certificate when it speaks TLS."""
    from smqrt.server.ports import admin_files  # here: who gives --url need not wait for the server's modules

    file = Path(FILE_NAME)
    settings: Settings = Sources(environment=os.environ, file=file if file.is_file() else None).read().settings
    admin = settings.admin
    if not admin.enabled:
        raise StartError("the admin listener is off (the setting admin.enabled), and nobody else answers.")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)
    files = admin_files(settings)
    scheme, pinned = ("https", files.pairs[0][0]) if files else ("http", None)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{admin.port or DEFAULT_PORT}", pinned
