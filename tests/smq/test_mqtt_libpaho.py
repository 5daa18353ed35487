"""The MQTT client in C of Eclipse Paho (libpaho-mqtt), which many devices have, at a hub."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_void_p

import gevent
import pytest

from smqrt.server.mqtt import take_mqtt
from tests.support.device import Site

LIBRARY = "libpaho-mqtt3c.so.1"
WAIT_MS = 10_000


class ConnectOptions(Structure):
    """The first fields of MQTTClient_connectOptions, up to its version 0 (MQTTClient.h)."""

    _fields_ = [
        ("id", c_char * 4),
        ("version", c_int),
        ("keepalive_s", c_int),
        ("cleansession", c_int),
        ("reliable", c_int),
        ("will", c_void_p),
        ("username", c_char_p),
        ("password", c_char_p),
        ("connect_timeout_s", c_int),
        ("retry_s", c_int),
        ("tls", c_void_p),
        ("more", c_void_p * 16),
    ]


class Message(Structure):
    """MQTTClient_message."""

    _fields_ = [
        ("id", c_char * 4),
        ("version", c_int),
        ("size", c_int),
        ("payload", c_void_p),
        ("qos", c_int),
        ("retained", c_int),
        ("dup", c_int),
        ("number", c_int),
    ]


def exchange(host: str, port: int, count: int) -> list[tuple[str, bytes, int, int]]:
    """Connect, subscribe with QoS 2, publish with QoS 0, 1 and 2 by turns, and return what arrives."""
    paho = ctypes.CDLL(LIBRARY)
    client, options = c_void_p(), ConnectOptions(b"MQTC", 0, 60, 1, 1, connect_timeout_s=10)
    assert paho.MQTTClient_create(byref(client), f"tcp://{host}:{port}".encode(), b"libpaho", 1, None) == 0
    assert paho.MQTTClient_connect(client, byref(options)) == 0
    assert paho.MQTTClient_subscribe(client, b"c/#", 2) == 0
    got = []
    for at in range(count):
        text, qos = b"message %d" % at, at % 3
        assert paho.MQTTClient_publish(client, b"c/a", len(text), text, qos, 0, None) == 0
        name, size, message = c_char_p(), c_int(), POINTER(Message)()
        assert paho.MQTTClient_receive(client, byref(name), byref(size), byref(message), WAIT_MS) == 0
        one = message.contents
        got.append(((name.value or b"").decode(), ctypes.string_at(one.payload, one.size), one.qos, one.retained))
        paho.MQTTClient_freeMessage(byref(message))
        paho.MQTTClient_free(name)
    assert paho.MQTTClient_disconnect(client, WAIT_MS) == 0
    paho.MQTTClient_destroy(byref(client))
    return got


@pytest.mark.servers
def test_messages_with_each_qos(make_site: Callable[..., Site]) -> None:
    site = make_site(mqtt=True)
    site.server.take_mqtt = take_mqtt
    got = gevent.get_hub().threadpool.apply(exchange, (*site.address(), 60))
    assert got == [("c/a", b"message %d" % at, at % 3, 0) for at in range(60)]
    assert not site.state.devices.sessions
