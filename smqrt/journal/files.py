"""Files of a journal: readable by their owner only, since payloads may be secrets; written whole; and their checksums.

Checksums are CRC-32, as zlib has it. The pages of Parquet files have their own; what says where they are has none. So
the manifest keeps the CRC-32 of the whole file, for `journal verify`, and of its footer, for every reader.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from smqrt.errors import ArgumentError, JournalError

if TYPE_CHECKING:
    from pyarrow import fs


JsonObject = dict[str, Any]
"""An object of a JSON text; its values are of any kind until whoever reads it has looked."""
FILE_MODE, FOLDER_MODE = 0o600, 0o700
_FUTURE_S = 60.0
"""Clocks of two machines that share a disk may differ by less."""


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing; what is there keeps its mode.

    Raises:
        OSError: it can't be made.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(FOLDER_MODE, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises when it is a file


@contextmanager
def there(folder: Path) -> Iterator[None]:
    """Make sure that a folder is there before and after something in it is looked at: what is listed while it is being
    moved looks as if there were nothing.

    Raises:
        FileNotFoundError: it isn't.
        OSError: it can't be looked at.
    """
    before = folder.stat()
    yield
    after = folder.stat()
    if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
        raise FileNotFoundError(errno.ENOENT, "another folder is in its place", str(folder))


def is_journal(folder: Path) -> bool:
    """Return whether there is a journal in a folder: one that is empty is what remains when a volume is unmounted."""
    return any((folder / name).exists() for name in ("wal", "manifest.json"))


def touch(path: Path) -> None:
    """Make a file that only its owner can read, for those who open it by name; one that is there stays as it is.

    Raises:
        OSError: it can't be made.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))


def age_s(path: Path) -> float:
    """Return how long ago a file was changed, seconds. One that was changed in the future, by a clock that was wrong,
    counts from now on.

    Raises:
        FileNotFoundError: it is gone.
    """
    found_s = time.time() - path.stat().st_mtime
    if found_s >= -_FUTURE_S:
        return found_s
    with suppress(PermissionError):
        os.utime(path)
    return 0.0


