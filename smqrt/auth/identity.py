"""Identity of a client: user, groups, login method, and permissions by the access control list."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from smqrt.errors import ArgumentError
from smqrt.settings.limits import LineLimit

MAX_NAME = 255  # characters of a user's name
MAX_GROUPS = 64  # of one user: every permission check looks up all of them
ANONYMOUS = "anonymous"
"""The name of clients without a login in the access control list; no user may have it."""
TOKEN = re.compile(rb"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*\Z")
"""A JSON Web Token: its base64 text begins with `{"`. It has no colon, unlike `name:password`."""
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

    def allows(self, identity: Identity, name: bytes, action: Action) -> bool:
        """Return whether `action` on the topic `name` is allowed; a denial is neither counted nor logged."""

    def allows_filter(self, identity: Identity, topic_filter: bytes, action: Action) -> bool:
        """Return whether `action` is allowed on every topic that a filter matches, see `allows`."""


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

    def allows(self, name: bytes, action: Action) -> bool:
        """Return whether `action` on the topic `name` is allowed; a denial is neither counted nor logged."""
        return self.rights is None or self.rights.allows(self, name, action)

    def allows_filter(self, topic_filter: bytes, action: Action) -> bool:
        """Return whether `action` is allowed on every topic that a filter matches, see `allows`."""
        return self.rights is None or self.rights.allows_filter(self, topic_filter, action)


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
        return f"{what} must not have + # or /, which are special in topic patterns"
    if _CONTROLS.search(name) or ":" in name or "," in name:  # separators of the users file and the list
        return f"{what} must not have a space, a control character, a colon or a comma"
    if name == ANONYMOUS or name == "*" or name[0] in "@$":
        return f"{what} must not be {ANONYMOUS} or *, or begin with @ or $"
    return None


# ---- Access control list: which users may use which topics.
#
#     allow|deny  WHO  ACTIONS  PATTERN
#
# The first matching line decides; without a matching line the action is denied. The lines are compiled to a tree of the
# levels of their patterns, so that the time of a decision does not grow with the number of lines.

MAX_LINES = 100_000
SERVER = b"$server"
"""Name of the server as the receiver of direct messages; other receivers have the name of their user."""

_VERBS = {"allow": True, "deny": False}
_ANY_CLIENT = "*"
_ALL = frozenset((Action.READ, Action.WRITE, Action.OBSERVE, Action.ONETOONE))
_ACTIONS = {action.value: frozenset((action,)) for action in Action} | {"*": _ALL}
_VARIABLE = re.compile(rb"%(.?)", re.DOTALL)
_UNSAFE = re.compile(rb"[+#/]")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the list.

    Attributes:
        number: counted from 1; the matching line with the lowest number decides.
        allows: whether it allows or denies.
        who: users, groups as `@name`, `*`, or `anonymous`.
        actions: the actions that it allows or denies.
        pattern: pattern of the topics.
    """

    number: int
    allows: bool
    who: frozenset[str]
    actions: frozenset[Action]
    pattern: bytes

    def __str__(self) -> str:
        actions = ",".join(action.value for action in Action if action in self.actions)
        verb = "allow" if self.allows else "deny"
        return f"{verb} {','.join(sorted(self.who))} {actions} {self.pattern.decode('utf-8', 'backslashreplace')}"


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision about an action.

    Attributes:
        allowed: whether the action is allowed.
        line: the line that decided; None when no line matches.
    """

    allowed: bool
    line: Line | None


@dataclass(slots=True)
class _Node:
    """A level of patterns.

    Attributes:
        levels: the next levels by their text.
        templates: the next levels with a variable.
        any_level: the next level `+`.
        rest: lines whose pattern continues with `#`, by who and action; of several, only the first can decide.
        ends: lines whose pattern ends at this level, likewise.
    """

    levels: dict[bytes, _Node] = field(default_factory=dict)
    templates: dict[bytes, _Node] = field(default_factory=dict)
    any_level: _Node | None = None
    rest: dict[tuple[str, Action], Line] = field(default_factory=dict)
    ends: dict[tuple[str, Action], Line] = field(default_factory=dict)


class Acl:
    """A compiled list.

    Args:
        lines: the lines in their order; an empty list denies all actions except `CREATE`.

    Attributes:
        lines: see above.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.lines = tuple(lines)
        self._root = _Node()
        for line in self.lines:
            node = self._root
            levels = line.pattern.split(b"/")
            is_rest = levels[-1] == b"#"
            for level in levels[:-1] if is_rest else levels:
                if level == b"+":
                    node.any_level = node.any_level or _Node()
                    node = node.any_level
                else:
                    table = node.templates if b"%" in level else node.levels
                    node = table.setdefault(level, _Node())
            deciding = node.rest if is_rest else node.ends
            for who in line.who:
                for action in line.actions:
                    deciding.setdefault((who, action), line)  # an earlier line takes precedence

    def decide(self, identity: Identity, action: Action, name: bytes) -> Decision:
        """Return the decision about an action on one topic.

        Args:
            identity: identity of the client.
            action: the action. Without a matching line, `CREATE` is allowed, because permissions to use a topic
                include it.
            name: the topic; for `ONETOONE`, the user of the receiver, or `SERVER`.
        """
        keys = [(who, action) for who in _names_of(identity)]
        found: Line | None = None
        for table in self._matching(identity, name, action is not Action.ONETOONE):
            for key in keys:
                line = table.get(key)
                if line is not None and (found is None or line.number < found.number):
                    found = line
        if found is None:
            return Decision(action is Action.CREATE, None)
        return Decision(found.allows, found)

    def _matching(
        self, identity: Identity, name: bytes, hides_dollar: bool
    ) -> Iterator[dict[tuple[str, Action], Line]]:
        """Yield the tables of all patterns that match `name`.

        As in MQTT, a wildcard at the first level matches no name that begins with a dollar sign.
        """
        is_hidden = hides_dollar and name.startswith(b"$")
        nodes = [self._root]
        for level in name.split(b"/"):
            children: list[_Node] = []
            for node in nodes:
                if not is_hidden:
                    yield node.rest
                    if node.any_level is not None:
                        children.append(node.any_level)
                if level in node.levels:
                    children.append(node.levels[level])
                if node.templates:
                    children += [
                        child for text, child in node.templates.items() if _template_matches(text, level, identity)
                    ]
            nodes, is_hidden = children, False
            if not nodes:
                return
        for node in nodes:
            yield node.rest  # `a/#` matches `a` as well
            yield node.ends

    def decide_filter(self, identity: Identity, action: Action, topic_filter: bytes) -> Decision:
        """Return the decision about an action on all topics that a filter of MQTT matches.

        The first line that denies one of the topics, or allows all of them, decides. This loops over all lines, unlike
        `decide`: it runs once per subscription of MQTT, not per message.
        """
        wanted = topic_filter.split(b"/")
        names = frozenset(_names_of(identity))
        for line in self.lines:
            if action not in line.actions or names.isdisjoint(line.who):
                continue
            pattern = line.pattern.split(b"/")
            if line.allows and _covers(pattern, wanted, identity):
                return Decision(True, line)
            if not line.allows and _overlaps(pattern, wanted, identity):
                return Decision(False, line)
        return Decision(False, None)


