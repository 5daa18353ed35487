"""Files that are made when somebody reads them: the io objects "vm" of applications."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from smqrt.http.resources import Io, IoError, Stat, segments
from smqrt.transport.certificates import self_signed_pair


class VirtualIo(Io):
    """A read-only tree of files that are functions.

    Args:
        files: name and maker of each; a maker that raises OSError has no file to offer.
        prefix: the folder in it that is the root.
    """

    kind = "vm"

    def __init__(self, files: Mapping[str, Callable[[], bytes]], prefix: str = "") -> None:
        self._files = files
        self._prefix = prefix
        self._made = int(time.time())

    def open(self, name: str, mode: str = "r") -> IO[bytes]:
        """See `Io.open`."""
        if mode.replace("b", "") != "r":
            raise IoError("noaccess", f"{name}: read only")
        return io.BytesIO(self._content(self._path(name)))

    def stat(self, name: str) -> Stat:
        """See `Io.stat`."""
        path = self._path(name)
        own = path.rpartition("/")[2]
        if path in self._files:
            return Stat(own, len(self._content(path)), self._made, False)
        if not any(self._below(path)):
            raise IoError("notfound", name)
        return Stat(own, 0, self._made, True)

    def files(self, path: str = "") -> Iterator[Stat]:
        """See `Io.files`."""
        folder = self._path(path)
        children = sorted({rest.partition("/")[0] for rest in self._below(folder)})
        if not children:
            raise IoError("notfound", path)
        return (self.stat(f"{path}/{child}") for child in children)

    def sub(self, path: str) -> Io:
        """See `Io.sub`."""
        if not self.stat(path).isdir:
            raise IoError("notfound", f"{path} is no folder")
        return VirtualIo(self._files, self._path(path))

    def realpath(self, name: str = "") -> str:
        """See `Io.realpath`; these files have no path, so it is one that names the io."""
        return f"vm:/{self._path(name)}"

    def _path(self, name: str) -> str:
        parts = segments(name)
        return "/".join([self._prefix, *parts] if self._prefix else parts)

    def _below(self, path: str) -> Iterator[str]:
        start = path + "/" if path else ""
        return (name[len(start) :] for name in self._files if name.startswith(start))

    def _content(self, path: str) -> bytes:
        maker = self._files.get(path)
        if maker is None:
            raise IoError("notfound", path)
        try:
            return maker()
        except OSError as error:
            raise IoError.of(error, path) from None


def server_io() -> VirtualIo:
    """What every server has: a certificate for trying TLS out, made by itself (spec: bas-api §10)."""
    return VirtualIo(
        {
            ".certificate/MakoServer.pem": lambda: _certificate(0),
            ".certificate/MakoServer.key": lambda: _certificate(1),
        }
    )


def _certificate(part: int) -> bytes:
    return Path(self_signed_pair("localhost")[part]).read_bytes()
