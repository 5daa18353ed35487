"""What a hub leaves in the folders of its journals, so that pipelines find it: `hub.json`, and the `token` it asks for.

Of several hubs of one folder, the one that holds `hub.lock` writes `hub.json`. All are readable by their owner only:
who may read the journal's folder as its owner may commit to its hub.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from smqrt.errors import JournalError

FILE = "hub.json"
TOKEN = "token"
_LOCK = "hub.lock"
_TOKEN_BYTES = 32
SHORTEST = 16  # characters of a token that somebody wrote by hand


def token(journal: Path) -> str:
    """Returns the token of a journal, which is made when there is none and stays the same from then on.

    Args:
        journal: its folder.

    Raises:
        JournalError: the file can't be read or made, or what it holds is no token.
    """
    path = journal / TOKEN
    try:
        if not path.exists():
            _make_token(path)
        path.chmod(0o600)
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise JournalError(f"{path} can't be used: {error}; give this user the folder, or remove the file.") from None
    if len(text) < SHORTEST or not text.isprintable() or " " in text:
        raise JournalError(f"{path} holds no token ({SHORTEST} characters or more); remove it and one is made.")
    return text


def _make_token(path: Path) -> None:
    ready = _written(path, secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
    try:
        with suppress(FileExistsError):
            os.link(ready, path)  # and not rename: of two hubs that begin at once, both take the first one's
    finally:
        os.unlink(ready)


def hold(journal: Path) -> int | None:
    """Makes this process the one that announces a journal, until the descriptor is closed or the process ends.

    Args:
        journal: its folder.

    Returns:
        A file descriptor; None when another process is the one.

    Raises:
        JournalError: the folder can't be used.
    """
    path = journal / _LOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(f"{path} can't be used: {error.strerror}; give this user the folder.") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def announce(journal: Path, url: str) -> None:
    """Tells where a journal is served now.

    Args:
        journal: its folder.
        url: its address on the hub, without a slash at the end.

    Raises:
        JournalError: as `token`, or `hub.json` can't be written.
    """
    values = {"url": url, "token": token(journal), "pid": os.getpid()}
    path = journal / FILE
    try:
        os.replace(_written(path, json.dumps(values) + "\n"), path)
    except OSError as error:
        raise JournalError(f"{path} can't be written: {error.strerror}; pipelines need it to find the hub.") from None


def withdraw(journal: Path) -> None:
    """Takes back what this process announced; what another one announced since stays."""
    path = journal / FILE
    with suppress(OSError, ValueError, AttributeError):
        if json.loads(path.read_text("utf-8")).get("pid") == os.getpid():
            path.unlink()


def _written(path: Path, text: str) -> Path:
    """Writes a new file beside `path`, for the owner's eyes only from the beginning; returns its path."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
    return beside
