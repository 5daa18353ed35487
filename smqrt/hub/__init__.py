"""SMQ brokers for Python applications: `from smqrt import hub; smq = hub.create()`.

The names and meanings are those of the Lua module `smq.hub` (spec: smq §2). Topic names are `str` or
`bytes` and come back as `str` (bytes that are no UTF-8 as `bytes`); payloads are `bytes` when they come, and go out as
`smqrt.smq.messages.payload` says. Callbacks may block in gevent's way.
"""

from smqrt.hub.callbacks import (
    Authenticate,
    Log,
    OnClose,
    OnCloseWithReason,
    OnConnect,
    OnMessage,
    OnNode,
    OnPublish,
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
    "OnClose",
    "OnCloseWithReason",
    "OnConnect",
    "OnMessage",
    "OnNode",
    "OnPublish",
    "Peer",
    "PeerSocket",
    "PermitSubtop",
    "PermitTop",
    "Refused",
    "Smq",
    "create",
    "isSMQ",
]
