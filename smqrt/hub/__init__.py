"""SMQ brokers for Python applications: `from smqrt import hub; smq = hub.create()`.

The names and meanings are those of the Lua module `smq.hub` (spec: smq §2).

Topic names are `str` or `bytes` and come back as `str`, or as `bytes` when they are not UTF-8. Received payloads are
`bytes`; `smqrt.smq.messages.payload` converts those that are sent. Callbacks may use blocking calls of gevent.
"""

from smqrt.broker.mqtt.application import MqttAttributes
from smqrt.hub.callbacks import (
    Authenticate,
    Log,
    OnClose,
    OnCloseWithReason,
    OnConnect,
    OnMessage,
    OnMessageWithAttributes,
    OnMqttGap,
    OnMqttGapWithNode,
    OnNode,
    OnPublish,
    OnPublishWithAttributes,
    PermitSubtop,
    PermitTop,
)
from smqrt.hub.peer import Info, Peer, PeerSocket, Refused
from smqrt.hub.smq import Smq, create, isSMQ
from smqrt.smq.messages import Message

__all__ = [
    "Authenticate",
    "Info",
    "Log",
    "Message",
    "MqttAttributes",
    "OnClose",
    "OnCloseWithReason",
    "OnConnect",
    "OnMessage",
    "OnMessageWithAttributes",
    "OnMqttGap",
    "OnMqttGapWithNode",
    "OnNode",
    "OnPublish",
    "OnPublishWithAttributes",
    "Peer",
    "PeerSocket",
    "PermitSubtop",
    "PermitTop",
    "Refused",
    "Smq",
    "create",
    "isSMQ",
]
