"""HTTP service of journals: /rtl/journal/, for readers and pipelines without access to the hub's disk.

    GET  <name>/manifest             segments, and the root of the manifest; see `JournalListing`
    GET  <name>/manifest/<page>      a page of the manifest: a few hundred compacted files
    GET  <name>/end                  by node, the number of the next row
    GET  <name>/end?after=&wait_s=   the same, once there are rows after `after` ({node: number})
    GET  <name>/stats                the writer's counters
    GET  <name>/wal/<node>/<file>    a segment or its index; `Range` with one span
    GET  <name>/data/<path>          a compacted file; `Range` with one span
    POST <name>/commit?query=&batch= the rows of a micro-batch, stored and published exactly once
    POST <name>/stage?query=&batch=&part=  rows that are committed later, by the name of their part
    POST <name>/seal?query=&batch=   names of the parts of a micro-batch; returns the names of the first request
    POST <name>/commit?query=&batch=&of=&part=  commits the rows of a part of query `of`
    GET  <name>/committed?query=     the number of a query's last committed micro-batch; -1 without one
    POST <name>/publish              rows, at least once
    POST <name>/progress             the position of a query: retention keeps the rows after it

Each request needs a token of the journal (`Authorization: Bearer`). An error is one sentence in plain text.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, Protocol

from smqrt.errors import ArgumentError, JournalError
from smqrt.http.access import NothingPrivate
from smqrt.http.disk import DiskIo
from smqrt.http.forms import parse_parameters
from smqrt.http.headers import HttpError, Span, parse_ranges
from smqrt.http.message import Request
from smqrt.http.resources import IoError
from smqrt.http.tree import Directory
from smqrt.journal import readers
from smqrt.journal.announcer import JournalEnds, JournalListing, ServedJournal
from smqrt.journal.commit import MAX_COMMIT_ROWS, OutRow, RowDecoder
from smqrt.journal.committed import MAX_PARTS, StagedResults, checked_part
from smqrt.journal.durability import Unconfirmed
from smqrt.journal.files import IS_MISSING, MIN_TOKEN_CHARS, journal_token
from smqrt.journal.parquet_files import RETIRED
from smqrt.journal.planning import Filter
from smqrt.journal.remote import MAX_WAIT_S
from smqrt.loop.scheduling import Turn
from smqrt.loop.threads import in_thread
from smqrt.wire.smq import MAX_PAYLOAD_BYTES

# ---- Access tokens of a journal over HTTP, and their rights.
#
# The file `token` grants all rights, a line of the file `tokens` only the rights that it names:
#
#     # name       token               rights
#     dashboards   h2Vx…               read
#     site1        9aBz…               read write site1/# shared/+/state
#
# Both files are in the journal's folder. `tokens` is written by hand, and read again when it changes.

TOKENS_FILE = "tokens"
TOKENS_CHECK_S = 1.0
"""Time between two checks of the file `tokens` for changes."""
MAX_TOKENS_BYTES = 64 << 10
MAX_TOPICS = 32
"""Maximum number of topics in a line: a topic name of 64 KiB is compared with all of them without a pause."""
MAX_QUERIES = 10_000
"""Maximum number of query names of a token, including stored ones: each is in memory and on disk."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)
_FileVersion = tuple[int, int, int]


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
        return self.writes.matches_uncached(topic.decode("utf-8", "surrogateescape"))

    def stored_name(self, query: str) -> str:
        """Return the name under which a query of this token is stored, which no other token can use.

        Raises:
            ArgumentError: the token has created too many names.
        """
        if not self.name:
            return query
        if query not in self.queries and len(self.queries) >= MAX_QUERIES:
            raise ArgumentError(
                f"query: limit reached: the token {self.name!r} has created {MAX_QUERIES} query names; use one of "
                f"them, or add a line with another name to the file {TOKENS_FILE}."
            )
        self.queries.add(query)
        return f"{query}@{self.name}"


