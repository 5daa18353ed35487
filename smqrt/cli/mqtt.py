"""`smqrt pub` and `smqrt sub` with `mqtt://` and `mqtts://`: the same for MQTT brokers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

import click
import gevent
from gevent.queue import Queue

from smqrt.cli.connect import ConnectionOptions, Failure, RefusedByBroker, credentials_of, received
from smqrt.errors import ArgumentError, DeliveryError
from smqrt.mqtt import Delivery, MqttClient, MqttCloseReason
from smqrt.printable import printable

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
            raise RefusedByBroker(f"the broker refused a message to {topic!r}: {delivery.error}")
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
        messages.put(RefusedByBroker(f"the broker refused the subscription to {topic!r}"))


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
    if credentials := credentials_of(connection.get("credentials_file")):
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
    return RefusedByBroker(str(end)) if end.code == "connect" else Failure(str(end))
