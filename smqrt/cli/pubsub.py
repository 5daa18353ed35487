"""`smqrt pub` and `smqrt sub`: publish and subscribe from a terminal or a script."""

from __future__ import annotations

import base64
import json as jsonlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import click
import gevent
from gevent.queue import Queue

from smqrt.cli import mqtt
from smqrt.cli.connecting import Failure, Refused, TimeRanOut, connection_options, failure, open_client, topic_of
from smqrt.client import SmqClient
from smqrt.errors import ArgumentError

_READ_BYTES = 65536
_INTERRUPTED = 130


_Command = TypeVar("_Command", bound=Callable[..., Any])


def _mqtt_options(command: _Command) -> _Command:
    qos = click.option("--qos", type=click.Choice(["0", "1", "2"]), default="0", help="MQTT: quality of service.")
    version = click.option("--mqtt", "version", type=click.Choice(["5", "3.1.1"]), default="5", help="MQTT: version.")
    return qos(version(command))


# ---- pub


@click.command()
@click.argument("url")
@click.argument("topic")
@click.argument("data", required=False)
@click.option("--subtopic", help="Name of a sub-topic.")
@click.option("--id", "is_id", is_flag=True, help="TOPIC is a number: a topic's id or a client's ETID.")
@click.option("--retain", is_flag=True, help="MQTT: the broker keeps the message for later subscribers.")
@_mqtt_options
@connection_options
def pub(
    url: str,
    topic: str,
    data: str | None,
    subtopic: str | None,
    is_id: bool,
    retain: bool,
    qos: str,
    version: str,
    **connection: Any,
) -> None:
    """Publish DATA to TOPIC of the broker at URL; without DATA, each line of the standard input.

    With mqtt:// and mqtts:// it is an MQTT broker, and credentials are "user:password".

    \b
    smqrt pub http://localhost:9357/chat/ lamp on
    tail -f log | smqrt pub http://localhost:9357/chat/ log
    smqrt pub mqtt://localhost house/lamp on --qos 1
    """
    if mqtt.is_mqtt(url):
        _only_smq(subtopic=subtopic, id=is_id)
        lines = _lines_of_stdin() if data is None else iter([os.fsencode(data)])
        mqtt.publish(url, topic, lines, int(qos), retain, version=version, **connection)
        return
    destination = topic_of(topic, is_id)
    with open_client(url, **connection) as client:
        lines = _lines_of_stdin() if data is None else iter([os.fsencode(data)])
        for line in lines:
            _publish(client, line, destination, subtopic)
        if not client.flush():
            raise failure(client.end)
    if client.dropped:
        raise Refused(f"the broker refused {topic!r}" + (f" or {subtopic!r}" if subtopic else ""))


def _publish(client: SmqClient, line: bytes, topic: str | int, subtopic: str | None) -> None:
    try:
        client.publish(line, topic, subtopic)
    except ArgumentError as error:
        raise Failure(str(error)) from None
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


# ---- sub


