"""Locations of a journal: a folder, a URI of one, or the address under which a hub serves it, with its token.

`pathlib` makes a local folder named `s3a:` of s3a://bucket/x. So whatever somebody may have typed comes by here first:
what names no folder of this machine gets one clear refusal.
"""

from __future__ import annotations

import json
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from smqrt.errors import ArgumentError, JournalError

if TYPE_CHECKING:
    from pyarrow import fs

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/", re.ASCII)
"""Of two characters or more, and one slash: `Path("s3a://bucket")` is `s3a:/bucket` already."""
_HERE = ("", "localhost")
_BEGIN = "-----BEGIN"
MOVED = "was moved, removed or unmounted; bring it back."
"""What is told of a journal's folder that isn't there any more."""


def scheme(location: Path | str) -> str:
    """Returns the scheme of a URI in lower case, such as "s3a"; "" for a path."""
    found = _SCHEME.match(str(location))
    return found[1].lower() if found else ""


def is_address(location: Path | str) -> bool:
    """Whether it is the http(s) address of a journal on a hub."""
    return str(location).startswith(("http://", "https://"))


def is_elsewhere(location: Path | str) -> bool:
    """Whether it is a URI of something that is not a folder of this machine."""
    return scheme(location) not in ("", "file")


def local_folder(location: Path | str, what: str, remedy: str) -> Path:
    """Returns the folder of this machine that a path, or a URI such as file:///mnt/x, names.

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
    """Returns the pyarrow.fs.FileSystem of a path or URI, and the path there.

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
    """Returns the folder of a journal.

    Args:
        location: a path or a file URI, and no address on a hub.

    Raises:
        ArgumentError: it is another URI.
    """
    return local_folder(
        location, "The journal", "name its folder, or the http(s) address under which its hub serves it"
    )


def state_folder(location: Path | str) -> Path:
    """Returns the folder of the state of pipelines; arguments and errors as for `journal_folder`."""
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
    """Returns the address of a journal on a hub.

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
    """Returns certificates to trust, as text, so that others need no such file.

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
        """Returns the address of a journal's hub; the hub may be away.

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
        """Returns the address as it is now.

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
    """Returns a token that there is.

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