def _names_of(identity: Identity) -> list[str]:
    """Return the names that select a client in a line."""
    return [identity.user or ANONYMOUS, _ANY_CLIENT, *(f"@{group}" for group in identity.groups)]


def _template_matches(template: bytes, level: bytes, identity: Identity) -> bool:
    """Return whether a template with the values of a client equals a level.

    Variables are replaced in one pass, so that a client id is never used as a pattern.
    """
    if b"%g" in template:  # one comparison for each group of the client
        return any(_filled(template, identity, group.encode()) == level for group in identity.groups)
    return _filled(template, identity, b"") == level


def _filled(template: bytes, identity: Identity, group: bytes) -> bytes | None:
    values = {b"u": identity.user.encode("utf-8", "surrogateescape"), b"c": identity.client_id, b"g": group, b"%": b"%"}
    used = [values[found] for found in _VARIABLE.findall(template)]
    if not all(used) or any(_UNSAFE.search(value) for value in used):
        return None  # a client without a user, or with a wildcard as its client id
    return _VARIABLE.sub(lambda match: values[match[1]], template)


def _level_covers(level: bytes, wanted: bytes, identity: Identity) -> bool:
    if level == b"+":
        return True
    if wanted in (b"+", b"#"):
        return False
    return _template_matches(level, wanted, identity) if b"%" in level else level == wanted


def _covers(pattern: list[bytes], wanted: list[bytes], identity: Identity) -> bool:
    """Return whether a pattern matches every topic that a filter matches."""
    if pattern[0] in (b"#", b"+") and wanted[0].startswith(b"$"):  # as in `_matching`
        return False
    for depth, level in enumerate(pattern):
        if level == b"#":
            return True
        if depth >= len(wanted) or wanted[depth] == b"#" or not _level_covers(level, wanted[depth], identity):
            return False
    return len(pattern) == len(wanted)


