"""What a `Protocol` tells its driver."""

from __future__ import annotations

from typing import NamedTuple

from smqrt.client.ending import ConnectionEnd


class Init(NamedTuple):
    """The broker said hello: answer with `Protocol.connect`. `address` is this client's IP as the broker sees it."""

    seed: int
    address: str


class Accepted(NamedTuple):
    """The broker accepted; `etid` is this connection's private return address."""

    etid: int


class Ack(NamedTuple):
    """Answer to Subscribe, Create or Createsub (`kind` is the packet type of the answer); `number` 0 says denied."""

    kind: int
    number: int
    name: bytes


class Published(NamedTuple):
    """A published message."""

    data: bytes
    ptid: int
    tid: int
    subtid: int


class Change(NamedTuple):
    """`tid` has `subscribers` subscribers now."""

    tid: int
    subscribers: int


class Pong(NamedTuple):
    """Answer to the Ping that was sent with `token`."""

    token: object


class Ended(NamedTuple):
    """Nothing comes after this."""

    end: ConnectionEnd


Event = Init | Accepted | Ack | Published | Change | Pong | Ended
