"""The register of limits: what strangers may have of the server, who reached what, and how often.

A limit stands beside the code that enforces it, as a `Limit` with a name, the setting that changes it and the rule in
words. `snapshot` gives all of them, for metrics and the administration interface.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic, time

log = logging.getLogger("smqrt")

LINE_EVERY_S = 1.0
"""A stranger must not fill the log: so often there is a line about one limit."""


class LineLimit:
    """Lets a line into the log once in `LINE_EVERY_S`, and counts the others."""

    __slots__ = ("_next_line_s", "_unsaid")

    def __init__(self) -> None:
        self._next_line_s, self._unsaid = 0.0, 0

    def others(self) -> str | None:
        """Returns None when a line is left out, else what it has to say of those that were left out before it."""
        now_s = monotonic()
        if now_s < self._next_line_s:
            self._unsaid += 1
            return None
        others = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._next_line_s, self._unsaid = now_s + LINE_EVERY_S, 0
        return others

    def warn(self, sentence: str) -> None:
        """Logs `sentence` as a warning, unless there was one in the last second."""
        if (others := self.others()) is not None:
            log.warning("%s%s", sentence, others)


@dataclass(frozen=True)
class LimitState:
    """A limit as it stands now.

    Attributes:
        name: of the limit, in words with underscores.
        rule: the sentence that the log has.
        setting: which one changes it; empty when none does.
        count: how often it was reached since the process began.
        last: whom or what it stopped last; empty when it never did.
        last_s: when that was, in seconds since 1970; 0 when it never was.
    """

    name: str
    rule: str
    setting: str
    count: int
    last: str
    last_s: float


class Limit:
    """One limit of this process, listed in the register from when it is made.

    Args:
        name: of the limit, in words with underscores; metrics and `refused()` of hubs have it.
        setting: the setting that changes it, such as `limits.publish_rate`; empty for none.
        rule: what is allowed, a clause for the log.

    Attributes:
        count: how often it was reached.
    """

    __slots__ = ("_last", "_last_s", "count", "lines", "name", "rule", "setting")

    def __init__(self, name: str, setting: str, rule: str) -> None:
        assert name not in _register, f"there is a limit {name} already"
        self.name, self.setting, self.rule = name, setting, rule
        self.count = 0
        self.lines = LineLimit()
        self._last, self._last_s = "", 0.0
        _register[name] = self

    def __repr__(self) -> str:
        return f"Limit({self.name})"

    def sentence(self, what: str, rule: str = "") -> str:
        """Returns what the log says when `what` is refused; `rule` replaces the limit's own, with its figures."""
        setting = f"; see the setting {self.setting}" if self.setting else ""
        return f"refused: {what}: {rule or self.rule}{setting}"

    def refused(self, what: str, rule: str = "", *, times: int = 1) -> None:
        """Counts that `what` was refused, and says so in the log, at most once a second for each limit.

        Args:
            what: whom or what this was about: "a connection of 192.0.2.1". No secrets: the log and the API show it.
            rule: the rule with its figures; the limit's own when left out.
            times: how many at once.
        """
        self.count += times
        self._last, self._last_s = what, time()
        if (others := self.lines.others()) is not None:
            log.warning("%s%s", self.sentence(what, rule), others)

    def state(self) -> LimitState:
        """Returns the limit as it stands now."""
        return LimitState(self.name, self.rule, self.setting, self.count, self._last, self._last_s)


_register: dict[str, Limit] = {}


def registered() -> list[Limit]:
    """Returns every limit of the process, by name."""
    return [_register[name] for name in sorted(_register)]


def snapshot() -> list[LimitState]:
    """Returns every limit of the process as it stands now, by name."""
    return [limit.state() for limit in registered()]


class Bucket:
    """A token bucket. It may owe: what is taken at once may be more than it holds.

    Args:
        per_s: tokens that come in a second.
        burst: the most it holds.
        now_s: the time.
    """

    __slots__ = ("_at_s", "_burst", "_per_s", "tokens")

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s, self._burst, self._at_s = per_s, burst, now_s
        self.tokens = burst

    def fill(self, now_s: float) -> float:
        """Add what has come since; gives how many tokens there are."""
        self.tokens = min(self._burst, self.tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self.tokens

    def wait_s(self, tokens: float) -> float:
        """How long it takes until there are so many, or as many as it holds."""
        return max(0.0, (min(tokens, self._burst) - self.tokens) / self._per_s)
