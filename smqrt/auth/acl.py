"""The access control list: lines of a file that say who may do what to which topics.

    allow|deny  WHO  ACTIONS  PATTERN

The first line that fits decides; what no line fits is denied. The lines are compiled to a tree of the levels of their
patterns, so that a decision takes as long for ten thousand lines as for ten.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from smqrt.auth.identity import ANONYMOUS, Action, Identity
from smqrt.errors import ArgumentError
from smqrt.settings.limit_register import LineLimit

MAX_LINES = 100_000
SERVER = b"$server"
"""How patterns call the server's own client, which direct messages may go to; clients are called by their users."""

_VERBS = {"allow": True, "deny": False}
_EVERYBODY = "*"
_ALL = frozenset((Action.READ, Action.WRITE, Action.OBSERVE, Action.ONETOONE))
_ACTIONS = {action.value: frozenset((action,)) for action in Action} | {"*": _ALL}
_VARIABLE = re.compile(rb"%(.?)", re.DOTALL)
_UNSAFE = re.compile(rb"[+#/]")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the list.

    Attributes:
        number: counted from 1; lines are asked in this order.
        allows: whether it allows or denies.
        who: users, groups as `@name`, `*`, or `anonymous`.
        actions: what it is about.
        pattern: which topics.
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
    """What the list says.

    Attributes:
        allowed: whether the client may.
        line: that decided; None when none fits.
    """

    allowed: bool
    line: Line | None


@dataclass(slots=True)
class _Node:
    """A level of patterns.

    Attributes:
        levels: the next level by its text.
        templates: next levels with a variable in them.
        any_level: the next level is `+`.
        rest: the lines whose pattern goes on with `#`, by who and action; the first of each is enough.
        ends: the lines whose pattern ends here.
    """

    levels: dict[bytes, _Node] = field(default_factory=dict)
    templates: dict[bytes, _Node] = field(default_factory=dict)
    any_level: _Node | None = None
    rest: dict[tuple[str, Action], Line] = field(default_factory=dict)
    ends: dict[tuple[str, Action], Line] = field(default_factory=dict)