class Tokens:
    """The tokens of a journal. `refresh` blocks on the disk.

    Args:
        folder: the journal's folder.
        queries: returns the stored query names of all tokens.

    Attributes:
        fault: a sentence about an invalid file; empty when both are valid. Until then the earlier tokens remain in use.
    """

    def __init__(self, folder: Path, queries: Callable[[], Iterable[str]] = lambda: ()) -> None:
        self.fault = self._reported = ""
        self._folder, self._queries = folder, queries
        self._all: bytes | None = None
        self._grants: dict[bytes, Grant] = {}
        self._version: _FileVersion | None = None
        self._checked_s = -TOKENS_CHECK_S

    @property
    def is_due(self) -> bool:
        """Whether `TOKENS_CHECK_S` have passed since the last `refresh`."""
        return time.monotonic() - self._checked_s >= TOKENS_CHECK_S

    def refresh(self) -> None:
        """Read the files again if they have changed, at most every `TOKENS_CHECK_S`. Errors are stored in `fault`."""
        if not self.is_due:
            return
        try:
            self._all = self._all or _digest(journal_token(self._folder))
            version = _file_version(self._folder / TOKENS_FILE)
            if version is None:
                self._grants = {}
            elif version != self._version:
                names = {grant.name: grant.queries for grant in self._grants.values()}
                for stored in self._queries():
                    query, at, name = stored.rpartition("@")
                    if at:
                        names.setdefault(name, set()).add(query)
                self._grants = _read(self._folder / TOKENS_FILE, names)
            self._version, self.fault = version, ""
        except JournalError as error:
            self.fault = str(error)
        self._checked_s = time.monotonic()  # at the end: requests that arrive during the first refresh wait for it, too

    def new_fault(self) -> str:
        """Return `fault` if it is new since the last call, else an empty string."""
        before, self._reported = self._reported, self.fault
        return self.fault if self.fault != before else ""

    def grant(self, token: str) -> Grant | None:
        """Return the rights of a token; None for an unknown token."""
        digest = _digest(token)
        return _ALL_RIGHTS if digest == self._all else self._grants.get(digest)


_ALL_RIGHTS = Grant()


def _digest(token: str) -> bytes:
    """Return the digest of a token. How long a comparison of digests takes reveals nothing about the token."""
    return blake2b(token.encode("utf-8", "surrogateescape"), digest_size=32).digest()


def _file_version(path: Path) -> _FileVersion | None:
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
            text = file.read(MAX_TOKENS_BYTES + 1).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise JournalError(f"{path} can't be read: {error}.") from None
    if len(text) > MAX_TOKENS_BYTES:
        raise JournalError(f"{path} has more than {MAX_TOKENS_BYTES} bytes; remove unused tokens.")
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
            raise JournalError(
                f"{path}, line {number}: the name {grant.name!r} or its token occurs twice; each line needs its own."
            )
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


log = logging.getLogger("smqrt.journal")

