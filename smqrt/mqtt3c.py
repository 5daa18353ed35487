"""MQTT 3.1.1 clients under the documented names of the Lua module `mqtt3c` (spec: smq §9).

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
"""`f(topic, payload)`, called for a message."""


def connect(
    addr: object, onpub: OnPub, op: Options | None = None, **options: object
) -> tuple[Mqtt3, None] | tuple[None, str | int]:
    """Connect to a broker, and wait until it has accepted. `mqtt.run()` runs the callbacks.

    Over TLS the certificate of the broker must be trusted if credentials are given. Without them an untrusted broker is
    a warning in the log. (spec: smq §9)

    Args:
        addr: a host name, `host:port`, or a connected socket: `socket.socket`, `ssl.SSLSocket`, those of gevent, or a
            `smqrt.transport.stream.Stream`. The client takes over a socket.
        onpub: `f(topic, payload)`; the payload is bytes.
        op: a dict of options, which may also be given as keywords: `port` (1883, with TLS 8883); `secure` or `shark`
            (True, or a `smqrt.transport.tls_contexts.ClientTls`); `nocheck` (trust any certificate); `keepalive`
            (seconds, 600; less is 60); `id` or `clientidentifier` (random); `uname` or `username`, `passwd` or
            `password`; `will` (`{"topic", "message" or "payload", "qos", "retain"}`); `timeout`
            (milliseconds, 5000); `intf` (local address); `ipv6`; `alpn`. An unknown option is a warning in the log.

    Returns:
        The client and None, or None and an error: a socket error ("cannotconnect", "timeout", ...), a trust status
        ("cn", "cert", "certcn", "none"), "invalidresp", or the number of a refusal in CONNACK (1 protocol version, 2
        identifier, 3 unavailable, 4 credentials, 5 not authorized).

    Raises:
        ArgumentError: a wrong argument or option.
    """
    return documented.connect(addr, onpub, documented.merged(op, options, documented.OPTIONS, "mqtt3c.connect"))


def create(
    addr: object,
    onstatus: OnStatus,
    onpub: OnPub | Options | None = None,
    op: Options | None = None,
    **options: object,
) -> tuple[Mqtt3, None]:
    """Make a client that connects in the background, and again when the connection is lost. Never blocks.

    The callbacks run one after the other in one greenlet, while the program waits in a function of gevent. Messages and
    subscriptions without a connection wait for one. (spec: smq §9)

    Args:
        addr: as in `connect`; or a function `f(mqtt, op)` that returns a connected socket, or `(None, error)`, each
            time a connection is needed.
        onstatus: `f(type, code, status)`, called after each attempt to connect and at the end of each connection. On
            success a true answer keeps the connection. Otherwise a false answer makes no further attempt, True makes
            one after 5 seconds, a number after so many seconds. (help: mqtt-python)
        onpub: `f(topic, payload)`; the payload is bytes. By default messages are logged only. May be left out: a dict
            here is `op`.
        op: a dict of options, also as keywords: those of `connect`, with `keepalive` in seconds as it is (60; 0 for
            none), and `queuesize`, `queuebytes`, `queuefull`, `maxpacketsize`, `inflight` (help: mqtt-python).
            The certificate is always checked, unless `nocheck` is set.

    Returns:
        The client and None; `onstatus` receives the errors.

    Raises:
        ArgumentError: a wrong callback or option.
    """
    if isinstance(onpub, Mapping):
        onpub, op = None, onpub if op is None else op
    given = documented.merged(op, options, documented.OPTIONS, "mqtt3c.create")
    return documented.create(Mqtt3(), addr, onstatus, onpub, given)
