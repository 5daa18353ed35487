"""`smqrt journal`: inspection, verification, compaction, export and replay of journals."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import click
import gevent

from smqrt.cli.connect import ConnectionOptions, Failure, RejectedByBroker, connection_options, failure, open_client
from smqrt.cli.locations import (
    JournalGroup,
    cafile_option,
    chosen_range,
    folder,
    from_option,
    journal_folder,
    journal_location,
    json_option,
    offsets_of,
    opened_journal,
    plural,
    size,
    token_option,
    topics_option,
    until_option,
)
from smqrt.cli.terminal import counted, interrupt_this_greenlet, json_line, payload_fields, progress, write_line
from smqrt.errors import ArgumentError, ClosedError, JournalError, SmqrtError
from smqrt.journal import files, verification
from smqrt.journal.inspection import RecordedRow
from smqrt.journal.record import Flag, Row, iso
from smqrt.printable import printable
from smqrt.wire.smq import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from smqrt.journal.compact import CompactOptions, CompactResult


_SAMPLE_ROWS = 20_000  # messages that `schema` examines
_TAIL_ROWS = 20
_SHOWN_GAPS = 10  # of each node, the newest
_BACKLOG_BYTES = 1 << 18  # unsent bytes after which `replay` waits
_SCHEMES = {"smq://": "http://", "smqs://": "https://"}


@click.group(cls=JournalGroup, context_settings={"help_option_names": ["-h", "--help"]})
def journal() -> None:
    """Inspect, compact, export and replay recorded messages.

    PATH is the folder of a journal, or of an application that has one; URL is a journal on a hub. Without either, it is
    the current folder. `smqrt help journal` is the page of the manual.
    """


# ---- tail


@journal.command()
@journal_location
@topics_option
@click.option("-n", "--count", type=click.IntRange(min=0), help=f"Number of messages.  [default: {_TAIL_ROWS}]")
@click.option("--follow", "-f", is_flag=True, help="Wait for new messages and print them.")
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
    """Print the last messages.

    Each line has the time, topic, publisher, payload and flags of a message.

    \b
    Examples:
      smqrt journal tail chat -n 5
      smqrt journal tail chat --topic 'site1/#' --follow --json
    """
    from smqrt.journal import inspection

    opened = opened_journal(path, token, cafile)
    end = opened.end()  # `follow` continues here, so that no message is printed twice or omitted
    chosen = topics or None
    if start is not None:
        begin = offsets_of(opened, start, "--from")
        _print(islice(inspection.in_order(opened, begin, end, chosen), count), as_json)
    else:
        _print(inspection.latest(opened, end, _TAIL_ROWS if count is None else count, chosen), as_json)
    if follow:
        _print(inspection.follow(opened, end, chosen), as_json, at_once=True)


def _print(rows: Iterator[RecordedRow] | Sequence[RecordedRow], as_json: bool, at_once: bool = False) -> None:
    """Print rows; `at_once` flushes each line, for programs that read a pipe while the command waits for rows."""
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
@journal_location
@click.option(
    "--top", type=click.IntRange(min=0), default=10, show_default=True, help="Number of topics to list; 0 for none."
)
@json_option
@token_option
@cafile_option
def stats(path: str, top: int, as_json: bool, token: str | None, cafile: str | None) -> None:
    """Print the numbers of messages, files, topics and readers.

    For each reader (a pipeline), the last lines show the number of messages that it has not read yet.
    """
    from smqrt.journal.inspection import journal_stats

    counts = journal_stats(opened_journal(path, token, cafile), count_topics=top > 0)
    omitted = 0
    if counts.topics is not None:
        omitted = len(counts.topics) - top
        counts.topics = dict(islice(counts.topics.items(), top))
    if as_json:
        write_line(json_line(counts.as_fields()))
        return
    lines = [f"messages   {counts.rows:,}"]
    if counts.first_us is not None and counts.last_us is not None:
        lines += [f"from       {iso(counts.first_us)}", f"to         {iso(counts.last_us)}"]
        lines += [f"per second {counts.rate:,.1f}"]
    lines += [f"segments   {counts.segments:,}, {size(counts.segment_bytes)}"]
    lines += [f"compacted  {counts.files:,}, {size(counts.file_bytes)}"]
    for node, (first, following) in counts.offsets.items():
        lines += [f"node       {node}: {f'{first} to {following - 1}' if following > first else 'empty'}"]
    for topic, rows in (counts.topics or {}).items():
        lines += [f"topic      {rows:>12,}  {topic or '(to one client)'}"]
    if omitted > 0:
        lines += [f"topic      and {omitted:,} more (--top)"]
    for query, behind in counts.readers.items():
        since = f", has read nothing since {counts.stale_readers[query]}" if query in counts.stale_readers else ""
        lines += [f"reader     {query} is {plural(behind, 'message')} behind{since}"]
    for line in lines:
        click.echo(printable(line))


@journal.command()
@journal_folder
@click.option("--repair", is_flag=True, help="Remove the incomplete message at the end of a segment after a crash.")
def verify(path: Path, repair: bool) -> None:
    """Check all messages and files of a journal.

    Prints one line per fault, with a remedy. Exit code 1 when there is a fault. The hub may run at the same time.
    """
    path = folder(path)
    with progress("verify", verification.count_files(path)) as advance:
        report = verification.verify(path, lambda: advance(1))
    if repair and any(fault.torn for fault in report.faults):
        click.echo(f"removed {verification.repair(path, report):,} bytes of an incomplete message")
        report = verification.verify(path)
    for fault in report.faults:
        click.echo(printable(str(fault)), err=True)
    messages = plural(report.rows, "message")
    click.echo(f"{plural(report.segments, 'segment')} with {messages} in {plural(report.batches, 'batch')}")
    click.echo(f"{plural(report.files, 'compacted file')} with {plural(report.file_rows, 'message')}")
    if report.unchecked:
        click.echo(f"{plural(report.unchecked, 'compacted file')} of an older version without checksums: not checked")
    for node, gaps in report.gaps.items():
        for first, end in gaps[-_SHOWN_GAPS:]:
            click.echo(f"{node}: no messages numbered {first} to {end - 1}: the hub was restarted after a crash")
    if report.faults:
        raise click.ClickException(plural(len(report.faults), "fault"))
    click.echo("no faults")


# ---- compact


@journal.command()
@journal_folder
@click.option(
    "--after", metavar="TIME", default="0s", show_default=True, help="Minimum age of segments to compact, such as 10m."
)
@click.option(
    "--grace", metavar="TIME", default="60s", show_default=True, help="Time to keep segments after compaction."
)
@click.option(
    "--schema",
    "schemas",
    multiple=True,
    metavar="TOPICS=DDL",
    help="Typed columns for the JSON payloads of topics; repeatable.",
)
@click.option(
    "--json", "variant", type=click.Choice(["variant"]), help="Add a VARIANT column for JSON payloads; needs Spark."
)
@click.option(
    "--merge",
    metavar="SIZE",
    default="128MB",
    show_default=True,
    help="Merge small files into files up to this size; 0 disables merging.",
)
@click.option("--delta", is_flag=True, help="Update the Delta table afterwards; see smqrt journal delta.")
@click.option("--all", "everything", is_flag=True, help="Also compact the newest segment. No hub may be running.")
@click.option("--watch", metavar="TIME", help="Repeat at this interval, such as 60s, until Ctrl-C.")
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
    """Compact complete segments to Parquet files.

    Creates one file per hour, and merges small files. A hub may write and pipelines may read at the same time.

    \b
    Examples:
      smqrt journal compact chat
      smqrt journal compact plant --schema 'site1/#=device string, temp double'
      smqrt journal compact plant --watch 60s --after 10m
    """
    from smqrt.journal.compact import CompactOptions
    from smqrt.journal.payload_schema import merge_schemas
    from smqrt.settings.option_types import parse_duration, parse_size

    columns: dict[str, str] = {}
    for text in schemas:
        pattern, equals, ddl = text.partition("=")
        if not equals:
            raise click.UsageError(f"--schema {text!r}: not TOPICS=DDL, such as 'site1/#=device string, temp double'")
        columns[pattern] = ddl
    merge_schemas(columns)  # only checks that the schemas are compatible
    interval_s = parse_duration(watch) if watch else None
    durations = (parse_duration(after), parse_duration(grace))
    options = CompactOptions(*durations, everything, columns, merge_bytes=parse_size(merge))

    def run() -> CompactResult:
        result = _compact(folder(path), options, variant is not None)
        if delta:
            from smqrt.journal import delta_table

            delta_table.update_table(folder(path))
        return result

    if interval_s is None:
        click.echo(_summary(run(), options))
    while interval_s is not None:
        try:
            result = run()
            if result.segments or result.removed or result.merged:
                click.echo(_summary(result, options))
        except SmqrtError as error:
            click.echo(f"Error: {error}", err=True)  # the next run may succeed
        time.sleep(interval_s)


def _compact(path: Path, options: CompactOptions, variant: bool) -> CompactResult:
    from smqrt.journal.compact import compact as run
    from smqrt.journal.compact import rows_to_compact

    with progress("compact", rows_to_compact(path, options)) as advance:
        if not variant:
            return run(path, options, on_rows=advance)
        from smqrt.pipeline.history import Shredder
        from smqrt.pipeline.session import interruptible

        def shredded(_stopping: threading.Event) -> CompactResult:
            with Shredder(path) as shredder:  # ends Spark, which would use a gigabyte of memory until the next run
                return run(path, replace(options, shred=shredder), on_rows=advance)

        return interruptible(shredded)


def _summary(result: CompactResult, options: CompactOptions) -> str:
    """Return the result of a compaction as one sentence."""
    if result.segments:
        share = result.file_bytes / result.payload_bytes if result.payload_bytes else 0
        text = f"{plural(result.segments, 'segment')} with {plural(result.rows, 'message')}: "
        text += f"{plural(result.files, 'file')}, {size(result.payload_bytes)} of payload in {size(result.file_bytes)} "
        text += f"({share:.2f})"
    elif result.merged:
        text = "no segment to compact"
    else:
        text = "nothing to compact: the newest segment is excluded while it may grow"
    if result.merged:
        text += f"; {plural(result.merged, 'small file')} merged"
    if result.removed:
        text += f"; {plural(result.removed, 'old segment')} removed"
    if result.waiting:
        text += f"; {plural(result.waiting, 'old segment')} to be removed by a later run (--grace {options.grace_s:g}s)"
    return text


@journal.command()
@journal_folder
@click.option("--to", metavar="URI", help="Copy the files to a separate table, such as s3://bucket/messages.")
def delta(path: Path, to: str | None) -> None:
    """Create or update a Delta table of the compacted files.

    Prints the folder of the table. Without --to, the table uses the files of the journal. With --to, the table has
    copies, and keeps files that the journal has removed. Run it after each compaction, or use compact --delta.
    """
    from smqrt.journal import delta_table

    result = delta_table.update_copy(folder(path), to) if to else delta_table.update_table(folder(path))
    click.echo(f"{result.table}: {plural(result.files, 'file')}, {result.added:,} added, {result.removed:,} removed")


# ---- export and schema


@journal.command()
@journal_location
@click.option(
    "--to", required=True, type=click.Path(dir_okay=False), help="File to write: .parquet, .arrow, .csv or .jsonl."
)
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
    """Export messages to a Parquet, Arrow, CSV or JSON file.

    The suffix of the file selects the format.

    \b
    Examples:
      smqrt journal export chat --to chat.parquet
      smqrt journal export plant --to day.csv --topic 'site1/#' --from 2026-11-20 --until 2026-11-21
    """
    from smqrt.journal.inspection import export as run

    file = files.local_folder(to, "--to", "write a file here, and copy it there")
    opened = opened_journal(path, token, cafile)
    first, last = chosen_range(opened, start, end)
    with progress("export", opened.count(first, last)) as advance:
        rows = run(opened, first, last, file, topics or None, advance)
    click.echo(f"{plural(rows, 'message')} in {file} ({size(file.stat().st_size)})")


@journal.command()
@click.argument("words", metavar="[PATH|URL] TOPIC", nargs=-1, required=True)
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=_SAMPLE_ROWS,
    show_default=True,
    help="Number of messages to examine, from the newest.",
)
@token_option
@cafile_option
def schema(words: tuple[str, ...], rows: int, token: str | None, cafile: str | None) -> None:
    """Print the schema (DDL) of the JSON payloads of TOPIC.

    TOPIC may contain wildcards. `smqrt journal compact --schema` and the sources of pipelines accept this DDL.

    \b
    Example:
      smqrt journal schema plant 'site1/#'
    """
    from smqrt.journal.inspection import latest
    from smqrt.journal.payload_schema import infer_schema

    if len(words) > 2:  # probably the shell has expanded a wildcard
        raise click.UsageError(f"expected PATH and one TOPIC, got {len(words)} arguments. Quote topics with wildcards.")
    opened = opened_journal(words[0] if len(words) == 2 else ".", token, cafile)
    inferred = infer_schema(recorded.row.payload for recorded in latest(opened, opened.end(), rows, [words[-1]]))
    if not inferred.rows:
        raise JournalError(f"no messages to {words[-1]!r}. List topics with `smqrt journal stats`.")
    if inferred.ddl is None:
        kind = f"{inferred.kind} values, not JSON objects" if inferred.json else "not JSON"
        raise JournalError(f"the {inferred.rows:,} newest payloads of {words[-1]!r} are {kind}: no DDL")
    click.echo(printable(inferred.ddl))
    click.echo(
        f"matches {inferred.fitting:,} of {inferred.rows:,} payloads ({inferred.fitting / inferred.rows:.1%})", err=True
    )


# ---- replay


@journal.command()
@click.argument("path", metavar="PATH|URL")
@click.argument("hub", metavar="HUB")
@topics_option
@click.option(
    "--speed", default="1x", show_default=True, help="Multiple of the recorded speed, such as 10x; max for no pauses."
)
@from_option
@until_option
@click.option("--prefix", default="", help="Prefix of every topic.")
@click.option("--pipelines", is_flag=True, help="Include messages that pipelines published.")
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
    """Publish recorded messages to a hub again.

    The messages keep their recorded intervals, divided by --speed. HUB is a URL as for `smqrt pub`: http://, https://,
    ws:// or wss://; smq:// means http://. With mqtt:// or mqtts://, messages of MQTT clients keep their QoS, retain
    flag and properties, and may have more than 65,520 bytes.

    \b
    Examples:
      smqrt journal replay plant smq://localhost:9357/plant/ --speed 10x --from 2h
      smqrt journal replay plant ws://test:9357/plant/ --speed max --prefix replayed/
      smqrt journal replay plant mqtt://localhost
    """
    from smqrt.cli.pubsub import is_mqtt
    from smqrt.journal.inspection import in_order

    factor = parse_speed(speed)
    opened = opened_journal(path, token, connection["cafile"])
    first, last = chosen_range(opened, start, end)
    with (
        resumable(in_order(opened, first, last, topics or None)) as rows,
        open_publisher(hub, **connection) as publish,
        progress("replay", opened.count(first, last)) as advance,
    ):
        max_bytes = None if is_mqtt(hub) else MAX_PAYLOAD_BYTES
        replayed = play(counted(rows, advance), publish, gevent.sleep, factor, prefix, pipelines, max_bytes)
    click.echo(f"{plural(replayed.published, 'message')} published")
    for reason, count in replayed.skipped.items():
        click.echo(f"{count:,} skipped: {printable(reason)}", err=True)


class Publish(Protocol):
    """Publishes one message; called with the topic and the row."""

    def __call__(self, topic: str, row: Row) -> None: ...


@dataclass
class ReplayCounts:
    """Counts of a replay: published messages, and skipped messages by reason."""

    published: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, reason: str) -> None:
        """Count a skipped message."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def parse_speed(text: str) -> float | None:
    """Return the factor of a value of --speed: 10.0 for "10x" or "10", None for "max".

    Raises:
        ArgumentError: the value is not a positive number.
    """
    if text == "max":
        return None
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise ArgumentError(f"--speed {text!r}: not a factor such as 10x or 0.5x, or max")
    return speed