@click.command()
@click.argument("url")
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="A JSON object a line: topic, subtopic, ids, and the message.")
@click.option("--verbose", "-v", is_flag=True, help="Put the topic before each message.")
@click.option("--count", type=click.IntRange(min=1), help="End after this many messages.")
@click.option("--subtopic", help="Only messages of this sub-topic.")
@click.option("--timeout", type=float, help="End after this many seconds (exit code 4 when --count was not reached).")
@_mqtt_options
@connection_options
def sub(url: str, topics: tuple[str, ...], qos: str, version: str, **options: Any) -> None:
    """Print what is published to TOPICs of the broker at URL, a message a line, until interrupted.

    The topic "self" shows what is sent to this client's own ETID, which is printed on the standard error as soon
    as all subscriptions stand. A lost connection is made again.

    With mqtt:// and mqtts:// it is an MQTT broker: topics may have the wildcards + and #.

    \b
    smqrt sub http://localhost:9357/chat/ lamp log
    smqrt sub http://localhost:9357/chat/ lamp --json --count 1
    smqrt sub mqtt://localhost 'house/#' --verbose
    """
    try:
        if mqtt.is_mqtt(url):
            _sub_mqtt(url, topics, qos=int(qos), version=version, **options)
        else:
            _sub(url, topics, **options)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _sub(
    url: str,
    topics: tuple[str, ...],
    as_json: bool,
    verbose: bool,
    count: int | None,
    subtopic: str | None,
    timeout: float | None,
    **connection: Any,
) -> None:
    messages: Queue[Any] = Queue()
    with open_client(url, reconnect_delay=1.0, **connection) as client:
        client.onclose = partial(_lost, client, messages)
        for topic in topics:
            _subscribe(client, messages, topic, subtopic)
        if client.flush() and "self" in topics:
            click.echo(f"self is ETID {client.gettid()}", err=True)
        printed = 0
        with gevent.Timeout(timeout, False):  # type: ignore[arg-type]  # False: leave the block quietly
            while count is None or printed < count:
                topic, *message = _next(messages)
                _print(_as_json(client, topic, *message) if as_json else _as_text(topic, message[0], verbose))
                printed += 1
            return
    if count is not None:
        raise TimeRanOut(f"{printed} of {count} messages came within {timeout:g} seconds")


def _sub_mqtt(
    url: str, topics: tuple[str, ...], as_json: bool, verbose: bool, subtopic: str | None, **options: Any
) -> None:
    _only_smq(subtopic=subtopic)

    def show(topic: str, payload: bytes, properties: Mapping[str, Any], cpt: int) -> None:
        _print(_mqtt_as_json(topic, payload, properties, cpt) if as_json else _as_text(topic, payload, verbose))

    mqtt.subscribe(url, topics, show, **options)


def _mqtt_as_json(topic: str, payload: bytes, properties: Mapping[str, Any], cpt: int) -> bytes:
    sent = {name: value for name, value in properties.items() if name != "subscriptionidentifier"}
    fields = {"topic": topic, "qos": cpt >> 1 & 3, "retain": bool(cpt & 1), "properties": sent}
    return jsonlib.dumps(fields | _content(payload), ensure_ascii=False, default=repr).encode(errors="backslashreplace")


def _only_smq(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise click.UsageError(f"--{name} is for SMQ brokers only")


def _subscribe(client: SmqClient, messages: Queue[Any], topic: str, subtopic: str | None) -> None:
    def onack(accepted: bool, *_: Any) -> None:
        if not accepted:
            what = f"{topic!r}" + (f" with sub-topic {subtopic!r}" if subtopic else "")
            messages.put(Refused(f"the broker refused the subscription to {what}"))

    client.subscribe(topic, subtopic, onmsg=lambda *message: messages.put((topic, *message)), onack=onack)


def _lost(client: SmqClient, messages: Queue[Any], word: str | None, can_reconnect: bool) -> bool:
    if can_reconnect:
        click.echo(f"{client.end}; trying again", err=True)
    else:
        messages.put(failure(client.end))
    return can_reconnect


def _next(messages: Queue[Any]) -> Any:
    message = messages.get()
    if isinstance(message, Failure):
        raise message
    return message


def _print(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _as_text(topic: str, data: bytes, verbose: bool) -> bytes:
    return topic.encode() + b" " + data if verbose else data


def _as_json(client: SmqClient, topic: str, data: bytes, ptid: int, tid: int, subtid: int) -> bytes:
    subtopic = client.tid2subtopic(subtid) if subtid else None
    fields = {"topic": topic, "tid": tid, "subtopic": subtopic, "subtid": subtid, "ptid": ptid, **_content(data)}
    return jsonlib.dumps(fields, ensure_ascii=False, default=repr).encode(errors="backslashreplace")


def _content(data: bytes) -> dict[str, Any]:
    """The message as a JSON value when it is one, else as text when it is UTF-8, else in base64."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
    try:
        return {"json": jsonlib.loads(text)}
    except ValueError:
        return {"text": text}
