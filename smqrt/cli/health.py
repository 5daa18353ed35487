"""`smqrt health`: whether a server lives, for the health checks of containers and scripts."""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from smqrt.errors import StartError
from smqrt.printable import printable
from smqrt.settings import FILE_NAME, Settings
from smqrt.settings_sources import Sources

DEFAULT_PORT = 9356
_SHOWN_BYTES = 300


@click.command()
@click.option("--ready", is_flag=True, help="Ask whether it is ready, too: no application loads, it is not stopping.")
@click.option("--url", metavar="URL", help="Of the admin listener.  [default: where the settings have it]")
@click.option("--timeout", "timeout_s", default=3.0, show_default=True, help="Seconds that the answer may take.")
def health(ready: bool, url: str | None, timeout_s: float) -> None:
    """Tell whether the server lives: exit code 0 when it does, 1 when not.

    Asks the admin listener, found by the same settings as the server's: SMQRT_ADMIN__PORT, smqrt.toml.
    """
    base = url or _own_url()
    try:
        status, text = ask(base, "/readyz" if ready else "/healthz", timeout_s)
    except (OSError, http.client.HTTPException) as error:
        click.echo(f"{base} does not answer: {error or type(error).__name__}")
        sys.exit(1)
    click.echo(printable(" ".join(text.split())) or str(status))
    sys.exit(0 if status == 200 else 1)


def ask(base: str, path: str, timeout_s: float) -> tuple[int, str]:
    """Returns status and text of a page.

    Raises:
        StartError: `base` is no URL.
        OSError: no answer.
        http.client.HTTPException: none in HTTP.
    """
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartError(f"--url {base!r}: an address such as http://127.0.0.1:{DEFAULT_PORT} is needed.")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path.rstrip("/") + path)
        answer = connection.getresponse()
        return answer.status, answer.read(_SHOWN_BYTES).decode("utf-8", "replace")
    finally:
        connection.close()


def _own_url() -> str:
    file = Path(FILE_NAME)
    settings: Settings = Sources(environment=os.environ, file=file if file.is_file() else None).read().settings
    admin = settings.admin
    if not admin.enabled:
        raise StartError("the admin listener is off (the setting admin.enabled), and nobody else answers.")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{admin.port or DEFAULT_PORT}"
