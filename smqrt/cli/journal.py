"""`smqrt journal`: look into a journal, check it, compact it, take rows out of it, and play them again."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Unpack

import click
import gevent

from smqrt.cli.connect import ConnectionOptions, Failure, RejectedByBroker, connection_options, failure, open_client
from smqrt.cli.locations import (
    Journals,
    cafile_option,
    chosen_range,
    folder,
    from_option,
    journal_folder,
    journal_place,
    json_option,
    many,
    offsets_of,
    opened_journal,
    size,
    token_option,
    topics_option,
    until_option,
)
from smqrt.cli.terminal import counted, interrupt_this_greenlet, json_line, payload_fields, progress, write_line
from smqrt.client import SmqClient
from smqrt.errors import ArgumentError, ClosedError, JournalError, SmqrtError
from smqrt.journal import files
from smqrt.journal.inspection import RecordedRow
from smqrt.journal.record import Flag, Row
from smqrt.journal.timestamps import iso
from smqrt.printable import printable
from smqrt.wire.smq import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from smqrt.journal.compact import CompactOptions, CompactResult
    from smqrt.journal.inspection import JournalStats


_SAMPLE_ROWS = 20_000


@click.group(cls=Journals, context_settings={"help_option_names": ["-h", "--help"]})
def journal() -> None:
    """What a hub has recorded. PATH is the folder of a journal, or of an application that has one.

    `smqrt help journal` is the page of the manual.
    """


# ---- tail


@journal.command()
@journal_place
@topics_option
@click.option("-n", "--count", type=click.IntRange(min=0), help="How many messages (20).")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is recorded from now on.")
@from_option
@json_option
@token_option
@cafile_option
def tail(
    path: str,
    topics: tuple[str, ...],
    count: int | None,
    follow: bool,
    start: str | None,
    as_json: bool,
    token: str | None,
    cafile: str | None,
) -> None:
    """Print the last messages: time, topic, publisher, payload and flags.

    \b
    smqrt journal tail chat -n 5
    smqrt journal tail chat --topic 'site1/#' --follow --json
    """
    from smqrt.journal import inspection

    opened = opened_journal(path, token, cafile)
    end = opened.end()
    chosen = topics or None
    if start is not None:
        begin = offsets_of(opened, start, "--from")
        _print(islice(inspection.in_order(opened, begin, end, chosen), count), as_json)
    else:
        _print(inspection.latest(opened, end, 20 if count is None else count, chosen), as_json)
    if follow:
        _print(inspection.follow(opened, end, chosen), as_json, at_once=True)


def _print(rows: Iterator[RecordedRow] | Sequence[RecordedRow], as_json: bool, at_once: bool = False) -> None:
    from smqrt.journal.inspection import as_fields, as_line

    for recorded in rows:
        if as_json:
            line = json_line(as_fields(recorded) | payload_fields(recorded.row.payload))
        else:
            line = as_line(recorded).encode("utf-8", "backslashreplace")
        sys.stdout.buffer.write(line + b"\n")
        if at_once:
            sys.stdout.buffer.flush()
    sys.stdout.buffer.flush()


# ---- stats and verify


@journal.command()
@journal_place
@click.option("--top", type=click.IntRange(min=0), default=10, show_default=True, help="How many topics; 0 for none.")
@json_option
@token_option
@cafile_option
def stats(path: str, top: int, as_json: bool, token: str | None, cafile: str | None) -> None:
    """Count: messages, bytes, files, the most frequent topics, and how far behind pipelines are."""
    from smqrt.journal.inspection import journal_stats

    found = journal_stats(opened_journal(path, token, cafile), count_topics=top > 0)
    if found.topics is not None:
        others = len(found.topics) - top
        found.topics = dict(islice(found.topics.items(), top))
    else:
        others = 0
    if as_json:
        write_line(json_line(found.as_fields()))
        return
    for line in _as_lines(found, others):
        click.echo(printable(line))


def _as_lines(found: JournalStats, others: int) -> Iterator[str]:
    from smqrt.journal.timestamps import iso

    yield f"messages   {found.rows:,}"
    if found.first_us is not None and found.last_us is not None:
        yield f"from       {iso(found.first_us)}"
        yield f"to         {iso(found.last_us)}"
        yield f"a second   {found.rate:,.1f}"
    yield f"segments   {found.segments:,}, {size(found.segment_bytes)}"
    yield f"compacted  {found.files:,}, {size(found.file_bytes)}"
    for node, (first, following) in found.offsets.items():
        yield f"node       {node}: {first} to {following - 1}" if following > first else f"node       {node}: empty"
    for topic, rows in (found.topics or {}).items():
        yield f"topic      {rows:>12,}  {topic or '(to one client)'}"
    if others > 0:
        yield f"topic      and {others:,} more (--top)"
    for query, behind in found.readers.items():
        since = found.stale_readers.get(query)
        yield f"reader     {query} is {many(behind, 'message')} behind" + (f", silent since {since}" if since else "")


@journal.command()
@journal_folder
@click.option("--repair", is_flag=True, help="Cut off what a crash left unfinished behind the last whole message.")
def verify(path: Path, repair: bool) -> None:
    """Check every message, every file, and that nothing is missing between them.

    Exit code 1 when something is wrong; each fault is one sentence that says what to do. A hub may run meanwhile.
    """
    from smqrt.journal import verify as verifying

    path = folder(path)
    with progress("verify", verifying.count_files(path)) as advance:
        report = verifying.verify(path, lambda: advance(1))
    if repair and any(fault.torn for fault in report.faults):
        click.echo(f"{verifying.repair(path, report):,} bytes of a torn end were cut off")
        report = verifying.verify(path)
    for fault in report.faults:
        click.echo(printable(str(fault)), err=True)
    messages = many(report.rows, "message")
    click.echo(f"{many(report.segments, 'segment')} with {messages} in {many(report.batches, 'batch')}")
    click.echo(f"{many(report.files, 'compacted file')} with {many(report.file_rows, 'message')}")
    if report.unchecked:
        click.echo(
            f"{many(report.unchecked, 'compacted file')} of an older version without checksums: not all damage shows"
        )
    for node, gaps in report.gaps.items():
        for first, behind in gaps[-10:]:
            click.echo(
                f"{node}: no message has a number from {first} to {behind - 1}: the hub was started after a crash"
            )
    if report.faults:
        raise click.ClickException(many(len(report.faults), "fault"))
    click.echo("all is well")


# ---- compact


@journal.command()
@journal_folder
@click.option("--after", metavar="TIME", default="0s", help="Leave segments alone until they are so old, such as 10m.")
@click.option("--grace", metavar="TIME", default="60s", show_default=True, help="Keep segments so long afterwards.")
@click.option("--schema", "schemas", multiple=True, metavar="TOPICS=DDL", help="Typed columns for JSON payloads.")
@click.option("--json", "variant", type=click.Choice(["variant"]), help="A VARIANT column for JSON payloads, by Spark.")
@click.option(
    "--merge", metavar="SIZE", default="128MB", show_default=True, help="Join small files up to this; 0: not."
)
@click.option("--delta", is_flag=True, help="Then bring the Delta table up to date, see smqrt journal delta.")
@click.option("--all", "everything", is_flag=True, help="Also the newest segment; no hub may write.")
@click.option("--watch", metavar="TIME", help="Do it again and again, so often, such as 60s.")
def compact(
    path: Path,
    after: str,
    grace: str,
    schemas: tuple[str, ...],
    variant: str | None,
    merge: str,
    delta: bool,
    everything: bool,
    watch: str | None,
) -> None:
    """Make Parquet files, one an hour, of complete segments, then few of many. A hub may write and pipelines may read.

    \b
    smqrt journal compact chat
    smqrt journal compact plant --schema 'site1/#=device string, temp double'
    smqrt journal compact plant --watch 60s --after 10m
    """
    from smqrt.journal.compact import CompactOptions
    from smqrt.journal.payload_schema import merge_schemas
    from smqrt.settings.options import parse_duration, parse_size

    pairs = dict(map(_schema_pair, schemas))
    merge_schemas(pairs)
    seconds = parse_duration(watch) if watch else None
    durations = (parse_duration(after), parse_duration(grace))
    options = CompactOptions(*durations, everything, pairs, merge_bytes=parse_size(merge))
    run = partial(_compact_once, folder(path), options, variant is not None, delta)
    _compact(run, options, seconds)


def _schema_pair(text: str) -> tuple[str, str]:
    pattern, equals, ddl = text.partition("=")
    if not equals:
        raise click.UsageError(f"--schema {text!r} must be TOPICS=DDL, such as 'site1/#=device string, temp double'")
    return pattern, ddl


def _compact(run: Callable[[], CompactResult], options: CompactOptions, seconds: float | None) -> None:
    if seconds is None:
        click.echo(_done(run(), options))
    while seconds is not None:
        try:
            done = run()
            if done.segments or done.removed or done.merged:
                click.echo(_done(done, options))
        except SmqrtError as error:
            click.echo(f"Error: {error}", err=True)  # and again later: it may be solved by then
        time.sleep(seconds)


def _compact_once(path: Path, options: CompactOptions, variant: bool, delta: bool) -> CompactResult:
    done = _compacted(path, options, variant)
    if delta:
        from smqrt.journal import delta_table

        delta_table.update_table(path)
    return done


def _compacted(path: Path, options: CompactOptions, variant: bool) -> CompactResult:
    from smqrt.journal.compact import compact as run
    from smqrt.journal.compact import rows_to_compact

    with progress("compact", rows_to_compact(path, options)) as advance:
        if not variant:
            return run(path, options, on_rows=advance)
        from smqrt.pipeline.history import Shredder
        from smqrt.pipeline.session import interruptible

        def shredded(_stopping: threading.Event) -> CompactResult:
            with Shredder(path) as shredder:  # Spark ends with it: between two runs it would hold a gigabyte
                return run(path, replace(options, shred=shredder), on_rows=advance)

        return interruptible(shredded)


def _done(done: CompactResult, options: CompactOptions) -> str:
    if done.segments:
        share = done.file_bytes / done.payload_bytes if done.payload_bytes else 0
        text = f"{many(done.segments, 'segment')} with {many(done.rows, 'message')}: {many(done.files, 'file')}, "
        text += f"{size(done.payload_bytes)} of payload in {size(done.file_bytes)} ({share:.2f})"
    elif done.merged:
        text = "no segment to compact"
    else:
        text = "nothing to compact: the newest segment is left alone while it may grow"
    if done.merged:
        text += f"; {many(done.merged, 'small file')} joined"
    if done.removed:
        text += f"; {many(done.removed, 'old segment')} removed"
    if done.waiting:
        text += f"; {many(done.waiting, 'old segment')} for a later run to remove (--grace {options.grace_s:g}s)"
    return text


@journal.command()
@journal_folder
@click.option("--to", metavar="URI", help="Copy the files into a table there, such as s3://bucket/messages.")
def delta(path: Path, to: str | None) -> None:
    """Make a Delta table of the compacted files, or bring it up to date; without --to nothing is copied.

    Its name for others is the folder that is printed. Do it after each compaction, or let compact --delta do it. A copy
    keeps what the journal has removed.
    """
    from smqrt.journal import delta_table

    done = delta_table.update_copy(folder(path), to) if to else delta_table.update_table(folder(path))
    click.echo(f"{done.table}: {many(done.files, 'file')}, {done.added:,} added, {done.removed:,} removed")


# ---- export and schema


@journal.command()
@journal_place
@click.option("--to", required=True, type=click.Path(dir_okay=False), help="The file to write.")
@topics_option
@from_option
@until_option
@token_option
@cafile_option
def export(
    path: str,
    to: str,
    topics: tuple[str, ...],
    start: str | None,
    end: str | None,
    token: str | None,
    cafile: str | None,
) -> None:
    """Write messages to one file for other tools: its ending .parquet, .arrow, .csv or .jsonl says which format.

    \b
    smqrt journal export chat --to chat.parquet
    smqrt journal export plant --to day.csv --topic 'site1/#' --from 2026-11-20 --until 2026-11-21
    """
    from smqrt.journal.inspection import export as run

    file = files.local_folder(to, "--to", "write a file here, and copy it there")
    opened = opened_journal(path, token, cafile)
    first, last = chosen_range(opened, start, end)
    with progress("export", opened.count(first, last)) as advance:
        rows = run(opened, first, last, file, topics or None, advance)
    click.echo(f"{many(rows, 'message')} in {file} ({size(file.stat().st_size)})")


@journal.command()
@click.argument("words", metavar="[PATH|URL] TOPIC", nargs=-1, required=True)
@click.option(
    "--rows", type=click.IntRange(min=1), default=_SAMPLE_ROWS, show_default=True, help="Look at so many, the newest."
)
@token_option
@cafile_option
def schema(words: tuple[str, ...], rows: int, token: str | None, cafile: str | None) -> None:
    """Print the DDL that describes the JSON payloads of TOPIC, which may have wildcards.

    It is what `smqrt journal compact --schema` and the sources of pipelines want.

    \b
    smqrt journal schema plant 'site1/#'
    """
    from smqrt.journal.inspection import latest
    from smqrt.journal.payload_schema import infer_schema

    if len(words) > 2:
        raise click.UsageError(f"one topic, please, in quotes if it has a wildcard; there are {len(words)} words")
    opened = opened_journal(words[0] if len(words) == 2 else ".", token, cafile)
    found = infer_schema(recorded.row.payload for recorded in latest(opened, opened.end(), rows, [words[-1]]))
    if not found.rows:
        raise JournalError(f"there are no messages to {words[-1]!r}; `smqrt journal stats` shows the topics")
    if found.ddl is None:
        kind = f"{found.kind} values" if found.json else "no JSON"
        raise JournalError(f"the {found.rows:,} newest payloads of {words[-1]!r} are {kind}, not JSON objects: no DDL")
    click.echo(printable(found.ddl))
    click.echo(f"fits {found.fitting:,} of {found.rows:,} payloads ({found.fitting / found.rows:.1%})", err=True)


# ---- replay


@journal.command()
@click.argument("path", metavar="PATH|URL")
@click.argument("hub", metavar="HUB")
@topics_option
@click.option("--speed", default="1x", show_default=True, help="How much faster than recorded, such as 10x; or max.")
@from_option
@until_option
@click.option("--prefix", default="", help="Put this before every topic.")
@click.option("--pipelines", is_flag=True, help="Also what pipelines had published.")
@token_option
@connection_options
def replay(
    path: str,
    hub: str,
    topics: tuple[str, ...],
    speed: str,
    start: str | None,
    end: str | None,
    prefix: str,
    pipelines: bool,
    token: str | None,
    **connection: Unpack[ConnectionOptions],
) -> None:
    """Publish recorded messages to HUB once more, at the distances in time they had.

    HUB is an address as of `smqrt pub`, http://, https://, ws:// or wss://; smq:// is the same as http://.

    \b
    smqrt journal replay plant smq://localhost:9357/plant/ --speed 10x --from 2h
    smqrt journal replay plant ws://test:9357/plant/ --speed max --prefix replayed/
    """
    from smqrt.journal.inspection import in_order

    factor = parse_speed(speed)
    opened = opened_journal(path, token, connection["cafile"])
    first, last = chosen_range(opened, start, end)
    with (
        position(in_order(opened, first, last, topics or None)) as rows,
        publishing(hub, **connection) as (publish, wait, longest_bytes),
        progress("replay", opened.count(first, last)) as advance,
    ):
        played = play(counted(rows, advance), publish, wait, factor, prefix, pipelines, longest_bytes)
    click.echo(f"{many(played.published, 'message')} published")
    for reason, count in played.skipped.items():
        click.echo(f"{count:,} left out: {printable(reason)}", err=True)


# ---- `smqrt journal replay`: recorded messages once more, at the distances in time they had, published by a client.

_BACKLOG_BYTES = 1 << 18
_SCHEMES = {"smq://": "http://", "smqs://": "https://"}


class Publish(Protocol):
    """Publishes one message; called with the topic, the subtopic or None, and the payload."""

    def __call__(self, topic: str, subtopic: str | None, payload: bytes) -> None: ...


@dataclass
class Played:
    """What a replay did: how many messages it published, and how many not, by the reason."""

    published: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """Count a message that is not published."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def parse_speed(text: str) -> float | None:
    """Returns how many times faster than recorded: "10x" or "10" is 10.0, "max" is None.

    Raises:
        ArgumentError: it is no such thing.
    """
    if text == "max":
        return None
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise ArgumentError(f"--speed {text!r} must be a factor such as 10x or 0.5x, or max")
    return speed