def paced(
    rows: Iterable[RecordedRow],
    speed: float | None,
    wait: Callable[[float], object],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RecordedRow]:
    """Yield rows when they are due, relative to the first one; late rows are yielded at once.

    Args:
        rows: rows in the order of their times.
        speed: multiple of the recorded speed; None for no pauses.
        wait: waits for a number of seconds.
        clock: returns monotonic seconds.
    """
    started = first_us = None
    for recorded in rows:
        if speed is not None:
            if started is None or first_us is None:  # the first row sets the time base
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
    max_payload_bytes: int | None = None,
) -> ReplayCounts:
    """Publish rows in order, when they are due.

    Args:
        rows: rows in the order of their times.
        publish: publishes a message.
        wait: waits for a number of seconds.
        speed: multiple of the recorded speed; None for no pauses.
        prefix: prefix of every topic.
        pipelines: whether to include messages that pipelines published; pipelines of the hub will publish them again.
        max_payload_bytes: maximum length of a payload; None for no limit.
    """
    counts = ReplayCounts()
    for recorded in paced(rows, speed, wait):
        row = recorded.row
        if row.flags & Flag.PIPELINE and not pipelines:
            counts.skip("published by a pipeline")
        elif max_payload_bytes is not None and len(row.payload) > max_payload_bytes:
            counts.skip(f"longer than {max_payload_bytes} bytes")
        elif row.topic is None:
            counts.skip("addressed to one client")
        else:
            publish(prefix + row.topic, row)
            counts.published += 1
    return counts