MAX_BODY_BYTES = 4 << 20
RETRY_S = 1
_PIECE_BYTES = 1 << 20  # files are read in pieces, so that a large file takes little memory
_MAX_PROGRESS_BYTES = 64 << 10
_MAX_SEAL_BYTES = 512 << 10
_FILE = re.compile(
    r"wal/[\w.-]+/\d{20}\.(?:arrows|idx)|manifest/[\w.-]+\.json|data(?:/[\w%=,+-][\w%=,+.-]*)+\.parquet", re.ASCII
)
_HOW_TO_AUTHENTICATE = 'send "Authorization: Bearer TOKEN" with the content of the file token in the journal\'s folder'
_READ_METHODS, _WRITE_METHODS = ("GET", "HEAD"), ("POST",)
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` would create one for each answer
_WRITE_ACTIONS = ("commit", "publish", "stage", "seal")


class OpenJournal(ServedJournal, Protocol):
    """A served journal: `smqrt.journal.writer.JournalWriter`."""

    def commit(self, query: str, batch: int, rows: list[OutRow]) -> bool:
        """Store and publish the rows of a micro-batch; return False when it was committed before."""

    def committed(self, query: str) -> int:
        """Return the last known batch of a query; -1 without one."""

    def read_other_commits(self) -> None:
        """Read the commits to other hubs of the folder."""

    def queries(self) -> Iterable[str]:
        """Return the names of the queries with commits."""

    def publish(self, rows: list[OutRow]) -> None:
        """Store and publish rows."""

    def stats(self) -> dict[str, int]:
        """Return the counters."""


class RequestRejected(Exception):
    """An error that is sent as a status and one sentence.

    Args:
        status: the HTTP status.
        sentence: the body.
        headers: further headers, with underscores for hyphens.
    """

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _ServedState(NamedTuple):
    """The state of a served journal."""

    journal: OpenJournal
    listing: JournalListing
    ends: JournalEnds
    staged: StagedResults


class JournalService(Directory):
    """The directory of served journals.

    Args:
        opened: the journals by name; read for each request.
        max_body_bytes: maximum size of a commit, bytes.
        is_shutting_down: returns whether the server shuts down; then requests don't wait for rows.
    """

    def __init__(
        self,
        opened: Mapping[str, OpenJournal],
        max_body_bytes: int = MAX_BODY_BYTES,
        is_shutting_down: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__("journal")
        self._opened, self._is_shutting_down = opened, is_shutting_down
        self._max_body_bytes = max_body_bytes
        self._tokens: dict[str, tuple[OpenJournal, Tokens]] = {}
        self._states: dict[str, _ServedState] = {}
        self._actions: dict[str, tuple[tuple[str, ...], Callable[[Request, OpenJournal, Grant], None]]] = {
            "manifest": (_READ_METHODS, self._manifest),
            "end": (_READ_METHODS, self._end),
            "stats": (_READ_METHODS, self._stats),
            "commit": (_WRITE_METHODS, self._commit),
            "stage": (_WRITE_METHODS, self._stage),
            "seal": (_WRITE_METHODS, self._seal),
            "publish": (_WRITE_METHODS, self._publish),
            "progress": (_WRITE_METHODS, self._progress),
            "committed": (_READ_METHODS, self._committed),
        }
        self.setfunc(self._answer)

    def _answer(self, request: Request, relpath: str) -> None:
        name, _, rest = relpath.partition("/")
        try:
            if not name:
                _check_method(request, _READ_METHODS)
                _send_json(request, {"journals": self._journal_names(request)})
                return
            journal, grant = self._find_journal(request, name)
            methods, action = self._actions.get(rest, (_READ_METHODS, partial(self._file, rest)))
            _check_method(request, methods)
            right, has = ("write", grant.writes) if rest in _WRITE_ACTIONS else ("read", grant.reads)
            if not has and not (rest == "committed" and grant.writes):
                lack = f"its line in the file {TOKENS_FILE} lacks {right!r}"
                raise RequestRejected(403, f"The token {grant.name!r} may not {right}: {lack}.")
            action(request, journal, grant)
        except RequestRejected as rejection:
            _reject(request, rejection.status, str(rejection), rejection.headers)
        except ArgumentError as error:
            _reject(request, 400, str(error), {})
        except JournalError as error:
            _reject(request, 503, str(error), {"Retry-After": str(RETRY_S)})
        except HttpError as error:  # of the body
            request.response.close = error.close
            _reject(request, error.status, f"{error}.", error.headers)

    # ---- authorization

    def _journal_names(self, request: Request) -> list[str]:
        names = [name for name, journal in list(self._opened.items()) if self._grant_of(request, name, journal)]
        return names or _unauthorized()

    def _find_journal(self, request: Request, name: str) -> tuple[OpenJournal, Grant]:
        journal = self._opened.get(name)
        if journal is None:
            if name in self._tokens and self._tokens[name][1].grant(_bearer_token(request)):  # it was open earlier
                raise JournalError(f"Journal {name!r} is closed: its application is stopping or reloading; try again.")
            known = ", ".join(self._journal_names(request))
            raise RequestRejected(404, f"There is no journal {name!r} here; this token gives access to: {known}.")
        return journal, self._grant_of(request, name, journal) or _unauthorized()

    def _grant_of(self, request: Request, name: str, journal: OpenJournal) -> Grant | None:
        """Return the rights of the request's token in a journal."""
        owner, tokens = self._tokens.get(name, (None, None))
        if tokens is None or owner is not journal:  # a journal of this name was closed and opened again
            _, tokens = self._tokens[name] = journal, Tokens(journal.path, partial(_queries, journal))
        if tokens.is_due:
            in_thread(tokens.refresh)
            if fault := tokens.new_fault():  # for the operator only: the client is not authenticated yet
                log.error("%s", fault)
        return tokens.grant(_bearer_token(request))

    # ---- reading

    def _manifest(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        _send_tagged(request, *in_thread(self._state(journal).listing.text))

    def _end(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        ends = self._state(journal).ends
        if not request.query:
            found = ends.now()
        else:
            values = _parameters(request)
            try:
                after = {str(node): int(seq) for node, seq in json.loads(values.get("after", "{}")).items()}
                wait_s = float(values.get("wait_s", "0"))
            except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):  # OverflowError: 1e999
                raise ArgumentError(
                    'end: after must be an object such as {"n1": 1000}, and wait_s a number of seconds.'
                ) from None
            found = ends.after(after, max(0.0, min(wait_s, MAX_WAIT_S)))
        _finish(request, "application/json", _as_json({"end": found}))

    def _state(self, journal: OpenJournal) -> _ServedState:
        """Return the state of a journal, created at the first request."""
        name = str(journal.path)
        found = self._states.get(name)
        if found is None or found.journal is not journal:
            ends = JournalEnds(journal, lambda: journal in self._opened.values() and not self._is_shutting_down())
            listing, staged = JournalListing(journal.path), StagedResults(journal.path, journal.committed)
            found = self._states[name] = _ServedState(journal, listing, ends, staged)
        return found

    def _stats(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        _send_json(request, journal.stats())

    def _file(self, rest: str, request: Request, journal: OpenJournal, grant: Grant) -> None:
        if not _FILE.fullmatch(rest) or ".." in rest:
            raise RequestRejected(404, f"There is no {rest!r}; the manifest of the journal lists all files.")
        try:
            file = in_thread(_open_file, journal.path, rest)
        except IoError:
            raise RequestRejected(404, f"{rest} was compacted or has expired; read the manifest again.") from None
        with file:
            _send_file(request, file.fileno())

    # ---- writing

    def _commit(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        name, batch, values = _batch_of(request)
        if "part" not in values:
            name, rows = grant.stored_name(name), list(self._rows(request, grant))
            is_new = journal.commit(name, batch, rows)
        else:
            staged, query = self._state(journal).staged, readers.checked_query(values.get("of"))
            name, query = grant.stored_name(name), grant.stored_name(query)
            rows = []
            is_new = journal.committed(name) < batch
            if is_new:
                part = checked_part(values["part"])
                rows = list(_decode_rows(_staged_pieces(request, staged, query, batch, part), grant))
                is_new = journal.commit(name, batch, rows)
            if name == query:  # the last part has the query's own name
                in_thread(staged.forget, query, batch)
        _send_json(request, {"stored": is_new, "rows": len(rows) if is_new else 0})

    def _stage(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        query, batch, values = _batch_of(request)
        query, part, pieces = grant.stored_name(query), checked_part(values.get("part")), list[bytes]()
        rows = sum(1 for _ in self._rows(request, grant, pieces))
        in_thread(self._state(journal).staged.put, query, batch, part, b"".join(pieces))
        _send_json(request, {"rows": rows})

    def _seal(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        query, batch, _ = _batch_of(request)
        query, body = grant.stored_name(query), request.body(_MAX_SEAL_BYTES)
        try:
            names = json.loads(body)
        except (ValueError, RecursionError):
            names = None
        if not isinstance(names, list) or not 0 < len(names) <= MAX_PARTS:
            raise ArgumentError(f"parts: the body is not a JSON list of 1 to {MAX_PARTS} names of parts.")
        parts = [checked_part(name) for name in names]
        journal.read_other_commits()  # another hub may have committed this micro-batch already
        if journal.committed(query) >= batch:
            parts = []
        else:
            parts = in_thread(self._state(journal).staged.seal, query, batch, parts)
        _send_json(request, {"parts": parts})

    def _committed(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        query = readers.checked_query(_parameters(request).get("query"))
        journal.read_other_commits()  # another worker may have the last commit
        _send_json(request, {"batch": journal.committed(grant.stored_name(query))})

    def _publish(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        rows = list(self._rows(request, grant))
        try:
            journal.publish(rows)
        except Unconfirmed:  # not a 503: a client that retries would publish the rows twice
            raise RequestRejected(
                500, "The journal was closed; whether the rows are on its disk is not known."
            ) from None
        _send_json(request, {"rows": len(rows)})

    def _progress(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        report = readers.parse_report(request.body(_MAX_PROGRESS_BYTES))
        report["query"] = grant.stored_name(report["query"])
        in_thread(readers.save_report, journal.path, report)
        _send_json(request, {})

    def _rows(self, request: Request, grant: Grant, kept: list[bytes] | None = None) -> Iterator[OutRow]:
        """Return the rows of a body, and append its pieces to `kept`."""
        limit = self._max_body_bytes
        too_large = f"The rows have more than {limit} bytes; commit fewer at once."
        if (request.content_length or 0) > limit:
            raise RequestRejected(413, too_large)

        def pieces() -> Iterator[bytes]:
            size = 0
            for piece in request.chunks():
                size += len(piece)
                if size > limit:  # a chunked body has no Content-Length
                    raise RequestRejected(413, too_large)
                request.reader().hold(len(piece))
                if kept is not None:
                    kept.append(piece)
                yield piece

        return _decode_rows(pieces(), grant)


def _decode_rows(pieces: Iterable[bytes], grant: Grant) -> Iterator[OutRow]:
    decoder, turn = RowDecoder(MAX_PAYLOAD_BYTES), Turn()
    for piece in pieces:
        for row in decoder.feed(piece):
            if decoder.count == MAX_COMMIT_ROWS:
                raise RequestRejected(413, f"There are more than {MAX_COMMIT_ROWS} rows; commit fewer at once.")
            if not grant.may_write(row[0]):
                shown = repr(row[0][:100].decode("utf-8", "replace"))
                rule = f"its line in the file {TOKENS_FILE} doesn't have this topic"
                raise RequestRejected(403, f"The token {grant.name!r} may not write to {shown}: {rule}.")
            yield row
            turn.yield_if_due()
    decoder.finish()


def _staged_pieces(request: Request, staged: StagedResults, query: str, batch: int, part: str) -> Iterator[bytes]:
    """Yield the pieces of staged rows, which count as memory of the request."""
    with in_thread(staged.open, query, batch, part) as file:
        while piece := in_thread(file.read, _PIECE_BYTES):
            request.reader().hold(len(piece))
            yield piece


def _open_file(folder: Path, name: str) -> IO[bytes]:
    try:
        io = DiskIo(folder)  # raises IoError when the folder is missing
        io.private = NothingPrivate()  # the pattern `_FILE` allows only the journal's files
        try:
            return io.open_published(name)
        except IoError:
            if not name.startswith("data/"):
                raise
            # Merged after the client read the manifest: the file is available until its grace period is over.
            return io.open_published(f"{RETIRED}/{name.rpartition('/')[2]}")
    except IoError:
        if not folder.is_dir():
            raise JournalError(f"{folder} {IS_MISSING}") from None
        raise


def _queries(journal: OpenJournal) -> Iterator[str]:
    """Yield the names of queries that have committed or reported. Reads the disk."""
    yield from journal.queries()
    yield from readers.reported_queries(journal.path)


def _bearer_token(request: Request) -> str:
    """Return the token of a request; empty without one."""
    scheme, _, token = (request.get("authorization") or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _unauthorized() -> NoReturn:
    raise RequestRejected(401, f"The token is wrong or missing; {_HOW_TO_AUTHENTICATE}.", WWW_Authenticate="Bearer")


def _check_method(request: Request, methods: tuple[str, ...]) -> None:
    if request.method not in methods:
        allowed = ", ".join(methods)
        raise RequestRejected(405, f"{request.method} is not allowed here; use {allowed}.", Allow=allowed)


def _batch_of(request: Request) -> tuple[str, int, dict[str, str]]:
    """Return the query, the batch and all parameters of a request."""
    values = _parameters(request)
    query, batch = readers.checked_query(values.get("query")), values.get("batch", "")
    if not re.fullmatch(r"[0-9]{1,18}", batch):
        raise ArgumentError(f"batch: {batch!r} is not a number; send the number of the query's batch.")
    return query, int(batch), values


def _reject(request: Request, status: int, sentence: str, headers: Mapping[str, str]) -> None:
    if request.response.committed:
        raise HttpError(500, sentence, close=True)
    request.response.reset()
    request.response.status = status
    for name, value in headers.items():
        request.response.headers.set(name, value)
    _finish(request, "text/plain; charset=utf-8", (sentence.replace("\n", " ") + "\n").encode())


def _send_json(request: Request, values: Mapping[str, object]) -> None:
    body = _as_json(values)
    _send_tagged(request, body, f'"{blake2b(body, digest_size=12).hexdigest()}"')


def _as_json(values: Mapping[str, object]) -> bytes:
    return _ENCODER.encode(values).encode()


def _parameters(request: Request) -> dict[str, str]:
    pairs = parse_parameters(request.query.encode("ascii"))
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in pairs}


def _send_tagged(request: Request, body: bytes, tag: str) -> None:
    request.response.headers.set("ETag", tag)
    if request.get("if-none-match") == tag:
        request.response.status = 304
        body = b""
    _finish(request, "application/json", body)


def _finish(request: Request, kind: str, body: bytes) -> None:
    request.response.headers.set("Content-Type", kind)
    request.response.headers.set("Cache-Control", "no-store")
    request.response.end(body)


def _send_file(request: Request, fd: int) -> None:
    """Send a file, or one span of it. The file may grow while it is sent."""
    headers, size = request.response.headers, os.fstat(fd).st_size
    spans = parse_ranges(request.get("range") or "", size)
    span = Span(0, size) if spans is None or len(spans) > 1 else spans[0] if spans else None
    if span is None:
        raise RequestRejected(
            416, f"The file ends at {size}; this range is after its end.", Content_Range=f"bytes */{size}"
        )
    if spans is not None and len(spans) == 1:
        request.response.status = 206
        headers.set("Content-Range", f"bytes {span.first}-{span.end - 1}/{size}")
    headers.set("Content-Type", "application/octet-stream")
    headers.set("Content-Length", str(len(span)))
    headers.set("Accept-Ranges", "bytes")
    headers.set("Cache-Control", "no-store")
    if request.method != "HEAD":
        at = span.first
        while at < span.end:
            piece = in_thread(os.pread, fd, min(span.end - at, _PIECE_BYTES), at)
            if not piece:
                break  # the file was truncated: the server closes the connection, since Content-Length is not reached
            request.response.write(piece)
            at += len(piece)
    request.response.end()