class Acl:
    """A compiled list.

    Args:
        lines: in the order in which they are asked; none at all deny everything.

    Attributes:
        lines: the same.
        uses_client_ids: whether a pattern has `%c`.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.lines = tuple(lines)
        self.uses_client_ids = any(b"%c" in line.pattern for line in self.lines)
        self._root = _Node()
        for line in self.lines:
            self._add(line)

    def _add(self, line: Line) -> None:
        node = self._root
        levels = line.pattern.split(b"/")
        into_rest = levels[-1] == b"#"
        for level in levels[:-1] if into_rest else levels:
            node = _below(node, level)
        table = node.rest if into_rest else node.ends
        for who in line.who:
            for action in line.actions:
                table.setdefault((who, action), line)

    def decide(self, identity: Identity, action: Action, name: bytes) -> Decision:
        """What the list says about one topic.

        Args:
            identity: who asks.
            action: what it wants to do. About `CREATE`, no line is a yes: who may use a topic may bring it in.
            name: the topic; for `ONETOONE`, the user of the receiver or `SERVER`.
        """
        keys = [(who, action) for who in _called(identity)]
        found: Line | None = None
        for table in self._fitting(identity, name, action is not Action.ONETOONE):
            for key in keys:
                line = table.get(key)
                if line is not None and (found is None or line.number < found.number):
                    found = line
        if found is None:
            return Decision(action is Action.CREATE, None)
        return Decision(found.allows, found)

    def _fitting(self, identity: Identity, name: bytes, hides_dollar: bool) -> Iterator[dict[tuple[str, Action], Line]]:
        """The tables of all patterns that `name` fits. As in MQTT, a wildcard at the beginning fits no name that begins
        with a dollar sign."""
        is_hidden = hides_dollar and name.startswith(b"$")
        nodes = [self._root]
        for level in name.split(b"/"):
            below: list[_Node] = []
            for node in nodes:
                if not is_hidden:
                    yield node.rest
                    if node.any_level is not None:
                        below.append(node.any_level)
                if level in node.levels:
                    below.append(node.levels[level])
                if node.templates:
                    below += [at for text, at in node.templates.items() if _fits(text, level, identity)]
            nodes, is_hidden = below, False
            if not nodes:
                return
        for node in nodes:
            yield node.rest  # `a/#` is about `a` as well
            yield node.ends

    def decide_filter(self, identity: Identity, action: Action, topic_filter: bytes) -> Decision:
        """What the list says about all topics that a filter of MQTT stands for: a line that denies one of them, before
        a line that allows all of them, denies it."""
        wanted = topic_filter.split(b"/")
        called = frozenset(_called(identity))
        for line in self.lines:
            if action not in line.actions or called.isdisjoint(line.who):
                continue
            pattern = line.pattern.split(b"/")
            if line.allows and _covers(pattern, wanted, identity):
                return Decision(True, line)
            if not line.allows and _overlaps(pattern, wanted, identity):
                return Decision(False, line)
        return Decision(False, None)


def _below(node: _Node, level: bytes) -> _Node:
    if level == b"+":
        if node.any_level is None:
            node.any_level = _Node()
        return node.any_level
    table = node.templates if b"%" in level else node.levels
    return table.setdefault(level, _Node())


def _called(identity: Identity) -> list[str]:
    """How lines may call a client."""
    return [identity.user or ANONYMOUS, _EVERYBODY, *(f"@{group}" for group in identity.groups)]


def _fits(template: bytes, level: bytes, identity: Identity) -> bool:
    """Whether a level is what a template stands for. Each variable is put in once, as it is: what a client calls itself
    is never read as a pattern."""
    if b"%g" in template:
        return any(_filled(template, identity, group.encode()) == level for group in identity.groups)
    return _filled(template, identity, b"") == level


def _filled(template: bytes, identity: Identity, group: bytes) -> bytes | None:
    values = {b"u": identity.user.encode("utf-8", "surrogateescape"), b"c": identity.client_id, b"g": group, b"%": b"%"}
    used = [values[found] for found in _VARIABLE.findall(template)]
    if not all(used) or any(_UNSAFE.search(value) for value in used):
        return None  # a client without a user, or one that calls itself by a wildcard
    return _VARIABLE.sub(lambda match: values[match[1]], template)


def _level_covers(level: bytes, wanted: bytes, identity: Identity) -> bool:
    if level == b"+":
        return True
    if wanted in (b"+", b"#"):
        return False
    return _fits(level, wanted, identity) if b"%" in level else level == wanted


def _covers(pattern: list[bytes], wanted: list[bytes], identity: Identity) -> bool:
    """Whether a pattern fits every topic that a filter stands for."""
    if pattern[0] in (b"#", b"+") and wanted[0].startswith(b"$"):
        return False
    for at, level in enumerate(pattern):
        if level == b"#":
            return True
        if at >= len(wanted) or wanted[at] == b"#" or not _level_covers(level, wanted[at], identity):
            return False
    return len(pattern) == len(wanted)


def _overlaps(pattern: list[bytes], wanted: list[bytes], identity: Identity) -> bool:
    """Whether a pattern fits one of the topics that a filter stands for."""
    for at in range(max(len(pattern), len(wanted))):
        mine = pattern[at] if at < len(pattern) else None
        yours = wanted[at] if at < len(wanted) else None
        if b"#" in (mine, yours):
            return True
        if mine is None or yours is None:
            return False
        if b"+" not in (mine, yours) and not _level_covers(mine, yours, identity):
            return False
    return True


# ---- reading


def parse(text: str, file: str) -> Acl:
    """Compile the text of a list.

    Args:
        text: its lines; empty ones and those that begin with # say nothing.
        file: its name, for errors.

    Raises:
        ArgumentError: a line is wrong; the message names file, line, rule and remedy.
    """
    lines: list[Line] = []
    for number, written in enumerate(text.splitlines(), 1):
        stripped = written.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if len(lines) >= MAX_LINES:
            raise ArgumentError(f"{file}:{number}: a list may have {MAX_LINES} lines; use groups (@name) and %u")
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
        raise ArgumentError(f"a line begins with allow or deny, not {verb!r}")
    found = [_of_word(action) for action in actions.split(",")]
    names = frozenset(who.split(","))
    if "" in names or "@" in names:
        raise ArgumentError(f"{who!r} must be users, groups (@name), anonymous or *, with commas between, no spaces")
    encoded = pattern.encode("utf-8", "surrogateescape")
    _check_pattern(encoded)
    return Line(number, _VERBS[verb], names, frozenset[Action]().union(*found), encoded)


def _of_word(word: str) -> frozenset[Action]:
    if word in _ACTIONS:
        return _ACTIONS[word]
    near = difflib.get_close_matches(word[:64], _ACTIONS, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ArgumentError(f"{word!r} is no action; {meant}There are: {', '.join(_ACTIONS)}, with commas between")


def _check_pattern(pattern: bytes) -> None:
    shown = repr(pattern.decode("utf-8", "replace"))
    levels = pattern.split(b"/")
    for at, level in enumerate(levels):
        if b"#" in level and (level != b"#" or at < len(levels) - 1):
            raise ArgumentError(f"{shown}: # stands alone, behind the last /")
        if b"+" in level and level != b"+":
            raise ArgumentError(f"{shown}: + stands alone between two /")
    for letter in _VARIABLE.findall(pattern):
        if letter not in (b"u", b"c", b"g", b"%"):
            raise ArgumentError(f"{shown}: after % comes u (user), c (client id), g (group), or % for itself")


# ---- Decisions by the access list that is in force, and how often which of them was no.

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
