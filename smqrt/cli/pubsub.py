"""`smqrt pub`, `smqrt sub` and `smqrt request`: publish, subscribe and ask from a terminal or a script; with `mqtt://`
and `mqtts://` at MQTT brokers.
"""

from __future__ import annotations

import itertools
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Required, TypeVar, Unpack

import click
import gevent
from gevent.queue import Queue

from smqrt.cli.connect import (
    ConnectionOptions,
    Failure,
    RejectedByBroker,
    TimeRanOut,
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

_READ_BYTES = 65536
_INTERRUPTED = 130


_Command = TypeVar("_Command", bound=Callable[..., Any])


class _SubOptions(ConnectionOptions):
    as_json: Required[bool]
    raw: Required[bool]
    verbose: Required[bool]
    count: Required[int | None]
    subtopic: Required[str | None]
    timeout: Required[float | None]


_raw = click.option(
    "--raw",
    is_flag=True,
    help="Print messages as they came on a terminal too, with what steers it; a pipe always gets them so.",
)


def _mqtt_options(command: _Command) -> _Command:
    qos = click.option("--qos", type=click.Choice(["0", "1", "2"]), help="MQTT: quality of service.  [default: 0]")
    version = click.option("--mqtt", type=click.Choice(["5", "3.1.1"]), help="MQTT: version.  [default: 5]")
    return qos(version(command))


# ---- pub


@click.command()
@click.argument("url")
@click.argument("topic")
@click.argument("data", required=False)
@click.option("--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Publish what a file holds.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, help="Publish so many times.  [default: 1]")
@click.option(
    "--every", metavar="SECONDS", type=click.FloatRange(min=0), default=0.0, help="Pause between repetitions."
)
@click.option("--subtopic", help="Name of a sub-topic.")
@click.option("--id", "is_id", is_flag=True, help="TOPIC is a number: a topic's id or a client's ETID.")
@click.option("--retain", is_flag=True, help="MQTT: the broker keeps the message for later subscribers.")
@_mqtt_options
@connection_options
def pub(
    url: str,
    topic: str,
    subtopic: str | None,
    is_id: bool,
    retain: bool,
    qos: str | None,
    mqtt: str | None,
    data: str | None,
    file: Path | None,
    repeat: int,
    every: float,
    **connection: Unpack[ConnectionOptions],
) -> None:
    """Publish DATA to TOPIC of the broker at URL; without DATA, each line of the standard input.

    URL may be that of an application: the broker is looked for at its smq.lsp and smq. With mqtt:// and mqtts:// it is
    an MQTT broker, and credentials are "user:password".

    \b
    smqrt pub http://localhost:9357/chat/ say hello
    smqrt pub http://localhost:9357/chat/ say --file picture.jpg
    smqrt pub http://localhost:9357/chat/ tick now --repeat 10 --every 0.5
    tail -n 5 log | smqrt pub http://localhost:9357/chat/ log
    smqrt pub mqtt://localhost house/lamp on --qos 1
    """
    messages = _paced(_messages(data, file, repeat), every)
    if is_mqtt(url):
        _refuse("SMQ", subtopic=subtopic, id=is_id)
        publish(url, topic, messages, int(qos or 0), retain, mqtt or "5", **connection)
        return
    _refuse("MQTT", qos=qos, mqtt=mqtt, retain=retain)
    destination = topic_of(topic, is_id)
    with open_client(url, **connection) as client:
        for message in messages:
            _publish(client, message, destination, subtopic)
        if not client.flush():
            raise failure(client.end)
    if client.dropped:
        raise RejectedByBroker(f"the broker refused {topic!r}" + (f" or {subtopic!r}" if subtopic else ""))


def _refuse(kind: str, **options: Any) -> None:
    """Refuses options that mean nothing to this broker: those of the other kind."""
    for name, value in options.items():
        if value:
            raise click.UsageError(f"--{name} is for {kind} brokers only")


def _messages(data: str | None, file: Path | None, repeat: int) -> Iterator[bytes]:
    if data is not None and file is not None:
        raise click.UsageError("give DATA or --file, not both")
    if file is None and data is None:
        if repeat != 1:
            raise click.UsageError("--repeat needs DATA or --file; lines of the standard input come once")
        return _lines_of_stdin()
    return itertools.repeat(os.fsencode(data) if file is None and data is not None else _content_of(file), repeat)


def _content_of(file: Path | None) -> bytes:
    assert file
    try:
        return file.read_bytes()
    except OSError as error:
        raise Failure(f"{file} can't be read: {error.strerror}") from None


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
    read = partial(gevent.get_hub().threadpool.apply, os.read, (sys.stdin.fileno(), _READ_BYTES))
    rest = b""
    while chunk := read():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)
    if rest:
        yield rest


# ---- request


@click.command()
@click.argument("url")
@click.argument("topic")
@click.argument("data", default="")
@click.option("--id", "is_id", is_flag=True, help="TOPIC is a number: a topic's id or a client's ETID.")
@click.option("--timeout", type=click.FloatRange(min=0), default=5.0, show_default=True, help="Seconds to wait.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object: who answered, and the message.")
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
    """Send DATA to TOPIC of the SMQ broker at URL, and print the first answer.

    The answer is what somebody sends to this client with the same sub-topic id: the `reply` of messages does that.
    Exit code 4 when none came in time.

    \b
    smqrt request http://localhost:9357/chat/ weather Rome --timeout 2
    """
    if is_mqtt(url):
        raise click.UsageError("request is for SMQ brokers only; MQTT has no common way to answer")
    number = secrets.randbelow(0xFFFFFFFF) + 1
    answers: Queue[Any] = Queue()
    with open_client(url, **connection) as client:
        client.onclose = lambda *_: answers.put(failure(client.end))
        client.subscribe("self", onmsg=lambda *answer: answers.put(answer) if answer[3] == number else None)
        _publish(client, os.fsencode(data), topic_of(topic, is_id), number)
        if client.flush() and client.dropped:
            raise RejectedByBroker(f"the broker refused {topic!r}")
        with gevent.Timeout(timeout, TimeRanOut(f"no answer to {topic!r} within {timeout:g} seconds")):
            answer = _next(answers)
        write_line(_as_json(client, topic, *answer) if as_json else _as_text(topic, answer[0], raw, verbose=False))


# ---- sub


@click.command()
@click.argument("url")
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="A JSON object a line: topic, subtopic, ids, and the message.")
@_raw
@click.option("--verbose", "-v", is_flag=True, help="Put the topic before each message.")
@click.option("--count", type=click.IntRange(min=1), help="End after this many messages.")
@click.option("--subtopic", help="Only messages of this sub-topic.")
@click.option("--timeout", type=float, help="End after this many seconds (exit code 4 when --count was not reached).")
@_mqtt_options
@connection_options
def sub(url: str, topics: tuple[str, ...], qos: str | None, mqtt: str | None, **options: Unpack[_SubOptions]) -> None:
    """Print what is published to TOPICs of the broker at URL, a message a line, until interrupted.

    The topic "self" shows what is sent to this client's own ETID, which is printed on the standard error as soon
    as all subscriptions stand. A lost connection is made again.

    With mqtt:// and mqtts:// it is an MQTT broker: topics may have the wildcards + and #.

    \b
    smqrt sub http://localhost:9357/chat/ say log
    smqrt sub http://localhost:9357/chat/ say --json --count 1
    smqrt sub mqtt://localhost 'house/#' --verbose
    """
    try:
        if is_mqtt(url):
            _sub_mqtt(url, topics, int(qos or 0), mqtt or "5", **options)
        else:
            _refuse("MQTT", qos=qos, mqtt=mqtt)
            _sub(url, topics, **options)
    except BrokenPipeError:
        discard_output()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _sub(
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
    with open_client(url, reconnect_delay_s=1.0, **connection) as client:
        client.onclose = partial(_lost, client, messages)
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
    _refuse("SMQ", subtopic=subtopic)

    def show(topic: str, payload: bytes, properties: Mapping[str, Any], cpt: int) -> None:
        as_text = partial(_as_text, topic, payload, raw, verbose)
        write_line(_mqtt_as_json(topic, payload, properties, cpt) if as_json else as_text())

    subscribe(url, topics, show, count, timeout, qos, version, **connection)


def _mqtt_as_json(topic: str, payload: bytes, properties: Mapping[str, Any], cpt: int) -> bytes:
    sent = {name: value for name, value in properties.items() if name != "subscriptionidentifier"}
    fields = {"ts": now(), "topic": topic, "qos": cpt >> 1 & 3, "retain": bool(cpt & 1), "properties": sent}
    return json_line(fields | payload_fields(payload))


def _subscribe(client: SmqClient, messages: Queue[Any], topic: str, subtopic: str | None) -> None:
    def onack(accepted: bool, *_: Any) -> None:
        if not accepted:
            what = f"{topic!r}" + (f" with sub-topic {subtopic!r}" if subtopic else "")
            messages.put(RejectedByBroker(f"the broker refused the subscription to {what}"))

    client.subscribe(topic, subtopic, onmsg=lambda *message: messages.put((topic, *message)), onack=onack)


def _lost(client: SmqClient, messages: Queue[Any], word: str | None, can_reconnect: bool) -> bool:
    if can_reconnect:
        click.echo(f"{printable(str(client.end))}; trying again", err=True)
    else:
        messages.put(failure(client.end))
    return can_reconnect


def _next(messages: Queue[Any]) -> Any:
    message = messages.get()
    if isinstance(message, Failure):
        raise message
    return message


def _as_text(topic: str, data: bytes, raw: bool, verbose: bool) -> bytes:
    line = topic.encode() + b" " + data if verbose else data
    return line if raw or not sys.stdout.isatty() else printable(line).encode()


def _as_json(client: SmqClient, topic: str, data: bytes, ptid: int, tid: int, subtid: int) -> bytes:
    subtopic = client.tid2subtopic(subtid) if subtid else None
    fields = {"ts": now(), "topic": topic, "tid": tid, "subtopic": subtopic, "stid": subtid, "ptid": ptid}
    return json_line(fields | payload_fields(data))


_BACKLOG = 1000
_RETRY_S = 1.0


def is_mqtt(url: str) -> bool:
    """Whether the broker at `url` speaks MQTT."""
    return url.lower().startswith(("mqtt://", "mqtts://"))


def publish(
    url: str,
    topic: str,
    lines: Iterator[bytes],
    qos: int,
    retain: bool,
    version: str,
    **connection: Unpack[ConnectionOptions],
) -> None:
    """Publish `lines` to a topic.

    Raises:
        Failure: there is no connection, or the broker refuses.
    """
    with _delivery_errors(), _opened(url, lambda *_: False, version, **connection) as client:
        recent: list[Delivery] = []
        for line in lines:
            recent.append(_checked(client.publish, topic, line, qos, retain))
            if len(recent) >= _BACKLOG:
                _deliver(client, topic, recent)
        _deliver(client, topic, recent)


@contextmanager
def _delivery_errors() -> Iterator[None]:
    """Says in one sentence what was not delivered."""
    try:
        yield
    except DeliveryError as error:
        raise Failure(str(error)) from None


def _deliver(client: MqttClient, topic: str, recent: list[Delivery]) -> None:
    if not client.flush() or client.closed:
        raise _failure(client.end)
    for delivery in recent:
        if delivery.error is not None:
            raise RejectedByBroker(f"the broker refused a message to {topic!r}: {delivery.error}")
    recent.clear()


def subscribe(
    url: str,
    topics: tuple[str, ...],
    show: Callable[..., None],
    count: int | None,
    timeout: float | None,
    qos: int,
    version: str,
    **connection: Unpack[ConnectionOptions],
) -> None:
    """Give what is published to `topics` to `show(topic, payload, properties, cpt)`.

    Raises:
        Failure: there is no connection, the broker refuses, or time ran out before `count` messages came.
    """
    messages: Queue[Any] = Queue()
    with _delivery_errors(), _opened(url, partial(_status, messages), version, **connection) as client:
        for topic in topics:
            granted = partial(_granted, messages)
            _checked(client.subscribe, topic, lambda *message: messages.put(message), granted, qos=qos)
        for message in received(messages, count, timeout):
            show(*message)


def _granted(messages: Queue[Any], topic: str, reason: int, _properties: object) -> None:
    if reason >= 0x80:
        messages.put(RejectedByBroker(f"the broker refused the subscription to {topic!r}"))


def _status(messages: Queue[Any], kind: str, code: str, status: Mapping[str, Any]) -> float | bool:
    if (kind, code) == ("mqtt", "connect") and not status["reasoncode"]:
        return True
    end = MqttCloseReason(kind, code, status)
    if end.can_reconnect:
        click.echo(f"{printable(str(end))}; trying again", err=True)
        return _RETRY_S
    messages.put(_failure(end))
    return False


def _opened(
    url: str,
    onstatus: Callable[..., Any],
    version: str,
    **connection: Unpack[ConnectionOptions],
) -> MqttClient:
    gevent.get_hub().NOT_ERROR += (KeyboardInterrupt,)  # gevent would print it
    if connection.get("info") is not None:
        raise click.UsageError("--info is for SMQ brokers only")
    options: dict[str, object] = {"cafile": connection.get("cafile"), "nocheck": connection.get("insecure", False)}
    options |= {"timeout": connection.get("connect_timeout", 5.0), "version": 5 if version == "5" else 4}
    if (uid := connection.get("uid")) is not None:
        options["clientidentifier"] = uid
    if credentials := credentials_for(connection):
        user, _, password = credentials.decode("utf-8", "replace").partition(":")
        options |= {"username": user, "password": password}
    first: list[Any] = []
    client = _checked(MqttClient, url, lambda *what: _first(first, onstatus, what), **options)
    if not client.wait_connected():
        raise _failure(client.end)
    return client  # type: ignore[no-any-return]


def _first(first: list[Any], onstatus: Callable[..., Any], what: tuple[Any, ...]) -> Any:
    """The first attempt has to succeed; later ones are up to `onstatus`."""
    accepted = what[:2] == ("mqtt", "connect") and not what[2]["reasoncode"]
    if not first and not accepted:
        return False
    first.append(what)
    return accepted or onstatus(*what)


def _checked(fn: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    try:
        return fn(*arguments, **keywords)
    except ArgumentError as error:
        raise click.UsageError(str(error)) from None


def _failure(end: MqttCloseReason | None) -> Failure:
    if end is None:
        return Failure("no connection")
    return RejectedByBroker(str(end)) if end.code == "connect" else Failure(str(end))