@contextmanager
def open_publisher(url: str, **connection: Unpack[ConnectionOptions]) -> Iterator[Publish]:
    """Connect to a hub and yield a function that publishes; at the end wait until the hub has received all messages.

    Args:
        url: the URL of the hub.
        connection: values of the options of `connection_options`.

    Raises:
        Failure: no connection, connection lost, or the hub rejected messages.
    """
    from smqrt.cli.pubsub import is_mqtt, open_mqtt_publisher

    if is_mqtt(url):
        with interrupt_this_greenlet(), open_mqtt_publisher(url, **connection) as send:
            yield lambda topic, row: send(topic, row.payload, row.qos or 0, bool(row.retain), _properties_of(row))
        return
    for scheme, http_scheme in _SCHEMES.items():
        url = http_scheme + url.removeprefix(scheme) if url.startswith(scheme) else url
    with interrupt_this_greenlet(), open_client(url, **connection) as client:

        def publish(topic: str, row: Row) -> None:
            try:
                client.publish(row.payload, topic, row.subtopic)
            except ArgumentError as error:
                raise Failure(str(error)) from None
            except ClosedError:
                raise failure(client.end) from None
            if (client.backlog_bytes > _BACKLOG_BYTES and not client.flush()) or not client.connected:
                raise failure(client.end)

        yield publish
        if not client.flush():
            raise failure(client.end)
        if client.dropped:
            raise RejectedByBroker(f"the hub rejected {client.dropped} messages")


def _properties_of(row: Row) -> dict[str, Any]:
    """Return the MQTT properties of a row; a subtopic is a user property, as for the MQTT subscribers of a hub."""
    from smqrt.journal.mqtt_columns import properties_of

    return properties_of(row.properties) | ({"subtopic": row.subtopic} if row.subtopic else {})


@contextmanager
def resumable(rows: Iterable[RecordedRow]) -> Iterator[Iterator[RecordedRow]]:
    """Yield an iterator over the rows; after an interrupt, the error text has the value of --from to continue.

    Raises:
        KeyboardInterrupt: the interrupt, with that text.
    """
    last_us: int | None = None

    def tracked() -> Iterator[RecordedRow]:
        nonlocal last_us
        for recorded in rows:
            last_us = recorded.row.ts_us
            yield recorded

    try:
        yield tracked()
    except KeyboardInterrupt as interrupt:
        position = "Nothing was published." if last_us is None else f"Continue with --from {iso(last_us)}"
        raise type(interrupt)(f"Interrupted. {position}") from None