def _overlaps(pattern: list[bytes], wanted: list[bytes], identity: Identity) -> bool:
    """Return whether a pattern matches one of the topics that a filter matches."""
    for level, wanted_level in zip_longest(pattern, wanted):
        if b"#" in (level, wanted_level):
            return True
        if level is None or wanted_level is None:
            return False
        if b"+" not in (level, wanted_level) and not _level_covers(level, wanted_level, identity):
            return False
    return True


# ---- reading


def parse(text: str, file: str) -> Acl:
    """Compile the text of a list.

    Args:
        text: the lines; empty ones and those that begin with # are ignored.
        file: path of the list, for errors.

    Raises:
        ArgumentError: an invalid line; the message names file, line, rule and remedy.
    """
    lines: list[Line] = []
    for number, written in enumerate(text.splitlines(), 1):
        stripped = written.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if len(lines) >= MAX_LINES:
            raise ArgumentError(f"{file}:{number}: a list has at most {MAX_LINES} lines; use groups (@name) and %u")
        try:
            lines.append(_line(number, stripped))
        except ArgumentError as error:
            raise ArgumentError(f"{file}:{number}: {error}") from None
    return Acl(lines)


def _line(number: int, text: str) -> Line:
    words = text.split(None, 3)
    if len(words) < 4:
        raise ArgumentError(f"a line is 'allow WHO ACTIONS PATTERN' or 'deny WHO ACTIONS PATTERN', not {text!r}")
    verb, who, actions, pattern = words
    if verb not in _VERBS:
        raise ArgumentError(f"a line must begin with allow or deny, not {verb!r}")
    found: frozenset[Action] = frozenset()
    for action in actions.split(","):
        if action not in _ACTIONS:
            near = difflib.get_close_matches(action[:64], _ACTIONS, 1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ArgumentError(f"{action!r} is not an action. {hint}Use {', '.join(_ACTIONS)}, separated by commas")
        found |= _ACTIONS[action]
    names = frozenset(who.split(","))
    if "" in names or "@" in names:
        raise ArgumentError(f"{who!r} must be users, groups (@name), anonymous or *, separated by commas, no spaces")
    encoded = pattern.encode("utf-8", "surrogateescape")
    shown = repr(encoded.decode("utf-8", "replace"))
    levels = encoded.split(b"/")
    for depth, level in enumerate(levels):
        if b"#" in level and (level != b"#" or depth < len(levels) - 1):
            raise ArgumentError(f"{shown}: # must be the whole last level")
        if b"+" in level and level != b"+":
            raise ArgumentError(f"{shown}: + must be a whole level")
    for letter in _VARIABLE.findall(encoded):
        if letter not in (b"u", b"c", b"g", b"%"):
            raise ArgumentError(f"{shown}: % must be followed by u (user), c (client id), g (group), or % for itself")
    return Line(number, _VERBS[verb], names, found, encoded)


# ---- permissions by the list

_SHOWN = 200  # characters of a name in the log


class AclRights:
    """Permissions by an access control list.

    Args:
        file: path of the list, for the log.

    Attributes:
        acl: the list; a reload replaces it.
        denied: number of denials by action.
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

    def allows(self, identity: Identity, name: bytes, action: Action) -> bool:
        """See `Rights.allows`."""
        return self.acl.decide(identity, action, name).allowed

    def allows_filter(self, identity: Identity, topic_filter: bytes, action: Action) -> bool:
        """See `Rights.allows_filter`."""
        return self.acl.decide_filter(identity, action, topic_filter).allowed

    def _deny(self, identity: Identity, action: Action, name: bytes, decision: Decision) -> bool:
        self.denied[action] += 1
        client = f"{identity.shown} (client id {_shown(identity.client_id)}) from {identity.address or '?'}"
        reason = explanation(decision, self._file)
        self._lines.warn(f"refused: {client}: {action.value} {_shown(name)}: {reason}; see the setting auth.acl")
        return False


def explanation(decision: Decision, file: Path) -> str:
    """Return the line of a file that decided, as a sentence."""
    line = decision.line
    if line is None:
        return f"no line of {file} allows it"
    return f"{file}:{line.number} {'allows' if line.allows else 'denies'} it"


def _shown(name: bytes) -> str:
    text = repr(name.decode("utf-8", "backslashreplace"))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
