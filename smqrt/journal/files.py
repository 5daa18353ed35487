"""Files and locations of a journal: private files, atomic writes, checksums, addresses, the token.

Files are readable by their owner only, since payloads may be secret. Checksums are CRC-32 as in zlib. In Parquet files
the pages have checksums, but the footer has none. So the manifest has the CRC-32 of the whole file, for `journal
verify`, and of the footer, for every reader.
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
"""A JSON object whose values have not been checked yet."""
FILE_MODE, FOLDER_MODE = 0o600, 0o700
_FUTURE_S = 60.0
"""Maximum difference between the clocks of two machines that share a disk."""


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents; existing folders keep their mode.

    Args:
        path: the folder.

    Raises:
        OSError: it can't be created.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(FOLDER_MODE, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises FileExistsError for a file of this name


@contextmanager
def existing_folder(folder: Path) -> Iterator[None]:
    """Check that a folder exists before and after it is read: while it is being moved, its listing may be empty.

    Args:
        folder: the folder.

    Raises:
        FileNotFoundError: it is missing, or another folder has replaced it.
        OSError: it can't be read.
    """
    before = folder.stat()
    yield
    after = folder.stat()
    if (before.st_dev, before.st_ino) != (after.st_dev, after.st_ino):
        raise FileNotFoundError(errno.ENOENT, "another folder is in its place", str(folder))


def is_journal(folder: Path) -> bool:
    """Return whether a folder has a journal. The mount point of an unmounted volume is an empty folder."""
    return any((folder / name).exists() for name in ("wal", "manifest.json"))


def touch(path: Path) -> None:
    """Create a file that only its owner can read, for code that opens it by name; an existing file is not changed.

    Raises:
        OSError: it can't be created.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))


def age_s(path: Path) -> float:
    """Return the time since the last change of a file, seconds.

    A time in the future comes from a wrong clock, and is set to now.

    Raises:
        FileNotFoundError: it does not exist.
    """
    found_s = time.time() - path.stat().st_mtime
    if found_s >= -_FUTURE_S:  # slightly negative: from a machine with another clock
        return found_s
    with suppress(PermissionError):
        os.utime(path)
    return 0.0


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk: without that, a new file may be missing after a power failure.

    Raises:
        OSError: the disk is broken, or the folder is missing.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_beside(path: Path, content: bytes, sync: bool = True) -> Path:
    """Write a temporary file beside the final path, and return its path. The caller links or renames it.

    Args:
        path: the final path.
        content: the content of the file.
        sync: whether it is synced to the disk.

    Raises:
        OSError: the disk is full or broken; the temporary file is removed.
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
    """Replace a file atomically. Arguments and errors as for `write_beside`."""
    beside = write_beside(path, content, sync)
    try:
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


try:
    from zlib_ng.zlib_ng import crc32 as crc32  # 13 times as fast: zlib's took an eighth of the time of recording
except ImportError:  # on a cluster where only smqrt's own files were installed
    from zlib import crc32 as crc32

MAGIC = b"PAR1"
_TRAILER = struct.Struct("<I4s")
"""The end of a Parquet file: the length of the footer, and `MAGIC`."""
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
    """Return the CRC-32 of a Parquet file's footer with its length and magic. Raises as `footer`."""
    with path.open("rb") as file:
        return crc32(footer(file))


def footer(file: IO[bytes]) -> bytes:
    """Return the footer of a Parquet file with its length and magic.

    Raises:
        ValueError: the file has no footer.
        OSError: it can't be read.
    """
    size = file.seek(0, os.SEEK_END)
    if size < len(MAGIC) + _TRAILER.size:
        raise ValueError(f"it has {size} bytes")
    file.seek(size - _TRAILER.size)
    length, magic = _TRAILER.unpack(file.read(_TRAILER.size))
    if magic != MAGIC or length > size - _TRAILER.size - len(MAGIC):
        raise ValueError("it has no footer")
    file.seek(size - _TRAILER.size - length)
    return file.read(length + _TRAILER.size)


