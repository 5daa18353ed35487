"""The tokens of Lua source text, in linear time whatever the text is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""\s+ | --(?!\[=*\[)[^\n]* | (?P<long>(?:--)?\[(?P<level>=*)\[) | (?P<name>[A-Za-z_]\w*)
    | (?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*" | '[^'\\\n]*(?:\\.[^'\\\n]*)*')
    | (?P<number>0[xX][\w.]+ | \d[\w.]*) | (?P<mark>\.\.\.|\.\.|::|==|~=|<=|>=|//|<<|>>|.)""",
    re.VERBOSE | re.ASCII | re.DOTALL,
)


class Token(NamedTuple):
    """A token that is neither space nor comment.

    Attributes:
        kind: "name" (keywords too), "string", "number" or "mark".
        text: as written; of strings what is between the quotes or brackets.
        line: where it begins.
    """

    kind: str
    text: str
    line: int


def tokens(source: str) -> Iterator[Token]:
    """The tokens of a text. Behind a long string or comment without an end there are none."""
    at, line = 0, 1
    while found := _TOKEN.match(source, at):
        kind, text, end = found.lastgroup, found[0], found.end()
        if found["long"]:
            close = source.find(f"]{found['level']}]", end)
            if close < 0:
                return
            kind = None if text.startswith("--") else "string"
            text, end = source[end:close], close + len(found["level"]) + 2
        elif kind == "string":
            text = text[1:-1]
        if kind:
            yield Token(kind, text, line)
        line += source.count("\n", at, end)
        at = end
