"""`smqrt health`: check for containers and scripts whether a server is running."""

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
    base, pinned = (url, None) if url else _configured_server()
    try:
        status, text = fetch(base, "/readyz" if ready else "/healthz", timeout_s, ca, pinned)
    except (OSError, http.client.HTTPException) as error:
        click.echo(f"{base} does not respond: {error or type(error).__name__}")
        sys.exit(1)
    click.echo(printable(" ".join(text.split())) or str(status))
    sys.exit(0 if status == 200 else 1)


def fetch(base: str, path: str, timeout_s: float, ca: str | None = None, pinned: str | None = None) -> tuple[int, str]:
    """Return status and text of a page; `ca` and `pinned` are as in `admin.connection`.

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
        http_connection.request("GET", parts.path.rstrip("/") + path)
        response = http_connection.getresponse()
        return response.status, response.read(_SHOWN_BYTES).decode("utf-8", "replace")
    finally:
        http_connection.close()


def _configured_server() -> tuple[str, str | None]:
    """Return the admin URL of the settings, and the certificate file when it uses TLS."""
    from smqrt.server.ports import admin_files  # imports the server's modules, which --url does not need

    file = Path(FILE_NAME)
    settings: Settings = Sources(environment=os.environ, file=file if file.is_file() else None).read().settings
    admin = settings.admin
    if not admin.enabled:
        raise StartError("the admin listener is disabled: set admin.enabled = true, or name another server with --url.")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)
    files = admin_files(settings)
    scheme, pinned = ("https", files.pairs[0][0]) if files else ("http", None)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{admin.port or DEFAULT_PORT}", pinned
