"""State of a file server that survives restarts: JSON in a folder of its io."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod

from smqrt.http.blocking_io import reach
from smqrt.http.resources import Io, IoError

log = logging.getLogger("smqrt")


class SavedState:
    """Something that is kept in a file.

    Attributes:
        file: the file's name.
        changed: whether it differs from what the file has.
    """

    file = ""

    def __init__(self) -> None:
        self.changed = False

    @abstractmethod
    def as_json(self) -> object:
        """What the file shall hold."""

    @abstractmethod
    def take(self, kept: object) -> None:
        """Take up what the file held; raises ValueError, TypeError, KeyError or AttributeError when that is damaged."""

    def load(self, io: Io, folder: str) -> None:
        """Take up what is kept in a folder, which is made if it is missing; blocks the greenlet.

        Raises:
            IoError: the folder can't be made.
        """
        text = reach(io, folder, _read, io, folder, self.file)
        if not text:
            return
        try:
            self.take(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError):
            log.warning("%s/%s of a file server is damaged: what it kept is lost", folder, self.file)

    def save(self, io: Io, folder: str) -> None:
        """Write the file, if something has changed; blocks the greenlet. Raises IoError."""
        if self.changed:
            self.changed = False
            reach(io, folder, _write, io, folder, self.file, json.dumps(self.as_json()).encode())


def _read(io: Io, folder: str, file: str) -> bytes:
    parts = folder.split("/")
    for count in range(1, len(parts) + 1):
        try:
            io.mkdir("/".join(parts[:count]))
        except IoError as error:
            if error.word != "exist":
                raise
    try:
        return io.read(f"{folder}/{file}")
    except IoError:
        return b""


def _write(io: Io, folder: str, file: str, text: bytes) -> None:
    name = f"{folder}/{file}"
    with io.open(name + ".new", "w") as new:
        new.write(text)
    io.rename(name + ".new", name)