def check_footer(file: IO[bytes], known: int | None) -> None:
    """Compare the footer of a Parquet file with its checksum, if that is known.

    Raises:
        ValueError: the footer is damaged.
        OSError: it can't be read.
    """
    if known is not None and crc32(footer(file)) != known:
        raise ValueError("the checksum of its footer is wrong")
    file.seek(0)


# ---- Locations of a journal: a folder, a URI of one, or the address under which a hub serves it, with its token.
#
# `pathlib` turns s3a://bucket/x into a local folder named `s3a:`. So all locations that users enter are checked here
# first, and an unsupported URI gets one clear error.

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/", re.ASCII)
"""A scheme of two characters or more. One slash is enough: `str(Path("s3a://bucket"))` is `s3a:/bucket`."""
_LOCAL_HOSTS = ("", "localhost")
_PEM_BEGIN = "-----BEGIN"
TOKEN_FILE = "token"
_TOKEN_BYTES = 32
MIN_TOKEN_CHARS = 16
"""Minimum length of a token, which a user may write by hand."""
IS_MISSING = "was moved, removed or unmounted; restore it."
"""The end of error messages about a missing folder of a journal."""


def scheme(location: Path | str) -> str:
    """Return the scheme of a URI in lower case, such as "s3a"; "" for a path."""
    found = _SCHEME.match(str(location))
    return found[1].lower() if found else ""


def is_address(location: Path | str) -> bool:
    """Return whether a location is the http(s) address of a journal on a hub."""
    return str(location).startswith(("http://", "https://"))


def is_elsewhere(location: Path | str) -> bool:
    """Return whether a location is a URI other than a folder of this machine."""
    return scheme(location) not in ("", "file")


def local_folder(location: Path | str, what: str, remedy: str) -> Path:
    """Return the folder of this machine from a path, or from a URI such as file:///mnt/x.

    As in Hadoop and Spark, URIs are not unescaped: `%20` is three characters of a name.

    Args:
        location: a path or a URI from the user.
        what: its name in the error message, such as "--state".
        remedy: the valid input, for the error message.

    Raises:
        ArgumentError: it is another kind of URI.
    """
    if not scheme(location):
        return Path(location)
    host, path = urlsplit(str(location)).netloc, str(location).partition(":")[2]
    if scheme(location) == "file" and host in _LOCAL_HOSTS:
        return Path("/" + path.removeprefix(f"//{host}").lstrip("/"))
    raise ArgumentError(f"{what} {location} is not a folder of this machine: {remedy}.")


def filesystem(location: Path | str) -> tuple[fs.FileSystem, str]:
    """Return the pyarrow.fs.FileSystem of a path or URI, and the path in it.

    Raises:
        ArgumentError: pyarrow doesn't support the scheme.
    """
    from pyarrow import fs

    text = str(location)
    if not scheme(text):
        return fs.LocalFileSystem(), text
    try:
        system, path = fs.FileSystem.from_uri(f"s3{text[3:]}" if text.startswith("s3a:") else text)
    except ValueError:
        remedy = "is neither a folder nor a URI that pyarrow can write to, such as s3://bucket/x"
        raise ArgumentError(f"{location} {remedy}.") from None
    return system, path


def journal_folder(location: Path | str) -> Path:
    """Return the folder of a journal.

    Args:
        location: a path or a file URI, not an address on a hub.

    Raises:
        ArgumentError: it is another URI.
    """
    return local_folder(
        location, "The journal", "name its folder, or the http(s) address under which its hub serves it"
    )


def state_folder(location: Path | str) -> Path:
    """Return the folder of the state of pipelines; arguments and errors as for `journal_folder`."""
    remedy = "name a folder, which all machines of a cluster must have mounted; only --tables takes a URI"
    return local_folder(location, "--state", remedy)


# ---- hubs


class Unreachable(JournalError):
    """The hub did not answer within the retry time."""


class Endpoint(NamedTuple):
    """The URL of a journal, its token, and trusted certificates as PEM text; None for the system's."""

    url: str
    token: str
    certificates: str | None = None


