"""`Identity`: who a client is, how it proved that, and what it may do by the access control list."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

MAX_NAME = 255  # characters of a user's name
MAX_GROUPS = 64  # of one user: every decision looks at all of them
ANONYMOUS = "anonymous"
"""How the access control list calls clients that have not said who they are; no user is called so."""
_WILDCARDS = re.compile(r"[+#/]")
_CONTROLS = re.compile(r"[\x00-\x20\x7f]")


class Action(Enum):
    """What a client may be allowed to do."""

    READ = "read"
    """Subscribe to a topic."""
    WRITE = "write"
    """Publish to a topic."""
    OBSERVE = "observe"
    """Be told how many subscribers a topic has."""
    ONETOONE = "onetoone"
    """Send to the ETID of another client, or of the server."""
    CREATE = "create"
    """Bring in the name of a topic that the hub does not know yet."""


class Method(Enum):
    """How a client proved who it is."""

    PASSWORD = "password"
    TOKEN = "token"
    CERTIFICATE = "certificate"
    NONE = "none"
    """Not at all: the server lets anonymous clients in."""


class Rights(Protocol):
    """Knows who may do what."""

    def permits(self, identity: Identity, name: bytes, *actions: Action) -> bool:
        """Whether `identity` may do one of `actions` to the topic `name`; a no is counted and logged."""
        ...

    def permits_filter(self, identity: Identity, topic_filter: bytes, action: Action) -> bool:
        """The same for all topics that a filter of MQTT stands for."""
        ...


@dataclass(slots=True, eq=False)
class Identity:
    """Who a client is.

    Attributes:
        user: the user's name; empty for a client that has not said who it is.
        groups: of the user.
        method: how the client proved it.
        client_id: what the client calls itself: the uid of SMQ, the client identifier of MQTT.
        address: the IP address it came from.
        expires_s: the time (seconds since 1970) at which it ends; None for never.
        proof: changes when what the client has proved is no longer true: of a password, its hash.
        rights: who may do what; None when everybody may do everything.
    """

    user: str
    groups: tuple[str, ...] = ()
    method: Method = Method.NONE
    client_id: bytes = b""
    address: str = ""
    expires_s: float | None = None
    proof: str = field(default="", repr=False)
    rights: Rights | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The user as logs and lists show it."""
        return self.user or ANONYMOUS

    def may(self, name: bytes, *actions: Action) -> bool:
        """Whether the client may do one of `actions` to the topic `name`."""
        return self.rights is None or self.rights.permits(self, name, *actions)

    def may_filter(self, topic_filter: bytes, action: Action) -> bool:
        """Whether the client may do `action` to every topic that a filter of MQTT stands for."""
        return self.rights is None or self.rights.permits_filter(self, topic_filter, action)


def name_fault(name: str, what: str = "the user name") -> str | None:
    """Returns why `name` can't be the name of a user or a group, None when it can.

    The characters of patterns are refused: with one of them as a name, `%u` in a pattern would stand for every topic
    (CVE-2017-7650).

    Args:
        name: the name.
        what: what the sentence calls it.
    """
    if not name or len(name) > MAX_NAME:
        return f"{what} must have 1 to {MAX_NAME} characters"
    if _WILDCARDS.search(name):
        return f"{what} has one of + # /, which patterns of topics are made of"
    if _CONTROLS.search(name) or ":" in name or "," in name:
        return f"{what} has a space, a control character, a colon or a comma"
    if name == ANONYMOUS or name == "*" or name[0] in "@$":
        return f"{what} must not be {ANONYMOUS} or *, nor begin with @ or $"
    return None
