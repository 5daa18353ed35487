"""The journals of this process over HTTP: /rtl/journal/, for pipelines that don't share the hub's disk.

    GET  <name>/manifest             segments, and the root of the manifest; see `JournalListing`
    GET  <name>/manifest/<page>      what is known of some hundred compacted files
    GET  <name>/end, <name>/stats    where each node ends; the writer's counters
    GET  <name>/end?after=&wait_s=   the same, when there is more than `after` ({node: number})
    GET  <name>/wal/<node>/<file>    a segment or its index, <name>/data/...: a compacted file; `Range` with one span
    POST <name>/commit?query=&batch= the rows of a micro-batch, stored and published exactly once
    POST <name>/stage?query=&batch=&part=  rows that wait until they are committed by the name of their part
    POST <name>/seal?query=&batch=   which parts are a micro-batch: the names of those that were told first
    POST <name>/commit?query=&batch=&of=&part=  as above, with the rows of a part of query `of`
    GET  <name>/committed?query=     the number of a query's last micro-batch that is stored, -1: none
    POST <name>/publish              rows, without that promise
    POST <name>/progress             how far a query has come: retention goes no further

Every request shows the journal's token (`Authorization: Bearer`). What is refused is told in one plain-text sentence.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from smqrt.journal.commit import MOST_ROWS, OutRow, RowDecoder
from smqrt.journal.committed import MOST_PARTS, StagedResults, checked_part
from smqrt.journal.durability import Unconfirmed
from smqrt.journal.files import MOVED
from smqrt.journal.parquet_files import RETIRED
from smqrt.journal.remote import MOST_WAIT_S
from smqrt.journal.tokens import TOKENS_FILE as TOKENS
from smqrt.journal.tokens import Grant, Tokens
from smqrt.loop.greenlet_pool import in_thread
from smqrt.loop.scheduling import Turn
from smqrt.wire.smq import MAX_PAYLOAD_BYTES

log = logging.getLogger("smqrt.journal")

BODY_BYTES = 4 << 20
RETRY_S = 1
_PIECE = 1 << 20
_PROGRESS_BYTES = 64 << 10
_SEAL_BYTES = 512 << 10
_FILE = re.compile(
    r"wal/[\w.-]+/\d{20}\.(?:arrows|idx)|manifest/[\w.-]+\.json|data(?:/[\w%=,+-][\w%=,+.-]*)+\.parquet", re.ASCII
)
_UNNAMED = 'send "Authorization: Bearer TOKEN" with what the file token in the folder of the journal holds'
_READS, _WRITES = ("GET", "HEAD"), ("POST",)
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` makes one for each answer
_COMMITS = ("commit", "publish", "stage", "seal")


class OpenJournal(ServedJournal, Protocol):
    """What is served: `smqrt.journal.writer.JournalWriter`."""

    def commit(self, query: str, batch: int, rows: list[OutRow]) -> bool:
        """Store and publish the rows of a micro-batch; False when that was done before."""

    def committed(self, query: str) -> int:
        """Return the last batch of a query that is known to be stored; -1 when there is none."""

    def learn(self) -> None:
        """Take note of what was committed to other hubs of the folder."""

    def queries(self) -> Iterable[str]:
        """Return the names under which there are commits."""

    def publish(self, rows: list[OutRow]) -> None:
        """Store and publish rows."""

    def stats(self) -> dict[str, int]:
        """Return the counters."""


class RequestRefused(Exception):
    """A request that is answered with a status and one sentence."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class _Asked(NamedTuple):
    """A journal, and what is kept of it for those who ask."""

    journal: OpenJournal
    listing: JournalListing
    ends: JournalEnds
    staged: StagedResults