def checked_url(url: str) -> str:
    """Return the address of a journal on a hub, without a slash at the end.

    Raises:
        JournalError: the URL is invalid.
    """
    parts = urlsplit(url)
    try:
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.path.strip("/")
    except ValueError:
        is_valid = False
    if not is_valid:
        raise JournalError(
            f"{url} is not the address of a journal such as http://127.0.0.1:9357/rtl/journal/NAME, as in its hub.json."
        )
    return url.rstrip("/")


def trusted_certificates(cafile: str | None) -> str | None:
    """Return trusted certificates as text, so that processes on other machines don't need the file.

    Args:
        cafile: a PEM file, or its content.

    Raises:
        JournalError: it can't be read, or has no certificate.
    """
    if cafile is None:
        return None
    try:
        text = cafile if cafile.startswith(_PEM_BEGIN) else Path(cafile).read_text("ascii")
        ssl.create_default_context(cadata=text or "nothing")  # "" would mean the system's certificates
    except (OSError, ValueError) as error:
        raise JournalError(f"cafile {cafile[:200]} is not a PEM file with certificates: {error}.") from None
    return text


@dataclass(frozen=True)
class HubAddress:
    """The address of a journal's hub. `HubAddress.of` creates one.

    Attributes:
        folder: the journal's folder; its `hub.json` has the address and is read at each use.
        given: the address that the user entered; None with a folder.
    """

    folder: Path | None = None
    given: Endpoint | None = None

    @classmethod
    def of(cls, location: Path | str, token: str | None = None, cafile: str | None = None) -> HubAddress:
        """Return the address of a journal's hub, which need not run.

        Args:
            location: the journal's folder, or its address on the hub.
            token: for an address.
            cafile: PEM file with certificates to trust instead of the system's, or its content; for an address.

        Raises:
            JournalError: the address is invalid or has no token, or the file has no certificate.
            ArgumentError: it is a URI of another kind.
        """
        if not is_address(location):
            return cls(folder=journal_folder(location))
        url = str(location)
        return cls(given=Endpoint(checked_url(url), checked_token(url, token), trusted_certificates(cafile)))

    def find(self) -> Endpoint:
        """Return the current address.

        Raises:
            JournalError: no hub serves the journal.
        """
        if self.given:
            return self.given
        folder = self.folder or Path()
        path = folder / "hub.json"
        try:
            values = json.loads(path.read_bytes())
            return Endpoint(checked_url(values["url"]), str(values["token"]))
        except FileNotFoundError:
            raise JournalError(f"No hub serves {folder}; start it with `smqrt serve`.") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JournalError(f"{path} can't be read ({error!r}); restart the hub, which writes it again.") from None

    @property
    def url(self) -> str:
        """The journal's address on the hub. Raises as `find`."""
        return self.find().url

    @property
    def token(self) -> str:
        """The token for the hub. Raises as `find`."""
        return self.find().token


def checked_token(url: str, token: str | None) -> str:
    """Return the token for an address.

    Raises:
        JournalError: the token is missing or invalid.
    """
    if not token or not token.isprintable() or not token.isascii():
        raise JournalError(f"{url} needs a token: the content of the file `token` in the journal's folder.")
    return token


def journal_token(journal: Path) -> str:
    """Return the token of a journal. A missing one is created.

    Args:
        journal: its folder.

    Raises:
        JournalError: the file can't be read or created, or has no valid token.
    """
    path = journal / TOKEN_FILE
    try:
        if not path.exists():
            ready = write_beside(path, f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode(), sync=False)
            try:
                with suppress(FileExistsError):
                    os.link(ready, path)  # not a rename: when two hubs start at once, both use the first token
            finally:
                os.unlink(ready)
        path.chmod(FILE_MODE)
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise JournalError(
            f"{path} can't be used: {error}; give this user access to the folder, or remove the file."
        ) from None
    if len(text) < MIN_TOKEN_CHARS or not text.isprintable() or " " in text:
        raise JournalError(
            f"{path} holds no token ({MIN_TOKEN_CHARS} characters or more); remove it, and a new one is created."
        )
    return text