def sync_folder(folder: Path) -> None:
    """Has the disk keep the names in a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_beside(path: Path, content: bytes, sync: bool = True) -> Path:
    """Write a file beside the one that is meant, and return its path: to be linked or renamed when it is whole.

    Args:
        path: the file that is meant.
        content: all of it.
        sync: the disk has it when this returns.

    Raises:
        OSError: the disk is full or broken; nothing is left behind.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        touch(beside)
        with beside.open("wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    return beside


def write_whole(path: Path, content: bytes, sync: bool = True) -> None:
    """Write a file that is whole or as before, whatever happens. Arguments and errors as for `write_beside`."""
    beside = write_beside(path, content, sync)
    try:
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


try:
    from zlib_ng.zlib_ng import crc32 as crc32  # 13 times as fast: zlib's was an eighth of what recording cost the hub
except ImportError:  # on a cluster that was sent smqrt's own files only
    from zlib import crc32 as crc32

MAGIC = b"PAR1"
_END = struct.Struct("<I4s")
"""Behind the footer: its length, and `MAGIC`."""
_PIECE_BYTES = 1 << 20


def crc32_of_file(path: Path) -> int:
    """Return the CRC-32 of a file.

    Raises:
        OSError: it can't be read.
    """
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc = crc32(piece, crc)
    return crc


def crc32_of_footer(path: Path) -> int:
    """Return the CRC-32 of a Parquet file's footer, with what stands behind it. Raises as `footer`."""
    with path.open("rb") as file:
        return crc32(footer(file))


def footer(file: IO[bytes]) -> bytes:
    """Return the footer of a Parquet file, with what stands behind it.

    Raises:
        ValueError: there is none.
        OSError: it can't be read.
    """
    size = file.seek(0, os.SEEK_END)
    if size < len(MAGIC) + _END.size:
        raise ValueError(f"it has {size} bytes")
    file.seek(size - _END.size)
    length, magic = _END.unpack(file.read(_END.size))
    if magic != MAGIC or length > size - _END.size - len(MAGIC):
        raise ValueError("no footer is at its end")
    file.seek(size - _END.size - length)
    return file.read(length + _END.size)


def check_footer(file: IO[bytes], known: int | None) -> None:
    """Compare the footer of a Parquet file with its checksum, where that is known.

    Raises:
        ValueError: it's damaged.
        OSError: it can't be read.
    """
    if known is not None and crc32(footer(file)) != known:
        raise ValueError("the checksum of its footer is wrong")
    file.seek(0)


# ---- Locations of a journal: a folder, a URI of one, or the address under which a hub serves it, with its token.
#
# `pathlib` makes a local folder named `s3a:` of s3a://bucket/x. So whatever somebody may have typed comes by here
# first:
# what names no folder of this machine gets one clear refusal.

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/", re.ASCII)
"""Of two characters or more, and one slash: `Path("s3a://bucket")` is `s3a:/bucket` already."""
_HERE = ("", "localhost")
_BEGIN = "-----BEGIN"
MOVED = "was moved, removed or unmounted; bring it back."
"""What is told of a journal's folder that isn't there any more."""


def scheme(location: Path | str) -> str:
    """Return the scheme of a URI in lower case, such as "s3a"; "" for a path."""
    found = _SCHEME.match(str(location))
    return found[1].lower() if found else ""


def is_address(location: Path | str) -> bool:
    """Return whether it is the http(s) address of a journal on a hub."""
    return str(location).startswith(("http://", "https://"))


def is_elsewhere(location: Path | str) -> bool:
    """Return whether it is a URI of something that is not a folder of this machine."""
    return scheme(location) not in ("", "file")


def local_folder(location: Path | str, what: str, remedy: str) -> Path:
    """Return the folder of this machine that a path, or a URI such as file:///mnt/x, names.

    As in Hadoop and Spark, nothing in a URI is unescaped: `%20` is three characters of a name.

    Args:
        location: what somebody gave.
        what: how the message calls it, such as "--state".
        remedy: what to give instead.

    Raises:
        ArgumentError: it is a URI of something else.
    """
    if not scheme(location):
        return Path(location)
    host, path = urlsplit(str(location)).netloc, str(location).partition(":")[2]
    if scheme(location) == "file" and host in _HERE:
        return Path("/" + path.removeprefix(f"//{host}").lstrip("/"))
    raise ArgumentError(f"{what} {location} is no folder of this machine: {remedy}.")


def filesystem(location: Path | str) -> tuple[fs.FileSystem, str]:
    """Return the pyarrow.fs.FileSystem of a path or URI, and the path there.

    Raises:
        ArgumentError: pyarrow doesn't know the scheme.
    """
    from pyarrow import fs

    text = str(location)
    if not scheme(text):
        return fs.LocalFileSystem(), text
    try:
        system, path = fs.FileSystem.from_uri(f"s3{text[3:]}" if text.startswith("s3a:") else text)
    except ValueError:
        remedy = "is no folder, and no URI that pyarrow can write to, such as s3://bucket/x"
        raise ArgumentError(f"{location} {remedy}.") from None
    return system, path


def journal_folder(location: Path | str) -> Path:
    """Return the folder of a journal.

    Args:
        location: a path or a file URI, and no address on a hub.

    Raises:
        ArgumentError: it is another URI.
    """
    return local_folder(
        location, "The journal", "name its folder, or the http(s) address under which its hub serves it"
    )


def state_folder(location: Path | str) -> Path:
    """Return the folder of the state of pipelines; arguments and errors as for `journal_folder`."""
    remedy = "name a folder, on storage that is mounted where a cluster has to see it; tables take URIs, with --tables"
    return local_folder(location, "--state", remedy)


# ---- hubs


class Unreachable(JournalError):
    """The hub is away, and has been for as long as somebody was willing to wait."""


class Endpoint(NamedTuple):
    """Where a journal is served, the token for it, and whom to trust there: PEM text; None for the system's."""

    url: str
    token: str
    certificates: str | None = None


def checked_url(url: str) -> str:
    """Return the address of a journal on a hub.

    Raises:
        JournalError: it isn't one.
    """
    parts = urlsplit(url)
    try:
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.path.strip("/")
    except ValueError:
        right = False
    if not right:
        raise JournalError(
            f"{url} is no address of a journal; it's like http://127.0.0.1:9357/rtl/journal/NAME, as in its hub.json."
        )
    return url.rstrip("/")


def trusted_certificates(cafile: str | None) -> str | None:
    """Return certificates to trust, as text, so that others need no such file.

    Args:
        cafile: a PEM file, or what it holds.

    Raises:
        JournalError: it can't be read, or holds none.
    """
    if cafile is None:
        return None
    try:
        text = cafile if cafile.startswith(_BEGIN) else Path(cafile).read_text("ascii")
        ssl.create_default_context(cadata=text or "nothing")  # "" stands for the system's
    except (OSError, ValueError) as error:
        raise JournalError(f"cafile {cafile[:200]} is no PEM file with certificates: {error}.") from None
    return text


@dataclass(frozen=True)
class HubAddress:
    """Where a journal's hub is. `HubAddress.of` makes one.

    Attributes:
        folder: of the journal: its `hub.json` says where the hub is, each time anew.
        given: or the address itself.
    """

    folder: Path | None = None
    given: Endpoint | None = None

    @classmethod
    def of(cls, location: Path | str, token: str | None = None, cafile: str | None = None) -> HubAddress:
        """Return the address of a journal's hub; the hub may be away.

        Args:
            location: the journal's folder, or its address on the hub.
            token: for an address.
            cafile: PEM file with certificates to trust instead of the system's, or what it holds; for an address.

        Raises:
            JournalError: the address is none, or has no token; the file has no certificate.
            ArgumentError: it is a URI of another kind.
        """
        if not is_address(location):
            return cls(folder=journal_folder(location))
        return cls(
            given=Endpoint(checked_url(str(location)), with_token(str(location), token), trusted_certificates(cafile))
        )

    def find(self) -> Endpoint:
        """Return the address as it is now.

        Raises:
            JournalError: no hub serves the journal.
        """
        return self.given or _announced(self.folder or Path())

    @property
    def url(self) -> str:
        """The journal's address on the hub. Raises as `find`."""
        return self.find().url

    @property
    def token(self) -> str:
        """What the hub wants to see. Raises as `find`."""
        return self.find().token


def with_token(url: str, token: str | None) -> str:
    """Return a token that there is.

    Raises:
        JournalError: there is none.
    """
    if not token or not token.isprintable() or not token.isascii():
        raise JournalError(f"{url} needs a token: what the file `token` in the journal's folder holds.")
    return token


def _announced(folder: Path) -> Endpoint:
    path = folder / "hub.json"
    try:
        values = json.loads(path.read_bytes())
        return Endpoint(checked_url(values["url"]), str(values["token"]))
    except FileNotFoundError:
        raise JournalError(f"No hub serves {folder}; start it with `smqrt serve`.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{path} can't be read ({error!r}); start the hub anew, which writes it.") from None
