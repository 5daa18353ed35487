"""Identity of a client: user, groups, login method and permissions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

MAX_NAME = 255  # characters of a user's name
MAX_GROUPS = 64  # of one user: every permission check looks up all of them
ANONYMOUS = "anonymous"
"""The name of clients without a login in the access control list; no user may have it."""
_WILDCARDS = re.compile(r"[+#/]")
_CONTROLS = re.compile(r"[\x00-\x20\x7f]")


class Action(Enum):
    """Action that needs a permission."""

    READ = "read"
    """Subscribe to a topic."""
    WRITE = "write"
    """Publish to a topic."""
    OBSERVE = "observe"
    """Observe the subscriber count of a topic."""
    ONETOONE = "onetoone"
    """Send to the ETID of another client, or of the server."""
    CREATE = "create"
    """Create a topic that the hub does not have."""


class Method(Enum):
    """Login method of a client."""

    PASSWORD = "password"
    TOKEN = "token"
    CERTIFICATE = "certificate"
    NONE = "none"
    """No login: the server accepts anonymous clients."""


class Rights(Protocol):
    """Permissions of clients."""

    def permits(self, identity: Identity, name: bytes, *actions: Action) -> bool:
        """Return whether one of `actions` on the topic `name` is allowed; a denial is counted and logged."""

    def permits_filter(self, identity: Identity, topic_filter: bytes, action: Action) -> bool:
        """Return whether `action` is allowed on every topic that a filter of MQTT matches."""


@dataclass(slots=True, eq=False)
class Identity:
    """Identity of a client.

    Attributes:
        user: the name of the user; empty for an anonymous client.
        groups: the groups of the user.
        method: the login method.
        client_id: the uid of SMQ, or the client identifier of MQTT; the client chooses it.
        address: the IP address of the client.
        expires_s: the time (seconds since 1970) at which the login expires; None for never.
        proof: value that `revalidate` compares: password hash, key of a token, or issuer and number of a certificate.
        rights: the permissions; None when all actions are allowed.
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
        """The user name for logs and lists."""
        return self.user or ANONYMOUS

    def may(self, name: bytes, *actions: Action) -> bool:
        """Return whether one of `actions` on the topic `name` is allowed."""
        return self.rights is None or self.rights.permits(self, name, *actions)

    def may_filter(self, topic_filter: bytes, action: Action) -> bool:
        """Return whether `action` is allowed on every topic that a filter of MQTT matches."""
        return self.rights is None or self.rights.permits_filter(self, topic_filter, action)


def name_fault(name: str, what: str = "the user name") -> str | None:
    """Return the reason why a name is not valid for a user or a group; None for a valid name.

    Wildcards are not allowed: with one as a name, `%u` in a pattern would match every topic (CVE-2017-7650).

    Args:
        name: the name.
        what: the subject of the sentence.
    """
    if not name or len(name) > MAX_NAME:
        return f"{what} must have 1 to {MAX_NAME} characters"
    if _WILDCARDS.search(name):
        return f"{what} must not have + # or /, which are special in patterns of topics"
    if _CONTROLS.search(name) or ":" in name or "," in name:  # separators of the users file and the list
        return f"{what} must not have a space, a control character, a colon or a comma"
    if name == ANONYMOUS or name == "*" or name[0] in "@$":
        return f"{what} must not be {ANONYMOUS} or *, or begin with @ or $"
    return None
