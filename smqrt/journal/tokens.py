"""The tokens of a journal over HTTP: the file `token` opens all of it, lines of the file `tokens` parts.

    # name       token               what it may
    dashboards   h2Vx…               read
    site1        9aBz…               read write site1/# shared/+/state

Both files lie in the journal's folder. `tokens` is written by hand, and read again when it changes.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from smqrt.errors import ArgumentError, JournalError
from smqrt.journal.files import write_beside
from smqrt.journal.filters import Filter

TOKEN_FILE = "token"
_TOKEN_BYTES = 32
SHORTEST_TOKEN = 16  # characters of a token that somebody wrote by hand
TOKENS_FILE = "tokens"
LOOK_S = 1.0
"""So long a change of the file may go unnoticed."""
MOST_BYTES = 64 << 10
MOST_TOPICS = 32
"""Of a line: a topic of 64 KiB is compared with all of them in one go."""
MOST_QUERIES = 10_000
"""Names of queries that one line's token may bring in, over all runs of hubs: each stays in memory and on disk."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)
_Stamp = tuple[int, int, int]


def journal_token(journal: Path) -> str:
    """Returns the token of a journal, which is made when there is none and stays the same from then on.

    Args:
        journal: its folder.

    Raises:
        JournalError: the file can't be read or made, or what it holds is no token.
    """
    path = journal / TOKEN_FILE
    try:
        if not path.exists():
            _make_token(path)
        path.chmod(0o600)
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise JournalError(f"{path} can't be used: {error}; give this user the folder, or remove the file.") from None
    if len(text) < SHORTEST_TOKEN or not text.isprintable() or " " in text:
        raise JournalError(f"{path} holds no token ({SHORTEST_TOKEN} characters or more); remove it and one is made.")
    return text


def _make_token(path: Path) -> None:
    ready = write_beside(path, f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode(), sync=False)
    try:
        with suppress(FileExistsError):
            os.link(ready, path)  # and not rename: of two hubs that begin at once, both take the first one's
    finally:
        os.unlink(ready)


@dataclass
class Grant:
    """What a token opens.

    Attributes:
        name: of its line; empty for the token that opens all.
        reads: everything that was recorded, and the reports of progress that belong to reading.
        writes: the topics to which it may commit and publish; None: it may not.
        queries: the names that came with it.
    """

    name: str = ""
    reads: bool = True
    writes: Filter | None = field(default_factory=Filter)
    queries: set[str] = field(default_factory=set)

    def may_write(self, topic: bytes) -> bool:
        """Whether it may commit and publish to a topic."""
        if self.writes is None or self.writes.everything:
            return self.writes is not None
        return self.writes.chooses(topic.decode("utf-8", "surrogateescape"))

    def own(self, query: str) -> str:
        """Returns the name under which a query of this token is kept, so that it can't pass for somebody else's.

        Raises:
            ArgumentError: there are too many.
        """
        if not self.name:
            return query
        if query not in self.queries and len(self.queries) >= MOST_QUERIES:
            raise ArgumentError(
                f"query: the token {self.name!r} has brought in {MOST_QUERIES} names of queries already; go on with "
                "one of them, or take a line with another name."
            )
        self.queries.add(query)
        return f"{query}@{self.name}"


class Tokens:
    """The tokens of a journal. `look` waits for the disk.

    Args:
        folder: of the journal.
        queries: gives the names that have come so far, of all tokens.

    Attributes:
        fault: what is wrong with a file, one sentence; empty when all is well. The tokens read before stay in use.
    """

    def __init__(self, folder: Path, queries: Callable[[], Iterable[str]] = lambda: ()) -> None:
        self.fault = self._told = ""
        self._folder, self._queries = folder, queries
        self._all: bytes | None = None
        self._grants: dict[bytes, Grant] = {}
        self._stamp: _Stamp | None = None
        self._looked_s = -LOOK_S

    @property
    def is_due(self) -> bool:
        """Whether `look` has something to do."""
        return time.monotonic() - self._looked_s >= LOOK_S

    def look(self) -> None:
        """Reads the files again if that is due and they have changed; only `fault` tells what goes wrong."""
        if not self.is_due:
            return
        try:
            self._all = self._all or _digest(journal_token(self._folder))
            stamp = _stamp(self._folder / TOKENS_FILE)
            if stamp != self._stamp:
                self._grants = _read(self._folder / TOKENS_FILE, self._names()) if stamp else {}
            self._stamp, self.fault = stamp, ""
        except JournalError as error:
            self.fault = str(error)
        self._looked_s = time.monotonic()  # only now: who comes first with others waits for it as they do

    def _names(self) -> dict[str, set[str]]:
        """Returns the names of queries by that of their token."""
        names = {grant.name: grant.queries for grant in self._grants.values()}
        for kept in self._queries():
            query, at, name = kept.rpartition("@")
            if at:
                names.setdefault(name, set()).add(query)
        return names

    def news(self) -> str:
        """Returns `fault` when nobody has been told of it yet."""
        told, self._told = self._told, self.fault
        return self.fault if self.fault != told else ""

    def grant(self, shown: str) -> Grant | None:
        """Returns what a token opens; None when it opens nothing."""
        digest = _digest(shown)
        return _EVERYTHING if digest == self._all else self._grants.get(digest)


_EVERYTHING = Grant()


def _digest(token: str) -> bytes:
    """How long a comparison takes tells nothing of a token when digests are compared."""
    return blake2b(token.encode("utf-8", "surrogateescape"), digest_size=32).digest()


def _stamp(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JournalError(f"{path} can't be read: {error.strerror}; give this user the file.") from None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path, queries: Mapping[str, set[str]]) -> dict[bytes, Grant]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise JournalError(f"{path} can be read by others; chmod 600 it.")
            text = file.read(MOST_BYTES + 1).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise JournalError(f"{path} can't be read: {error}.") from None
    if len(text) > MOST_BYTES:
        raise JournalError(f"{path} has more than {MOST_BYTES} bytes.")
    found: dict[bytes, Grant] = {}
    for token, grant in _lines(path, text):
        if grant.name in {each.name for each in found.values()} or _digest(token) in found:
            raise JournalError(f"{path}: the name {grant.name!r} or its token is there twice.")
        grant.queries = queries.get(grant.name, set())
        found[_digest(token)] = grant
    return found


def _lines(path: Path, text: str) -> Iterator[tuple[str, Grant]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            try:
                yield words[1] if len(words) > 1 else "", _grant(words)
            except ArgumentError as error:
                raise JournalError(f"{path}, line {number}: {str(error).rstrip('.')}.") from None


def _grant(words: list[str]) -> Grant:
    """Reads a line; what is wrong with it is told without the token."""
    name, token, rights = words[0], "".join(words[1:2]), words[2:]
    if not _NAME.fullmatch(name):
        raise ArgumentError("it begins with a name of up to 32 letters, digits, '-' and '_'")
    if len(token) < SHORTEST_TOKEN:
        raise ArgumentError(f"behind {name!r} comes a token of {SHORTEST_TOKEN} characters or more")
    reads = rights[:1] == ["read"]
    rest = rights[reads:]
    if len(rest) > MOST_TOPICS + 1:
        raise ArgumentError(f"{name!r} has more than {MOST_TOPICS} topics: use wildcards, or several tokens")
    if not rights or (rest and rest[0] != "write"):
        raise ArgumentError(f"{name!r} may 'read', 'write' or 'read write', and behind write there may be topics")
    return Grant(name, reads, Filter(rest[1:] or ["#"]) if rest else None)
