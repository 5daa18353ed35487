"""`smqrt pub`, `sub`, `request` and `bench`: clients of SMQ and MQTT brokers."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Required, TypeVar, Unpack

import click
import gevent
from gevent.event import Event
from gevent.queue import Queue
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from smqrt.cli.connect import (
    ConnectionOptions,
    Failure,
    RejectedByBroker,
    TimedOut,
    connection_options,
    credentials_for,
    failure,
    open_client,
    received,
    topic_of,
)
from smqrt.cli.terminal import discard_output, json_line, now, payload_fields, write_line
from smqrt.client import SmqClient
from smqrt.errors import ArgumentError, ClosedError, DeliveryError
from smqrt.mqtt import Delivery, MqttClient, MqttCloseReason
from smqrt.printable import printable
from smqrt.wire.mqtt.fields import NUMBERS

_READ_BYTES = 65536  # of standard input at a time
_INTERRUPTED = 130  # exit code of shells after Ctrl-C
_MAX_PACKET_BYTES = 16 << 20  # the highest value of the hub's setting `mqtt.packet_bytes`
_MQTT_BACKLOG = 1000  # messages to publish before waiting for their acknowledgements
_MQTT_RETRY_S = 1.0
_MQTT_REJECTED = 0x80  # this reason code of Suback and higher ones are errors


_Command = TypeVar("_Command", bound=Callable[..., Any])


class _SubOptions(ConnectionOptions):
    as_json: Required[bool]
    raw: Required[bool]
    verbose: Required[bool]
    count: Required[int | None]
    subtopic: Required[str | None]
    timeout: Required[float | None]


_raw = click.option(
    "--raw", is_flag=True, help="Do not escape control characters on a terminal. In a pipe they are never escaped."
)
_id = click.option("--id", "is_id", is_flag=True, help="TOPIC is a number: the ID of a topic, or the ETID of a client.")


def _mqtt_options(command: _Command) -> _Command:
    qos = click.option("--qos", type=click.Choice(["0", "1", "2"]), help="MQTT: quality of service.  [default: 0]")
    version = click.option("--mqtt", type=click.Choice(["5", "3.1.1"]), help="MQTT: version.  [default: 5]")
    return qos(version(command))


# ---- `smqrt pub`


@click.command()
@click.argument("url")
@click.argument("topic")
@click.argument("data", required=False)
@click.option(
    "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Publish the content of a file."
)
@click.option("--repeat", type=click.IntRange(min=1), default=1, help="Number of times to publish.  [default: 1]")
@click.option(
    "--every", metavar="SECONDS", type=click.FloatRange(min=0), default=0.0, help="Seconds between two messages."
)
@click.option("--subtopic", help="Name of the sub-topic.")
@_id
@click.option("--retain", is_flag=True, help="MQTT: retain the message for later subscribers.")
@click.option(
    "--expiry", metavar="SECONDS", type=click.IntRange(1, 0xFFFFFFFF), help="MQTT 5: seconds until the message expires."
)
@click.option(
    "--property",
    "properties",
    metavar="NAME=VALUE",
    multiple=True,
    help="MQTT 5: a property, such as contenttype=text/plain; other names are user properties. Repeatable.",
)
@_mqtt_options
@connection_options
def pub(
    url: str,
    topic: str,
    subtopic: str | None,
    is_id: bool,
    retain: bool,
    expiry: int | None,
    properties: tuple[str, ...],
    qos: str | None,
    mqtt: str | None,
    data: str | None,
    file: Path | None,
    repeat: int,
    every: float,
    **connection: Unpack[ConnectionOptions],
) -> None:
    """Publish messages to a topic.

    DATA is the message; without DATA and --file, each line of standard input is a message. URL is the URL of a broker
    or of an application, whose broker is usually at smq.lsp or smq. With mqtt:// or mqtts://, URL is an MQTT broker,
    and the credentials are "user:password".

    \b
    Examples:
      smqrt pub http://localhost:9357/chat/ say hello
      smqrt pub http://localhost:9357/chat/ say --file picture.jpg
      smqrt pub http://localhost:9357/chat/ tick now --repeat 10 --every 0.5
      tail -n 5 log | smqrt pub http://localhost:9357/chat/ log
      smqrt pub mqtt://localhost house/lamp on --qos 1
    """
    messages = _paced(_messages(data, file, repeat), every)
    if is_mqtt(url):
        _reject_options("SMQ", subtopic=subtopic, id=is_id)
        if mqtt == "3.1.1" and (expiry or properties):
            raise click.UsageError("--expiry and --property need MQTT 5")
        given = _properties(properties, expiry)
        publish_mqtt(url, topic, messages, int(qos or 0), retain, mqtt or "5", given, **connection)
        return
    _reject_options("MQTT", qos=qos, mqtt=mqtt, retain=retain, expiry=expiry, property=properties)
    destination = topic_of(topic, is_id)
    with open_client(url, **connection) as client:
        for message in messages:
            _publish(client, message, destination, subtopic)
        if not client.flush():
            raise failure(client.end)
    if client.dropped:
        raise RejectedByBroker(f"the broker rejected {topic!r}" + (f" or {subtopic!r}" if subtopic else ""))


def _properties(given: tuple[str, ...], expiry_s: int | None) -> dict[str, object]:
    """Return the properties of the options --property and --expiry."""
    found: dict[str, object] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--property {one}: NAME=VALUE is needed, such as contenttype=text/plain")
        number = int(value) if name in NUMBERS and value.isascii() and value.isdigit() else value
        known = found.get(name)
        if known is None:
            found[name] = number
        else:
            found[name] = [*known, number] if isinstance(known, list) else [known, number]
    if expiry_s is not None:
        found["messageexpiryinterval"] = expiry_s
    return found


def _reject_options(kind: str, **options: Any) -> None:
    """Reject options that apply to the other kind of broker only."""
    for name, value in options.items():
        if value:
            raise click.UsageError(f"--{name} is for {kind} brokers only")


def _messages(data: str | None, file: Path | None, repeat: int) -> Iterator[bytes]:
    if data is not None and file is not None:
        raise click.UsageError("pass either DATA or --file")
    if data is not None:
        return itertools.repeat(os.fsencode(data), repeat)
    if file is None:
        if repeat != 1:
            raise click.UsageError("--repeat requires DATA or --file")
        return _lines_of_stdin()
    try:
        return itertools.repeat(file.read_bytes(), repeat)
    except OSError as error:
        raise Failure(f"Cannot read {file}: {error.strerror}") from None


def _paced(messages: Iterator[bytes], every_s: float) -> Iterator[bytes]:
    for number, message in enumerate(messages):
        if number and every_s:
            gevent.sleep(every_s)
        yield message


def _publish(client: SmqClient, line: bytes, topic: str | int, subtopic: str | int | None) -> None:
    try:
        client.publish(line, topic, subtopic)
    except ArgumentError as error:
        raise Failure(str(error)) from None
    except ClosedError:
        raise failure(client.end) from None
    if client.backlog_bytes > _READ_BYTES and not client.flush():
        raise failure(client.end)
    if not client.connected:
        raise failure(client.end)


def _lines_of_stdin() -> Iterator[bytes]:
    # In a thread: reading a terminal or pipe would block the loop, and with it the client's pings.
    read = partial(gevent.get_hub().threadpool.apply, os.read, (sys.stdin.fileno(), _READ_BYTES))
    rest = b""
    while chunk := read():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest


# ---- `smqrt request`


@click.command()
@click.argument("url")
@click.argument("topic")
@click.argument("data", default="")
@_id
@click.option(
    "--timeout", type=click.FloatRange(min=0), default=5.0, show_default=True, help="Seconds to wait for the reply."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, with the ETID of the sender.")
@_raw
@connection_options
def request(
    url: str,
    topic: str,
    data: str,
    is_id: bool,
    timeout: float,
    as_json: bool,
    raw: bool,
    **connection: Unpack[ConnectionOptions],
) -> None:
    """Publish DATA to TOPIC of the SMQ broker at URL, and print the first reply.

    A reply is a message to the ETID of this client with the sub-topic ID of the request; `Message.reply` sends one.
    Exit code 4 when no reply arrives in time.

    \b
    Example:
      smqrt request http://localhost:9357/chat/ weather Rome --timeout 2
    """
    if is_mqtt(url):
        raise click.UsageError("request is for SMQ brokers only")
    number = secrets.randbelow(0xFFFFFFFF) + 1  # random: a late reply to an earlier request has another number
    replies: Queue[Any] = Queue()
    with open_client(url, **connection) as client:
        client.onclose = lambda *_: replies.put(failure(client.end))
        client.subscribe("self", onmsg=lambda *reply: replies.put(reply) if reply[3] == number else None)
        _publish(client, os.fsencode(data), topic_of(topic, is_id), number)
        if client.flush() and client.dropped:
            raise RejectedByBroker(f"the broker rejected {topic!r}")
        with gevent.Timeout(timeout, TimedOut(f"no reply to {topic!r} within {timeout:g} seconds")):
            reply = replies.get()
        if isinstance(reply, Failure):
            raise reply
        write_line(_as_json(client, topic, *reply) if as_json else _as_text(topic, reply[0], raw, verbose=False))


# ---- `smqrt sub`


@click.command()
@click.argument("url")
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per message.")
@_raw
@click.option("--verbose", "-v", is_flag=True, help="Print the topic before each message.")
@click.option("--count", type=click.IntRange(min=1), help="Exit after this many messages.")
@click.option("--subtopic", help="Only messages of this sub-topic.")
@click.option("--timeout", type=float, help="Exit after this many seconds, with code 4 if --count is not reached.")
@_mqtt_options
@connection_options
def sub(url: str, topics: tuple[str, ...], qos: str | None, mqtt: str | None, **options: Unpack[_SubOptions]) -> None:
    """Subscribe to topics and print their messages, one per line, until Ctrl-C.

    The topic "self" receives the messages to the ETID of this client; the command prints the ETID on standard error.
    The client reconnects after a lost connection. With mqtt:// or mqtts://, URL is an MQTT broker, and topics may
    contain the wildcards + and #.

    \b
    Examples:
      smqrt sub http://localhost:9357/chat/ say log
      smqrt sub http://localhost:9357/chat/ say --json --count 1
      smqrt sub mqtt://localhost 'house/#' --verbose
    """
    try:
        if is_mqtt(url):
            _sub_mqtt(url, topics, int(qos or 0), mqtt or "5", **options)
        else:
            _reject_options("MQTT", qos=qos, mqtt=mqtt)
            _sub_smq(url, topics, **options)
    except BrokenPipeError:
        discard_output()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _sub_smq(
    url: str,
    topics: tuple[str, ...],
    as_json: bool,
    raw: bool,
    verbose: bool,
    count: int | None,
    subtopic: str | None,
    timeout: float | None,
    **connection: Unpack[ConnectionOptions],
) -> None:
    messages: Queue[Any] = Queue()

    def onclose(word: str | None, can_reconnect: bool) -> bool:
        if can_reconnect:
            click.echo(f"{printable(str(client.end))}; reconnecting", err=True)
        else:
            messages.put(failure(client.end))
        return can_reconnect

    with open_client(url, reconnect_delay_s=1.0, **connection) as client:
        client.onclose = onclose
        for topic in topics:
            _subscribe(client, messages, topic, subtopic)
        if client.flush() and "self" in topics:
            click.echo(f"self is ETID {client.gettid()}", err=True)
        for topic, *message in received(messages, count, timeout):
            write_line(_as_json(client, topic, *message) if as_json else _as_text(topic, message[0], raw, verbose))


def _sub_mqtt(
    url: str,
    topics: tuple[str, ...],
    qos: int,
    version: str,
    as_json: bool,
    raw: bool,
    verbose: bool,
    count: int | None,
    subtopic: str | None,
    timeout: float | None,
    **connection: Unpack[ConnectionOptions],
) -> None:
    _reject_options("SMQ", subtopic=subtopic)
    messages: Queue[Any] = Queue()
    with _delivery_errors(), _open_mqtt(url, partial(_on_mqtt_status, messages), version, **connection) as client:
        for topic in topics:
            granted = partial(_on_suback, messages)
            _usage_checked(client.subscribe, topic, lambda *message: messages.put(message), granted, qos=qos)
        for message in received(messages, count, timeout):
            topic, payload, properties, cpt = message
            if as_json:
                sent = {name: value for name, value in properties.items() if name != "subscriptionidentifier"}
                # cpt is the first byte of Publish: bit 0 is retain, bits 1 and 2 are the quality of service.
                fields = {"ts": now(), "topic": topic, "qos": cpt >> 1 & 3, "retain": bool(cpt & 1), "properties": sent}
                write_line(json_line(fields | payload_fields(payload)))
            else:
                write_line(_as_text(topic, payload, raw, verbose))


def _subscribe(client: SmqClient, messages: Queue[Any], topic: str, subtopic: str | None) -> None:
    def onack(accepted: bool, *_: Any) -> None:
        if not accepted:
            name = f"{topic!r}" + (f" with sub-topic {subtopic!r}" if subtopic else "")
            messages.put(RejectedByBroker(f"the broker rejected the subscription to {name}"))

    client.subscribe(topic, subtopic, onmsg=lambda *message: messages.put((topic, *message)), onack=onack)


def _as_text(topic: str, data: bytes, raw: bool, verbose: bool) -> bytes:
    line = topic.encode() + b" " + data if verbose else data
    return line if raw or not sys.stdout.isatty() else printable(line).encode()


def _as_json(client: SmqClient, topic: str, data: bytes, ptid: int, tid: int, subtid: int) -> bytes:
    subtopic = client.tid2subtopic(subtid) if subtid else None
    fields = {"ts": now(), "topic": topic, "tid": tid, "subtopic": subtopic, "stid": subtid, "ptid": ptid}
    return json_line(fields | payload_fields(data))


# ---- MQTT clients


def is_mqtt(url: str) -> bool:
    """Return whether `url` is the URL of an MQTT broker."""
    return url.lower().startswith(("mqtt://", "mqtts://"))


def publish_mqtt(
    url: str,
    topic: str,
    lines: Iterator[bytes],
    qos: int,
    retain: bool,
    version: str,
    properties: Mapping[str, object],
    **connection: Unpack[ConnectionOptions],
) -> None:
    """Publish `lines` to a topic.

    Raises:
        Failure: no connection, or the broker rejected a message.
    """
    with _delivery_errors(), _open_mqtt(url, lambda *_: False, version, **connection) as client:
        recent: list[Delivery] = []
        for line in lines:
            recent.append(_usage_checked(client.publish, topic, line, qos, retain, properties))
            if len(recent) >= _MQTT_BACKLOG:
                _flush_mqtt(client, topic, recent)
        _flush_mqtt(client, topic, recent)


@contextmanager
def open_mqtt_publisher(
    url: str, **connection: Unpack[ConnectionOptions]
) -> Iterator[Callable[[str, bytes, int, bool, dict[str, Any]], None]]:
    """Connect to an MQTT broker and yield `publish(topic, payload, qos, retain, properties)`; see `publish_mqtt`."""
    recent: list[Delivery] = []
    with _delivery_errors(), _open_mqtt(url, lambda *_: False, "5", _MAX_PACKET_BYTES, **connection) as client:

        def publish(topic: str, payload: bytes, qos: int, retain: bool, properties: dict[str, Any]) -> None:
            recent.append(_usage_checked(client.publish, topic, payload, qos, retain, properties))
            if len(recent) >= _MQTT_BACKLOG:
                _flush_mqtt(client, topic, recent)

        yield publish
        _flush_mqtt(client, "the last topics", recent)


@contextmanager
def _delivery_errors() -> Iterator[None]:
    """Raise a DeliveryError as a Failure."""
    try:
        yield
    except DeliveryError as error:
        raise Failure(str(error)) from None


def _flush_mqtt(client: MqttClient, topic: str, recent: list[Delivery]) -> None:
    """Wait until the broker has acknowledged the recent messages, and raise for rejected ones."""
    if not client.flush() or client.closed:
        raise _mqtt_failure(client.end)
    for delivery in recent:
        if delivery.error is not None:
            raise RejectedByBroker(f"the broker rejected a message to {topic!r}: {delivery.error}")
    recent.clear()


def _on_suback(messages: Queue[Any], topic: str, reason: int, _properties: object) -> None:
    if reason >= _MQTT_REJECTED:
        messages.put(RejectedByBroker(f"the broker rejected the subscription to {topic!r}"))


def _on_mqtt_status(messages: Queue[Any], kind: str, code: str, status: Mapping[str, Any]) -> float | bool:
    """Handle `onstatus` of a subscriber: print the reason of a lost connection; return the delay of the reconnect."""
    if (kind, code) == ("mqtt", "connect") and not status["reasoncode"]:
        return True
    end = MqttCloseReason(kind, code, status)
    if end.can_reconnect:
        click.echo(f"{printable(str(end))}; reconnecting", err=True)
        return _MQTT_RETRY_S
    messages.put(_mqtt_failure(end))
    return False


def _open_mqtt(
    url: str,
    onstatus: Callable[..., Any],
    version: str,
    max_packet_bytes: int = 1 << 20,
    **connection: Unpack[ConnectionOptions],
) -> MqttClient:
    """Return a connected MQTT client; `onstatus` decides on reconnects after a successful first connection."""
    gevent.get_hub().NOT_ERROR += (KeyboardInterrupt,)  # otherwise gevent prints a traceback for it
    if connection.get("info") is not None:
        raise click.UsageError("--info is for SMQ brokers only")
    options: dict[str, object] = {"cafile": connection.get("cafile"), "nocheck": connection.get("insecure", False)}
    options |= {"timeout": connection.get("connect_timeout", 5.0), "version": 5 if version == "5" else 4}
    options["maxpacketsize"] = max_packet_bytes
    if (uid := connection.get("uid")) is not None:
        options["clientidentifier"] = uid
    if credentials := credentials_for(connection):
        user, _, password = credentials.decode("utf-8", "replace").partition(":")
        options |= {"username": user, "password": password}
    was_connected = False

    def on_any_status(kind: str, code: str, status: Mapping[str, Any]) -> float | bool:
        nonlocal was_connected
        is_accepted = (kind, code) == ("mqtt", "connect") and not status["reasoncode"]
        if not was_connected and not is_accepted:
            return False
        was_connected = True
        return is_accepted or onstatus(kind, code, status)

    client = _usage_checked(MqttClient, url, on_any_status, **options)
    if not client.wait_connected():
        raise _mqtt_failure(client.end)
    return client  # type: ignore[no-any-return]


def _usage_checked(fn: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a function, and raise an ArgumentError as a usage error."""
    try:
        return fn(*arguments, **keywords)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None


