"""Access tokens of a journal over HTTP, and their rights.

The file `token` grants all rights, a line of the file `tokens` only the rights that it names:

    # name       token               rights
    dashboards   h2Vx…               read
    site1        9aBz…               read write site1/# shared/+/state

Both files are in the journal's folder. `tokens` is written by hand, and read again when it changes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal.files import MIN_TOKEN_CHARS, journal_token
from smqrt.journal.planning import Filter

TOKENS_FILE = "tokens"
LOOK_S = 1.0
"""How often the file is checked for a change."""
MAX_BYTES = 64 << 10
MAX_TOPICS = 32
"""Maximum number of topics in a line: a topic name of 64 KiB is compared with all of them without a pause."""
MAX_QUERIES = 10_000
"""Maximum number of query names of a token, also from earlier runs of hubs: each is in memory and on disk."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)
_Stamp = tuple[int, int, int]


@dataclass
class Grant:
    """The rights of a token.

    Attributes:
        name: the name of its line; empty for the token with all rights.
        reads: whether it may read all recorded rows, and report its progress.
        writes: the topics to which it may commit and publish; None for no topic.
        queries: the query names that it has created.
    """

    name: str = ""
    reads: bool = True
    writes: Filter | None = field(default_factory=Filter)
    queries: set[str] = field(default_factory=set)

    def may_write(self, topic: bytes) -> bool:
        """Return whether the token may commit and publish to a topic."""
        if self.writes is None or self.writes.everything:
            return self.writes is not None
        return self.writes.chooses(topic.decode("utf-8", "surrogateescape"))

    def own(self, query: str) -> str:
        """Return the name under which a query of this token is stored, which no other token can use.

        Raises:
            ArgumentError: the token has created too many names.
        """
        if not self.name:
            return query
        if query not in self.queries and len(self.queries) >= MAX_QUERIES:
            raise ArgumentError(
                f"query: the token {self.name!r} has created {MAX_QUERIES} query names already; use one of them, or "
                "a line with another name."
            )
        self.queries.add(query)
        return f"{query}@{self.name}"


class Tokens:
    """The tokens of a journal. `refresh` blocks on the disk.

    Args:
        folder: the journal's folder.
        queries: returns the stored query names of all tokens.

    Attributes:
        fault: a sentence about an invalid file; empty when both are valid. Meanwhile earlier tokens stay valid.
    """

    def __init__(self, folder: Path, queries: Callable[[], Iterable[str]] = lambda: ()) -> None:
        self.fault = self._reported = ""
        self._folder, self._queries = folder, queries
        self._all: bytes | None = None
        self._grants: dict[bytes, Grant] = {}
        self._stamp: _Stamp | None = None
        self._looked_s = -LOOK_S

    @property
    def is_due(self) -> bool:
        """Whether `LOOK_S` have passed since the last `refresh`."""
        return time.monotonic() - self._looked_s >= LOOK_S

    def refresh(self) -> None:
        """Read the files again if they have changed, at most every `LOOK_S`. Errors are stored in `fault`."""
        if not self.is_due:
            return
        try:
            self._all = self._all or _digest(journal_token(self._folder))
            stamp = _stamp(self._folder / TOKENS_FILE)
            if stamp is None:
                self._grants = {}
            elif stamp != self._stamp:
                names = {grant.name: grant.queries for grant in self._grants.values()}
                for stored in self._queries():
                    query, at, name = stored.rpartition("@")
                    if at:
                        names.setdefault(name, set()).add(query)
                self._grants = _read(self._folder / TOKENS_FILE, names)
            self._stamp, self.fault = stamp, ""
        except JournalError as error:
            self.fault = str(error)
        self._looked_s = time.monotonic()  # at the end: requests that arrive during the first refresh wait for it, too

    def new_fault(self) -> str:
        """Return `fault` if it is new since the last call, else an empty text."""
        before, self._reported = self._reported, self.fault
        return self.fault if self.fault != before else ""

    def grant(self, shown: str) -> Grant | None:
        """Return the rights of a token; None for an unknown token."""
        digest = _digest(shown)
        return _EVERYTHING if digest == self._all else self._grants.get(digest)


_EVERYTHING = Grant()


def _digest(token: str) -> bytes:
    """Return the digest of a token: the time of a comparison of digests depends on no character of the token."""
    return blake2b(token.encode("utf-8", "surrogateescape"), digest_size=32).digest()


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(f"{path} can't be read: {error.strerror}; give this user access to the file.") from None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path, queries: Mapping[str, set[str]]) -> dict[bytes, Grant]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise JournalError(f"{path} is readable by other users; run chmod 600 on it.")
            text = file.read(MAX_BYTES + 1).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise JournalError(f"{path} can't be read: {error}.") from None
    if len(text) > MAX_BYTES:
        raise JournalError(f"{path} has more than {MAX_BYTES} bytes.")
    found: dict[bytes, Grant] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            grant = _parse_line(words)
        except ArgumentError as error:
            raise JournalError(f"{path}, line {number}: {str(error).rstrip('.')}.") from None
        token = words[1]
        if grant.name in {each.name for each in found.values()} or _digest(token) in found:
            raise JournalError(f"{path}: the name {grant.name!r} or its token occurs twice.")
        grant.queries = queries.get(grant.name, set())
        found[_digest(token)] = grant
    return found


def _parse_line(words: list[str]) -> Grant:
    """Return the rights of a line; error messages don't contain the token."""
    name, token, rights = words[0], "".join(words[1:2]), words[2:]
    if not _NAME.fullmatch(name):
        raise ArgumentError("a line begins with a name of up to 32 letters, digits, '-' and '_'")
    if len(token) < MIN_TOKEN_CHARS:
        raise ArgumentError(f"{name!r} must be followed by a token of {MIN_TOKEN_CHARS} characters or more")
    reads = rights[:1] == ["read"]
    rest = rights[reads:]
    if len(rest) > MAX_TOPICS + 1:
        raise ArgumentError(f"{name!r} has more than {MAX_TOPICS} topics: use wildcards, or several tokens")
    if not rights or (rest and rest[0] != "write"):
        raise ArgumentError(
            f"{name!r} must be followed by 'read', 'write' or 'read write', and topics only after write"
        )
    return Grant(name, reads, Filter(rest[1:] or ["#"]) if rest else None)
