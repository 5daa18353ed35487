"""Register of limits: counts and logs how often each limit was reached, and by which client.

The code that enforces a limit declares it as a `Limit` with a name, its setting and its rule. `snapshot` returns all of
them, for metrics and the admin API.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic, time

log = logging.getLogger("smqrt")

LINE_EVERY_S = 1.0
"""The interval of log lines about one limit, so that a client can't fill the log."""


class LineLimit:
    """Permits one log line in `LINE_EVERY_S`, and counts the suppressed ones."""

    __slots__ = ("_next_line_s", "_suppressed")

    def __init__(self) -> None:
        self._next_line_s, self._suppressed = 0.0, 0

    def others(self) -> str | None:
        """Return None to suppress a line, else its suffix with the number of lines suppressed before it."""
        now_s = monotonic()
        if now_s < self._next_line_s:
            self._suppressed += 1
            return None
        suffix = f" ({self._suppressed} more since the last such line)" if self._suppressed else ""
        self._next_line_s, self._suppressed = now_s + LINE_EVERY_S, 0
        return suffix

    def warn(self, sentence: str) -> None:
        """Log a warning, unless there was one in the last second."""
        if (suffix := self.others()) is not None:
            log.warning("%s%s", sentence, suffix)


@dataclass(frozen=True)
class LimitState:
    """The current state of a limit.

    Attributes:
        name: of the limit, in words with underscores.
        rule: the sentence in the log.
        setting: the setting that changes it; empty for none.
        count: how often it was reached since the process started.
        last: what it refused last; empty for nothing.
        last_s: the time of that, in seconds since 1970; 0 for never.
    """

    name: str
    rule: str
    setting: str
    count: int
    last: str
    last_s: float


class Limit:
    """A limit of this process. It adds itself to the register.

    Args:
        name: of the limit, in words with underscores, for metrics and `refused()` of hubs.
        setting: the setting that changes it, such as `limits.publish_rate`; empty for none.
        rule: what is permitted, a clause for the log.

    Attributes:
        count: how often it was reached.
    """

    __slots__ = ("_last", "_last_s", "count", "lines", "name", "rule", "setting")

    def __init__(self, name: str, setting: str, rule: str) -> None:
        assert name not in _register, f"duplicate limit {name}"
        self.name, self.setting, self.rule = name, setting, rule
        self.count = 0
        self.lines = LineLimit()
        self._last, self._last_s = "", 0.0
        _register[name] = self

    def __repr__(self) -> str:
        return f"Limit({self.name})"

    def sentence(self, what: str, rule: str = "") -> str:
        """Return the log line for a refused `what`. `rule` replaces the limit's own, with its figures."""
        setting = f"; see the setting {self.setting}" if self.setting else ""
        return f"refused: {what}: {rule or self.rule}{setting}"

    def refused(self, what: str, rule: str = "", *, times: int = 1) -> None:
        """Count a refusal and log it, at most once a second for each limit.

        Args:
            what: what was refused: "a connection of 192.0.2.1". No secrets: the log and the API show it.
            rule: the rule with its figures; the limit's own by default.
            times: how many refusals.
        """
        self.count += times
        self._last, self._last_s = what, time()
        if (suffix := self.lines.others()) is not None:
            log.warning("%s%s", self.sentence(what, rule), suffix)

    def state(self) -> LimitState:
        """Return the current state of the limit."""
        return LimitState(self.name, self.rule, self.setting, self.count, self._last, self._last_s)


_register: dict[str, Limit] = {}


def registered() -> list[Limit]:
    """Return all limits of the process, sorted by name."""
    return [_register[name] for name in sorted(_register)]


def snapshot() -> list[LimitState]:
    """Return the state of all limits of the process, sorted by name."""
    return [limit.state() for limit in registered()]


class Bucket:
    """A token bucket. Its level may be negative: callers may take more at once than it holds.

    Args:
        per_s: tokens added per second.
        burst: its capacity.
        now_s: the time.
    """

    __slots__ = ("_at_s", "_burst", "_per_s", "tokens")

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s, self._burst, self._at_s = per_s, burst, now_s
        self.tokens = burst

    def fill(self, now_s: float) -> float:
        """Add the tokens of the time since the last call, and return the level."""
        self.tokens = min(self._burst, self.tokens + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self.tokens

    def wait_s(self, tokens: float) -> float:
        """Return the seconds until it has so many tokens, or is full."""
        return max(0.0, (min(tokens, self._burst) - self.tokens) / self._per_s)