class JournalService(Directory):
    """The directory that serves journals.

    Args:
        opened: the journals by name, looked at with every request.
        body_bytes: the longest commit that is taken.
        is_ending: whether the server ends: nobody waits for more then, and the request does not hold it.
    """

    def __init__(
        self,
        opened: Mapping[str, OpenJournal],
        body_bytes: int = BODY_BYTES,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__("journal")
        self._opened, self._is_ending = opened, is_ending
        self._body_bytes = body_bytes
        self._tokens: dict[str, tuple[OpenJournal, Tokens]] = {}
        self._asked: dict[str, _Asked] = {}
        self._actions: dict[str, tuple[tuple[str, ...], Callable[[Request, OpenJournal, Grant], None]]] = {
            "manifest": (_READS, self._manifest),
            "end": (_READS, self._end),
            "stats": (_READS, self._stats),
            "commit": (_WRITES, self._commit),
            "stage": (_WRITES, self._stage),
            "seal": (_WRITES, self._seal),
            "publish": (_WRITES, self._publish),
            "progress": (_WRITES, self._progress),
            "committed": (_READS, self._committed),
        }
        self.setfunc(self._answer)

    def _answer(self, request: Request, relpath: str) -> None:
        try:
            self._route(request, relpath)
        except RequestRefused as refused:
            _say(request, refused.status, str(refused), refused.headers)
        except ArgumentError as error:
            _say(request, 400, str(error), {})
        except JournalError as error:
            _say(request, 503, str(error), {"Retry-After": str(RETRY_S)})
        except HttpError as error:  # of the body
            request.response.close = error.close
            _say(request, error.status, f"{error}.", error.headers)

    def _route(self, request: Request, relpath: str) -> None:
        name, _, rest = relpath.partition("/")
        if not name:
            _allow(request, _READS)
            _give(request, {"journals": self._names(request)})
            return
        journal, grant = self._permitted(request, name)
        methods, action = self._actions.get(rest, (_READS, partial(self._file, rest)))
        _allow(request, methods)
        _check(grant, rest)
        action(request, journal, grant)

    # ---- who may

    def _names(self, request: Request) -> list[str]:
        names = [name for name, journal in list(self._opened.items()) if self._grant(request, name, journal)]
        return names or _unauthorized()

    def _permitted(self, request: Request, name: str) -> tuple[OpenJournal, Grant]:
        journal = self._opened.get(name)
        if journal is None and self._knew(request, name):
            raise JournalError(
                f"Journal {name!r} is closed at the moment: its application stops or reloads; try again."
            )
        if journal is None:
            known = ", ".join(self._names(request))
            raise RequestRefused(404, f"There is no journal {name!r} here; with this token there are: {known}.")
        return journal, self._grant(request, name, journal) or _unauthorized()

    def _grant(self, request: Request, name: str, journal: OpenJournal) -> Grant | None:
        """Return what the token of the request opens in this journal."""
        of, tokens = self._tokens.get(name, (None, None))
        if tokens is None or of is not journal:
            _, tokens = self._tokens[name] = journal, Tokens(journal.path, partial(_queries, journal))
        if tokens.is_due:
            in_thread(tokens.look)
            if told := tokens.news():  # for the operator, not for who has shown nothing yet
                log.error("%s", told)
        return tokens.grant(_shown(request))

    def _knew(self, request: Request, name: str) -> bool:
        """Return whether the request shows a token of a journal that was open: who may read it is told to come again."""
        return name in self._tokens and self._tokens[name][1].grant(_shown(request)) is not None

    # ---- reading

    def _manifest(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        _send(request, *in_thread(self._of(journal).listing.text))

    def _end(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        ends = self._of(journal).ends
        found = ends.after(*_wait(request)) if request.query else ends.now()
        _finish(request, "application/json", _as_json({"end": found}))

    def _of(self, journal: OpenJournal) -> _Asked:
        """Return what is kept of a journal for those who ask."""
        name = str(journal.path)
        found = self._asked.get(name)
        if found is None or found.journal is not journal:
            ends = JournalEnds(journal, lambda: journal in self._opened.values() and not self._is_ending())
            asked = _Asked(journal, JournalListing(journal.path), ends, StagedResults(journal.path, journal.committed))
            found = self._asked[name] = asked
        return found

    def _stats(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        _give(request, journal.stats())

    def _file(self, rest: str, request: Request, journal: OpenJournal, grant: Grant) -> None:
        if not _FILE.fullmatch(rest) or ".." in rest:
            raise RequestRefused(404, f"There is no {rest!r}; the manifest of the journal lists what there is.")
        try:
            file = in_thread(_opened, journal.path, rest)
        except IoError:
            raise RequestRefused(
                404, f"{rest} is not there any more: compacted or retired; read the manifest anew."
            ) from None
        with file:
            _send_file(request, file.fileno())

    # ---- writing

    def _commit(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        query, batch, values = _batch(request)
        if "part" in values:
            self._commit_part(request, journal, grant)
            return
        query, rows = grant.own(query), list(self._rows(request, grant))
        _stored(request, journal.commit(query, batch, rows), rows)

    def _commit_part(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        name, batch, values = _batch(request)
        staged, query = self._of(journal).staged, readers.checked_query(values.get("of"))
        name, query = grant.own(name), grant.own(query)
        rows: list[OutRow] = []
        stored = journal.committed(name) < batch
        if stored:
            part = checked_part(values["part"])
            rows = list(_decoded(_staged(request, staged, query, batch, part), grant))
            stored = journal.commit(name, batch, rows)
        if name == query:  # the last one
            in_thread(staged.forget, query, batch)
        _stored(request, stored, rows)

    def _stage(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        query, batch, values = _batch(request)
        query, part, pieces = grant.own(query), checked_part(values.get("part")), list[bytes]()
        rows = sum(1 for _ in self._rows(request, grant, pieces))
        in_thread(self._of(journal).staged.put, query, batch, part, b"".join(pieces))
        _give(request, {"rows": rows})

    def _seal(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        query, batch, _ = _batch(request)
        query, parts = grant.own(query), _parts(request.body(_SEAL_BYTES))
        journal.learn()  # else other parts than the committed ones are decided on
        known = journal.committed(query) >= batch
        _give(request, {"parts": [] if known else in_thread(self._of(journal).staged.seal, query, batch, parts)})

    def _committed(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        query = readers.checked_query(_values(request).get("query"))
        journal.learn()  # the last one may have gone to another worker
        _give(request, {"batch": journal.committed(grant.own(query))})

    def _publish(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        rows = list(self._rows(request, grant))
        try:
            journal.publish(rows)
        except Unconfirmed:  # and no 503: who asks again would publish them twice
            raise RequestRefused(500, "The journal ends; whether its disk has kept the rows is not known.") from None
        _give(request, {"rows": len(rows)})

    def _progress(self, request: Request, journal: OpenJournal, grant: Grant) -> None:
        report = readers.parse_report(request.body(_PROGRESS_BYTES))
        report["query"] = grant.own(report["query"])
        in_thread(readers.save_report, journal.path, report)
        _give(request, {})

    def _rows(self, request: Request, grant: Grant, kept: list[bytes] | None = None) -> Iterator[OutRow]:
        """Yield the rows of a body; its pieces are put into `kept`."""
        if (request.content_length or 0) > self._body_bytes:
            raise _too_large(self._body_bytes)
        return _decoded(_counted(request, self._body_bytes, kept), grant)


def _decoded(pieces: Iterable[bytes], grant: Grant) -> Iterator[OutRow]:
    decoder, turn = RowDecoder(MAX_PAYLOAD_BYTES), Turn()
    for piece in pieces:
        for row in decoder.feed(piece):
            if decoder.count == MOST_ROWS:
                raise RequestRefused(413, f"There are more than {MOST_ROWS} rows; commit fewer at once.")
            _check_topic(grant, row[0])
            yield row
            turn.yield_if_due()
    decoder.finish()


def _staged(request: Request, staged: StagedResults, query: str, batch: int, part: str) -> Iterator[bytes]:
    """Yield the rows that were staged, which count like a body."""
    with in_thread(staged.open, query, batch, part) as file:
        while piece := in_thread(file.read, _PIECE):
            request.hold(len(piece))
            yield piece


def _counted(request: Request, limit: int, kept: list[bytes] | None) -> Iterator[bytes]:
    size = 0
    for piece in request.chunks():
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        request.hold(len(piece))
        if kept is not None:
            kept.append(piece)
        yield piece


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(413, f"The rows have more than {limit} bytes; commit fewer at once.")


def _parts(body: bytes) -> list[str]:
    """Return the names of the parts of a micro-batch."""
    try:
        names = json.loads(body)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not 0 < len(names) <= MOST_PARTS:
        raise ArgumentError(f"parts: this is no JSON list of 1 to {MOST_PARTS} names of parts.")
    return [checked_part(name) for name in names]


def _stored(request: Request, stored: bool, rows: list[OutRow]) -> None:
    _give(request, {"stored": stored, "rows": len(rows) if stored else 0})


def _opened(folder: Path, name: str) -> IO[bytes]:
    try:
        return _published(folder, name)
    except IoError:
        if not folder.is_dir():
            raise JournalError(f"{folder} {MOVED}") from None
        raise


def _published(folder: Path, name: str) -> IO[bytes]:
    io = DiskIo(folder)
    io.private = NothingPrivate()
    try:
        return io.open_published(name)
    except IoError:
        if not name.startswith("data/"):
            raise
        return io.open_published(f"{RETIRED}/{name.rpartition('/')[2]}")


def _queries(journal: OpenJournal) -> Iterator[str]:
    """Names of queries that have committed or reported; looks at the disk."""
    yield from journal.queries()
    yield from readers.reported_queries(journal.path)


def _shown(request: Request) -> str:
    """Return the token of the request; empty without one."""
    scheme, _, shown = (request.get("authorization") or "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""


def _check(grant: Grant, action: str) -> None:
    """Make sure that a token is good for what is asked."""
    right, has = ("write", grant.writes) if action in _COMMITS else ("read", grant.reads)
    if not has and not (action == "committed" and grant.writes):
        raise RequestRefused(
            403, f"The token {grant.name!r} may not {right}: its line in the file {TOKENS} lacks {right!r}."
        )


def _unauthorized() -> NoReturn:
    raise RequestRefused(401, f"The token is wrong or missing; {_UNNAMED}.", WWW_Authenticate="Bearer")


def _check_topic(grant: Grant, topic: bytes) -> None:
    if not grant.may_write(topic):
        shown = repr(topic[:100].decode("utf-8", "replace"))
        raise RequestRefused(
            403, f"The token {grant.name!r} may not write to {shown}: the file {TOKENS} gives it other topics."
        )


def _allow(request: Request, methods: tuple[str, ...]) -> None:
    if request.method not in methods:
        allowed = ", ".join(methods)
        raise RequestRefused(405, f"{request.method} is not possible here; there is {allowed}.", Allow=allowed)


def _batch(request: Request) -> tuple[str, int, dict[str, str]]:
    """Return the query and the number of the batch that a request is about, and all that it says."""
    values = _values(request)
    query, batch = readers.checked_query(values.get("query")), values.get("batch", "")
    if not re.fullmatch(r"[0-9]{1,18}", batch):
        raise ArgumentError(f"batch: {batch!r} is no number; a commit says which batch of the query it is.")
    return query, int(batch), values


def _say(request: Request, status: int, sentence: str, headers: Mapping[str, str]) -> None:
    if request.response.committed:
        raise HttpError(500, sentence, close=True)
    request.response.reset()
    request.response.status = status
    for name, value in headers.items():
        request.response.headers.set(name, value)
    _finish(request, "text/plain; charset=utf-8", (sentence.replace("\n", " ") + "\n").encode())


def _give(request: Request, values: Mapping[str, object]) -> None:
    body = _as_json(values)
    _send(request, body, _tag(body))


def _as_json(values: Mapping[str, object]) -> bytes:
    return _ENCODER.encode(values).encode()


def _values(request: Request) -> dict[str, str]:
    """Return what the query of a request says."""
    pairs = parse_parameters(request.query.encode("ascii"))
    return {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in pairs}


def _wait(request: Request) -> tuple[dict[str, int], float]:
    """Return what a reader knows, and how long it wants to wait for more."""
    values = _values(request)
    try:
        after = {str(node): int(seq) for node, seq in json.loads(values.get("after", "{}")).items()}
        wait_s = float(values.get("wait_s", "0"))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):  # one but last: 1e999
        raise ArgumentError('end: after is like {"n1": 1000}, and wait_s a number of seconds.') from None
    return after, max(0.0, min(wait_s, MOST_WAIT_S))


def _tag(body: bytes) -> str:
    return f'"{blake2b(body, digest_size=12).hexdigest()}"'


def _send(request: Request, body: bytes, tag: str) -> None:
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
    """Answer with a file, or the one span of it that is asked for; it may grow meanwhile."""
    headers, size = request.response.headers, os.fstat(fd).st_size
    spans = parse_ranges(request.get("range") or "", size)
    span = Span(0, size) if spans is None or len(spans) > 1 else spans[0] if spans else None
    if span is None:
        raise RequestRefused(
            416, f"The file ends at {size}; nothing of it is in this range.", Content_Range=f"bytes */{size}"
        )
    if spans is not None and len(spans) == 1:
        request.response.status = 206
        headers.set("Content-Range", f"bytes {span.first}-{span.end - 1}/{size}")
    headers.set("Content-Type", "application/octet-stream")
    headers.set("Content-Length", str(len(span)))
    headers.set("Accept-Ranges", "bytes")
    headers.set("Cache-Control", "no-store")
    if request.method != "HEAD":
        _copy(request, fd, span)
    request.response.end()


def _copy(request: Request, fd: int, span: Span) -> None:
    at = span.first
    while at < span.end:
        piece = in_thread(os.pread, fd, min(span.end - at, _PIECE), at)
        if not piece:
            return  # it was cut: the connection ends, since the announced length is not reached
        request.response.write(piece)
        at += len(piece)