def paced(
    rows: Iterable[RecordedRow],
    speed: float | None,
    wait: Callable[[float], object],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RecordedRow]:
    """Yields rows when they are due, counted from the first one; who is late catches up.

    Args:
        rows: in the order of their times.
        speed: how many times faster than recorded; None does not wait.
        wait: waits so many seconds.
        clock: seconds that only go forward.
    """
    started = first_us = None
    for recorded in rows:
        if speed is not None:
            if started is None or first_us is None:
                started, first_us = clock(), recorded.row.ts_us
            due = started + (recorded.row.ts_us - first_us) / 1e6 / speed
            if (remaining := due - clock()) > 0:
                wait(remaining)
        yield recorded


def play(
    rows: Iterable[RecordedRow],
    publish: Publish,
    wait: Callable[[float], object] = time.sleep,
    speed: float | None = 1.0,
    prefix: str = "",
    pipelines: bool = False,
    longest_bytes: int | None = None,
) -> Played:
    """Publish rows one after the other, when they are due.

    Args:
        rows: what to publish, in the order of time.
        publish: how.
        wait: waits so many seconds.
        speed: how many times faster than recorded; None does not wait.
        prefix: put before every topic.
        pipelines: also what pipelines had published; the pipelines behind the destination will do that again.
        longest_bytes: what a message may have at most.
    """
    played = Played()
    for recorded in paced(rows, speed, wait):
        topic, reason = recorded.row.topic, _reason(recorded.row, pipelines, longest_bytes)
        if topic is None or reason:
            played.skip(reason or "addressed to one client")
            continue
        publish(prefix + topic, recorded.row.subtopic, recorded.row.payload)
        played.published += 1
    return played


