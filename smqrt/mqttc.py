"""MQTT 5 clients under the documented names of the Lua module `mqttc` (spec: smq §8).

    import gevent
    from smqrt import mqttc

    def onstatus(type, code, status):
        print(type, code)
        return 5  # keep an accepted connection; try again after 5 seconds

    mqtt, _ = mqttc.create("localhost", onstatus, lambda topic, payload, prop, cpt: print(topic, bytes(payload)))
    mqtt.subscribe("garden/#", qos=1)
    mqtt.publish("garden/pump", "on", {"qos": 1})
    gevent.sleep(3600)

It works in gevent programs, under `smqrt serve`, and in plain scripts without monkey patching. `smqrt.mqtt3c` is MQTT
3.1.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from smqrt import mqtt3c
from smqrt.clients.mqtt import documented
from smqrt.clients.mqtt.connect import OnStatus
from smqrt.clients.mqtt.documented import Mqtt, Mqtt3, Options
from smqrt.settings.option_types import switch
from smqrt.wire.mqtt.fields import Props

__all__ = ["Mqtt", "connect", "create"]

OnPub = Callable[[str, bytearray, Props, int], object]
"""`f(topic, payload, prop, cpt)`, called for each message. `cpt` is the first byte of PUBLISH (DUP 8, QoS 6, retain 1).
With `recbta=False` the payload is bytes."""


def create(
    addr: object,
    onstatus: OnStatus,
    onpub: OnPub | Options | None = None,
    op: Options | Props | None = None,
    prop: Props | None = None,
    **options: object,
) -> tuple[Mqtt, None]:
    """Create a client that connects in the background and reconnects after a lost connection. Never blocks.

    One greenlet runs the callbacks, one after the other, while the program waits in a function of gevent. Messages and
    subscriptions are queued while there is no connection. Subscriptions are not repeated after a reconnect: subscribe
    in `onstatus`. (spec: smq §8)

    Args:
        addr: a host name, `host:port`, a URL (mqtt, mqtts, ws, wss), a list of these, a connected socket (see
            `smqrt.mqtt3c.connect`), or a function `f(mqtt, op)` that returns a connected socket, or `(None, error)`,
            each time a connection is needed.
        onstatus: `f(type, code, status)`, called after each connection attempt and at the end of each connection. After
            a successful attempt, a true value keeps the connection. Otherwise False stops the client, True reconnects
            after a random delay, and a number after that many seconds. (help: mqtt-python)
        onpub: `f(topic, payload, prop, cpt)`; the payload is a bytearray, with `recbta=False` bytes. By default,
            messages are only logged. May be omitted: a dict in its place is `op`, and the next argument `prop`.
        op: a dict of options, also as keywords: `port` (1883, with TLS 8883); `secure` or `shark` (True, or a
            `smqrt.transport.tls_contexts.ClientTls`); `nocheck` (trust any certificate); `alpn`; `timeout`
            (milliseconds, 5000); `intf` (local address); `ipv6`; `id` or `clientidentifier` (random); `keepalive`
            (seconds, 60; 0 disables it); `uname` or `username`, `passwd` or `password`; `will` (`{"topic", "payload" or
            "message", "qos", "retain", "properties"}`); `recbta` (True); `onmessage` (`f(message)`, a function that
            gets messages as objects, see `smqrt.mqtt.Message`, in the place of `onpub`); `proxy`, `proxyport`, `socks`,
            `proxyuser`, `proxypass`; `reconnectdelay`, `reconnectmax` (seconds, 1 and 60); `queuesize`,
            `queuebytes`, `queuefull`, `maxpacketsize`, `inflight`, `topicalias` (help: mqtt-python). Unknown options
            are logged and ignored.
        prop: properties of CONNECT, such as `{"sessionexpiryinterval": 3600}` (seconds). Without
            `sessionexpiryinterval`, each connection starts a new session.

    Returns:
        The client and None; `onstatus` receives the errors.

    Raises:
        ArgumentError: an invalid callback, option or property.
    """
    if isinstance(onpub, Mapping):  # as in Lua, onpub may be omitted
        onpub, op, prop = None, onpub, op if prop is None else prop
    given = documented.merged(op, options, documented.OPTIONS, "mqttc.create")
    has_bytearrays = switch().check("recbta", given.get("recbta", True))
    return documented.create(Mqtt(None, bytearray if has_bytearrays else bytes), addr, onstatus, onpub, given, prop)


def connect(
    addr: object, onpub: mqtt3c.OnPub | None, op: Options | None = None, **options: object
) -> tuple[Mqtt3, None] | tuple[None, str | int]:
    """Connect with MQTT 3.1.1 (the older form), as `smqrt.mqtt3c.connect` does. (spec: smq §8)"""
    return mqtt3c.connect(addr, onpub, op, **options)