def _mqtt_failure(end: MqttCloseReason | None) -> Failure:
    if end is None:
        return Failure("no connection")
    return RejectedByBroker(str(end)) if end.code == "connect" else Failure(str(end))


# ---- `smqrt bench`
#
# Publisher and subscribers share one process, so the figures are a lower bound. At most `_WINDOW_BYTES` are in flight,
# so that this process does not overrun its own buffers: lost messages are then lost by the broker.

_WINDOW_BYTES = 256 * 1024
_TIMEOUT_S = 5.0
_SHAPES = ((16, 1), (1024, 1), (60_000, 1), (128, 10))  # payload in bytes, number of subscribers


class BenchRow(NamedTuple):
    """A row of the result table."""

    shape: str
    messages: int
    seconds: float
    lost: int
    reordered: int
    p50_us: float = 0
    p99_us: float = 0
    payload_bytes: int = 0


@click.command()
@click.argument("url")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Duration of each test."
)
@connection_options
def bench(url: str, seconds: float, **connection: Unpack[ConnectionOptions]) -> None:
    """Measure the broker at URL: connections, round trips, messages per second, losses.

    This single Python process generates the load, and is often slower than the broker. Exit code 1 when messages were
    lost or out of order.
    """
    connection["uid"] = None  # random for each client: a second client with the same ID would disconnect the first

    def connect() -> SmqClient:
        return open_client(url, **connection)

    rows = [_measure_connects(connect, seconds), _measure_round_trips(connect, seconds)]
    rows += [_measure_publish(connect, seconds, size, subscribers) for size, subscribers in _SHAPES]
    table = Table(title=url, title_justify="left", box=SIMPLE)
    table.add_column("shape", no_wrap=True)
    for heading in ("messages", "msg/s", "MB/s", "p50 µs", "p99 µs", "lost", "reordered"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        rate = row.messages / row.seconds
        megabytes = f"{rate * row.payload_bytes / 1e6:,.1f}" if row.payload_bytes else ""
        percentiles = [f"{value:,.0f}" if value else "" for value in (row.p50_us, row.p99_us)]
        counts = [str(row.lost), str(row.reordered)]
        table.add_row(row.shape, f"{row.messages:,}", f"{rate:,.0f}", megabytes, *percentiles, *counts)
    Console().print(table)
    if failed := sum(row.lost + row.reordered for row in rows):
        raise Failure(f"{failed} messages were lost or out of order")


def _measure_connects(connect: Callable[[], SmqClient], seconds: float) -> BenchRow:
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        client = connect()
        times.append(time.perf_counter() - started)
        client.close()
    return BenchRow("connect and close", len(times), seconds, 0, 0, *_percentiles(times))


def _measure_round_trips(connect: Callable[[], SmqClient], seconds: float) -> BenchRow:
    """Publish to the ETID of a second client, which publishes a reply to the ETID of the first."""
    with connect() as caller, connect() as server:
        replied = Event()
        server.subscribe("self", onmsg=lambda data, ptid, *_: server.publish(data, ptid))
        caller.subscribe("self", onmsg=lambda *_: replied.set())
        times: list[float] = []
        target, end = server.gettid(), time.perf_counter() + seconds
        assert target is not None
        while (started := time.perf_counter()) < end:
            replied.clear()
            caller.publish(b"ping", target)
            if not replied.wait(_TIMEOUT_S):
                raise Failure(f"no reply to a message within {_TIMEOUT_S:g} s")
            times.append(time.perf_counter() - started)
    return BenchRow("round trip by ETID", len(times), seconds, 0, 0, *_percentiles(times))


class _Receiver:
    """A subscriber that counts messages and checks their order."""

    def __init__(self, client: SmqClient, topic: str, progress: Event) -> None:
        self.client, self.received, self.reordered = client, 0, 0
        self._progress = progress
        client.subscribe(topic, onmsg=self._onmsg)

    def _onmsg(self, data: bytes, *_: int) -> None:
        self.reordered += int.from_bytes(data[:8], "big") != self.received
        self.received += 1
        self._progress.set()


def _measure_publish(connect: Callable[[], SmqClient], seconds: float, size_bytes: int, subscribers: int) -> BenchRow:
    topic, progress = f"smqrt-bench-{secrets.token_hex(8)}", Event()
    clients = [connect() for _ in range(subscribers + 1)]
    publisher, *others = clients
    try:
        receivers = [_Receiver(client, topic, progress) for client in others]
        if not all(client.flush(_TIMEOUT_S) for client in others):
            raise failure(others[0].end)
        started = time.perf_counter()
        sent = _publish_until(started + seconds, publisher, topic, size_bytes, receivers, progress)
        deadline = time.perf_counter() + _TIMEOUT_S
        while min(receiver.received for receiver in receivers) < sent and time.perf_counter() < deadline:
            gevent.sleep(0.001)
        elapsed = time.perf_counter() - started
        if publisher.dropped:
            raise RejectedByBroker(f"the broker rejected the topic {topic!r}")
    finally:
        for client in clients:
            client.close(1)
    received = sum(receiver.received for receiver in receivers)
    shape = f"1 to {subscribers}, {size_bytes:,} B"
    reordered = sum(receiver.reordered for receiver in receivers)
    return BenchRow(shape, received, elapsed, sent * subscribers - received, reordered, payload_bytes=size_bytes)


def _publish_until(
    end: float, publisher: SmqClient, topic: str, size_bytes: int, receivers: list[_Receiver], progress: Event
) -> int:
    """Publish numbered messages until a time, with at most a window of messages in flight; return their number."""
    filler = bytes(size_bytes - 8)  # the number takes 8 bytes
    window = _WINDOW_BYTES // size_bytes
    batch = min(64, max(1, window // 4))  # messages between two switches to the receivers
    sent = 0
    while time.perf_counter() < end:
        for _ in range(batch):
            publisher.publish(sent.to_bytes(8, "big") + filler, topic)
            sent += 1
        gevent.sleep(0)
        while sent - min(receiver.received for receiver in receivers) >= window:
            progress.clear()
            if not progress.wait(0.1) and time.perf_counter() > end + _TIMEOUT_S:
                return sent
    return sent


def _percentiles(times_s: list[float]) -> tuple[float, float]:
    ordered = sorted(times_s)
    return ordered[len(ordered) // 2] * 1e6, ordered[len(ordered) * 99 // 100] * 1e6
