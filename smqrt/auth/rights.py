"""Decisions by the access list that is in force, and how often which of them was no."""

from __future__ import annotations

from pathlib import Path

from smqrt.auth.acl import Acl, Decision
from smqrt.auth.identity import Action, Identity
from smqrt.settings.limit_register import LineLimit

_SHOWN = 200  # characters of a name in the log


class AclRights:
    """The rights that an access control list gives.

    Args:
        file: its name, for the log.

    Attributes:
        acl: the list; another one after a reload.
        denied: how often somebody was denied something, by what it was.
    """

    def __init__(self, file: Path) -> None:
        self.acl = Acl()
        self.denied = dict.fromkeys(Action, 0)
        self._file = file
        self._lines = LineLimit()

    def permits(self, identity: Identity, name: bytes, *actions: Action) -> bool:
        """See `Rights.permits`."""
        decisions = [self.acl.decide(identity, action, name) for action in actions]
        if any(decision.allowed for decision in decisions):
            return True
        return self._deny(identity, actions[0], name, decisions[0])

    def permits_filter(self, identity: Identity, topic_filter: bytes, action: Action) -> bool:
        """See `Rights.permits_filter`."""
        if b"+" not in topic_filter and b"#" not in topic_filter:
            return self.permits(identity, topic_filter, action)
        decision = self.acl.decide_filter(identity, action, topic_filter)
        return decision.allowed or self._deny(identity, action, topic_filter, decision)

    def _deny(self, identity: Identity, action: Action, name: bytes, decision: Decision) -> bool:
        self.denied[action] += 1
        self._lines.warn(
            f"refused: {_client(identity)}: {action.value} {_shown(name)}: {why(decision, self._file)}; "
            "see the setting auth.acl"
        )
        return False


def why(decision: Decision, file: Path) -> str:
    """Which line of a file decided."""
    line = decision.line
    if line is None:
        return f"no line of {file} allows it"
    return f"{file}:{line.number} {'allows' if line.allows else 'denies'} it"


def _client(identity: Identity) -> str:
    return f"{identity.shown} (client id {_shown(identity.client_id)}) from {identity.address or '?'}"


def _shown(name: bytes) -> str:
    text = repr(name.decode("utf-8", "backslashreplace"))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
