"""URIs where a folder may be asked for: which name a folder of this machine, and one clear refusal of the others.

`pathlib` makes a local folder named `s3a:` of s3a://bucket/x. So whatever somebody may have typed comes by here first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smqrt.errors import ArgumentError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/", re.ASCII)
"""Of two characters or more, and one slash: `Path("s3a://bucket")` is `s3a:/bucket` already."""
_HERE = ("", "localhost")


def scheme(place: Path | str) -> str:
    """Returns the scheme of a URI in lower case, such as "s3a"; "" for a path."""
    found = _SCHEME.match(str(place))
    return found[1].lower() if found else ""


def is_address(place: Path | str) -> bool:
    """Whether it is the http(s) address of a journal on a hub."""
    return str(place).startswith(("http://", "https://"))


def is_elsewhere(place: Path | str) -> bool:
    """Whether it is a URI of something that is not a folder of this machine."""
    return scheme(place) not in ("", "file")


def folder(place: Path | str, what: str, remedy: str) -> Path:
    """Returns the folder of this machine that a path, or a URI such as file:///mnt/x, names.

    As in Hadoop and Spark, nothing in a URI is unescaped: `%20` is three characters of a name.

    Args:
        place: what somebody gave.
        what: how the message calls it, such as "--state".
        remedy: what to give instead.

    Raises:
        ArgumentError: it is a URI of something else.
    """
    if not scheme(place):
        return Path(place)
    host, path = urlsplit(str(place)).netloc, str(place).partition(":")[2]
    if scheme(place) == "file" and host in _HERE:
        return Path("/" + path.removeprefix(f"//{host}").lstrip("/"))
    raise ArgumentError(f"{what} {place} is no folder of this machine: {remedy}.")


def filesystem(place: Path | str) -> tuple[Any, str]:
    """Returns the pyarrow.fs.FileSystem of a path or URI, and the path there.

    Raises:
        ArgumentError: pyarrow doesn't know the scheme.
    """
    from pyarrow import fs

    text = str(place)
    if not scheme(text):
        return fs.LocalFileSystem(), text
    try:
        system, path = fs.FileSystem.from_uri(f"s3{text[3:]}" if text.startswith("s3a:") else text)
    except ValueError:
        remedy = "is no folder, and no URI that pyarrow can write to, such as s3://bucket/x"
        raise ArgumentError(f"{place} {remedy}.") from None
    return system, path


def journal(place: Path | str) -> Path:
    """Returns the folder of a journal.

    Args:
        place: a path or a file URI, and no address on a hub.

    Raises:
        ArgumentError: it is another URI.
    """
    return folder(place, "The journal", "name its folder, or the http(s) address under which its hub serves it")


def state(place: Path | str) -> Path:
    """Returns the folder of the state of pipelines; arguments and errors as for `journal`."""
    remedy = "name a folder, on storage that is mounted where a cluster has to see it; tables take URIs, with --tables"
    return folder(place, "--state", remedy)
