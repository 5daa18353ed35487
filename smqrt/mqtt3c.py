"""MQTT 3.1.1 and 3.1 clients under the documented names of the Lua module `mqtt3c` (spec: smq §9).

    from smqrt import mqtt3c

    mqtt, err = mqtt3c.connect("localhost", lambda topic, payload: print(topic, payload))
    if mqtt is None:
        raise SystemExit(f"no connection: {err}")
    mqtt.subscribe("garden/#")
    print(mqtt.run())

It works in gevent programs, under `smqrt serve`, and in plain scripts without monkey patching. `smqrt.mqttc` is MQTT 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from smqrt.clients.mqtt import documented
from smqrt.clients.mqtt.connect import OnStatus
from smqrt.clients.mqtt.documented import Mqtt3, Options

__all__ = ["Mqtt3", "connect", "create"]

OnPub = Callable[[str, bytes], object]
"""`f(topic, payload)`, called for each message."""


def connect(
    addr: object, onpub: OnPub | None, op: Options | None = None, **options: object
) -> tuple[Mqtt3, None] | tuple[None, str | int]:
    """Connect to a broker, and wait until it accepts the connection. `mqtt.run()` runs the callbacks.

    With TLS and credentials, the certificate of the broker must be trusted. Without credentials, an untrusted
    certificate only causes a warning in the log. (spec: smq §9)

    Args:
        addr: a host name, `host:port`, a URL, a list of these, or a connected socket: `socket.socket`, `ssl.SSLSocket`,
            those of gevent, or a `smqrt.transport.stream.Stream`. The client takes over a socket.
        onpub: `f(topic, payload)`; the payload is bytes. With the option `onmessage` it may be None.
        op: a dict of options, also as keywords: `port` (1883, with TLS 8883); `secure` or `shark`
            (True, or a `smqrt.transport.tls_contexts.ClientTls`); `nocheck` (trust any certificate); `keepalive`
            (seconds, 600; at least 60); `id` or `clientidentifier` (random); `uname` or `username`, `passwd` or
            `password`; `will` (`{"topic", "message" or "payload", "qos", "retain"}`); `onmessage` (`f(message)`, a
            function that gets messages as objects, in the place of `onpub`); `version` ("3.1" for MQTT 3.1);
            `timeout` (milliseconds, 5000); `intf` (local address); `ipv6`; `alpn`; `proxy`, `proxyport`, `socks`,
            `proxyuser`, `proxypass`. Unknown options are logged and ignored.

    Returns:
        The client and None, or None and an error: a socket error ("cannotconnect", "timeout", ...), a trust status
        ("cn", "cert", "certcn", "none"), "invalidresp", or the return code of CONNACK (1 protocol version, 2
        identifier, 3 unavailable, 4 credentials, 5 not authorized).

    Raises:
        ArgumentError: an invalid argument or option.
    """
    return documented.connect(addr, onpub, documented.merged(op, options, documented.OPTIONS, "mqtt3c.connect"))


def create(
    addr: object, onstatus: OnStatus, onpub: OnPub | Options | None = None, op: Options | None = None, **options: object
) -> tuple[Mqtt3, None]:
    """Create a client that connects in the background and reconnects after a lost connection. Never blocks.

    One greenlet runs the callbacks, one after the other, while the program waits in a function of gevent. Messages and
    subscriptions are queued while there is no connection. (spec: smq §9)

    Args:
        addr: as in `connect`; or a function `f(mqtt, op)` that returns a connected socket, or `(None, error)`, each
            time a connection is needed.
        onstatus: `f(type, code, status)`, called after each connection attempt and at the end of each connection. After
            a successful attempt, a true value keeps the connection. Otherwise False stops the client, True reconnects
            after a random delay, and a number after that many seconds. (help: mqtt-python)
        onpub: `f(topic, payload)`; the payload is bytes. By default, messages are only logged. May be omitted: a dict
            in its place is `op`.
        op: a dict of options, also as keywords: those of `connect`, with another range of `keepalive` (seconds, 60; 0
            disables it), and `reconnectdelay`, `reconnectmax`, `queuesize`, `queuebytes`, `queuefull`,
            `maxpacketsize`, `inflight` (help: mqtt-python).
            The certificate is always verified, unless `nocheck` is set.

    Returns:
        The client and None; `onstatus` receives the errors.

    Raises:
        ArgumentError: an invalid callback or option.
    """
    if isinstance(onpub, Mapping):  # as in Lua, onpub may be omitted
        onpub, op = None, onpub if op is None else op
    given = documented.merged(op, options, documented.OPTIONS, "mqtt3c.create")
    return documented.create(Mqtt3(), addr, onstatus, onpub, given)
