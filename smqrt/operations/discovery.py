"""Announcements of a user's admin listeners, for commands: a file for each, that only this user reads."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("smqrt.admin")


def folder() -> Path:
    """Returns the folder in which servers of this user leave the address of their admin listener."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "smqrt" if runtime else Path(tempfile.gettempdir()) / f"smqrt-{os.getuid()}"


def announce(url: str, certificate: str | None = None) -> Path | None:
    """Write the address into a file that only this user can read.

    Args:
        url: of the admin listener.
        certificate: the file of its certificate, when it speaks TLS: commands of this machine trust it as it is.
    """
    path = folder() / f"{os.getpid()}.json"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        found = path.parent.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            log.info("%s belongs to others too; commands of this machine are told with --url", path.parent)
            return None
        beside = path.with_suffix(".new")
        new = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(new, "w") as file:
            about = {"url": url, "pid": os.getpid(), "folder": os.getcwd()}
            json.dump(about | ({"certificate": str(Path(certificate).resolve())} if certificate else {}), file)
        beside.replace(path)  # whoever looks finds all of it, or nothing
    except OSError as error:
        log.info("%s can't be written: %s; commands of this machine are told with --url", path, error.strerror)
        return None
    return path


def announced() -> list[dict[str, object]]:
    """Returns what the servers of this user left that are still there, the newest first.

    Of two processes of one server, as there are during a hot restart, the newer one.
    """
    found: list[tuple[float, dict[str, object]]] = []
    with suppress(OSError):
        if folder().lstat().st_uid != os.getuid():
            return []
        for path in folder().glob("*.json"):
            with suppress(OSError, ValueError):
                if path.stat().st_uid == os.getuid() and Path(f"/proc/{path.stem}").exists():
                    found.append((path.stat().st_mtime, json.loads(path.read_text("utf-8"))))
    newest_first = [one for _, one in sorted(found, key=lambda entry: entry[0], reverse=True)]
    by_url: dict[object, dict[str, object]] = {}
    for one in newest_first:
        by_url.setdefault(one["url"], one)
    return list(by_url.values())