def _reason(row: Row, pipelines: bool, longest_bytes: int | None) -> str:
    """Why a row can't be or must not be published again; empty when it can."""
    if row.flags & Flag.PIPELINE and not pipelines:
        return "published by a pipeline"
    if longest_bytes is not None and len(row.payload) > longest_bytes:
        return f"longer than {longest_bytes} bytes"
    return ""


# ---- the network


@contextmanager
def publishing(
    url: str, **connection: Unpack[ConnectionOptions]
) -> Iterator[tuple[Publish, Callable[[float], object], int]]:
    """Connects to a hub; at the end it has got everything.

    Args:
        url: the hub's address.
        connection: as `open_client` takes it.

    Returns:
        What publishes, what waits some seconds, and how long a payload may be, bytes.

    Raises:
        Failure: no connection, a lost one, or the hub refuses messages.
    """
    for scheme, known in _SCHEMES.items():
        url = known + url.removeprefix(scheme) if url.startswith(scheme) else url
    with interrupt_this_greenlet(), open_client(url, **connection) as client:
        yield _publisher(client), gevent.sleep, MAX_PAYLOAD_BYTES
        if not client.flush():
            raise failure(client.end)
        if client.dropped:
            raise RejectedByBroker(f"the hub refused {client.dropped} messages")


@contextmanager
def position(rows: Iterable[RecordedRow]) -> Iterator[Iterator[RecordedRow]]:
    """Yields the same rows; who interrupts what takes them is told where to go on.

    Raises:
        KeyboardInterrupt: it came, and says so.
    """
    at_us: int | None = None

    def noted() -> Iterator[RecordedRow]:
        nonlocal at_us
        for recorded in rows:
            at_us = recorded.row.ts_us
            yield recorded

    try:
        yield noted()
    except KeyboardInterrupt as interrupt:
        where = "Nothing was published yet." if at_us is None else f"--from {iso(at_us)} goes on."
        raise type(interrupt)(f"Interrupted. {where}") from None


def _publisher(client: SmqClient) -> Publish:
    def publish(topic: str, subtopic: str | None, payload: bytes) -> None:
        try:
            client.publish(payload, topic, subtopic)
        except ArgumentError as error:
            raise Failure(str(error)) from None
        except ClosedError:
            raise failure(client.end) from None
        if client.backlog_bytes > _BACKLOG_BYTES and not client.flush():
            raise failure(client.end)
        if not client.connected:
            raise failure(client.end)

    return publish
