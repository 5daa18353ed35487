"""The documented statements of SMQ and MQTT, each with the tests that hold it in Lua and in Python.

`statements/*.toml` has them by section of the specification. `scripts/fix` makes the page "Conformance" of the manual
of them, and `test_statements.py` compares.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "smqrt/help/conformance.md"
MQTT_CASES = REPOSITORY / "tests/conformance/mqtt_hub.json"


class Statement(NamedTuple):
    """A sentence of the documents.

    Attributes:
        section: what part of the API it is about.
        says: the statement, in our words.
        lua, python: the tests that hold it in this language, such as "tests/hub/test_hub.py::test_pubon".
    """

    section: str
    says: str
    lua: list[str]
    python: list[str]


def statements() -> list[Statement]:
    """Returns all of them in the order of the page."""
    found = []
    for file in sorted((Path(__file__).parent / "statements").glob("*.toml")):
        for section, rows in tomllib.loads(file.read_text("utf-8")).items():
            found += [Statement(section, row["says"], row["lua"], row["python"]) for row in rows]
    return found


@cache
def functions(file: str) -> frozenset[str]:
    """Returns the names of the tests in a file of the repository."""
    tree = ast.parse((REPOSITORY / file).read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing(row: Statement) -> Iterator[str]:
    """Yields what is wrong with a row: no test for a language, or a test that does not exist."""
    for language, tests in (("Lua", row.lua), ("Python", row.python)):
        if not tests:
            yield f"{row.says!r} has no test in {language}"
        for test in tests:
            file, _, name = test.partition("::")
            if not (REPOSITORY / file).is_file() or name.partition("[")[0] not in functions(file):
                yield f"{row.says!r}: there is no test {test}"


def page() -> str:
    """Returns the page of the manual."""
    rows = statements()
    tests = {test for row in rows for test in row.lua + row.python}
    parts = [_HEAD.format(count=len(rows), tests=len(tests), mqtt=len(json.loads(MQTT_CASES.read_text("utf-8"))))]
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            parts.append(f"\n## {section}\n\n| statement | Lua | Python |\n|---|---|---|\n")
        says = row.says.replace("|", "\\|")
        parts.append(f"| {says} | {_names(row.lua)} | {_names(row.python)} |\n")
    return "".join(parts)


def _names(tests: list[str]) -> str:
    return "<br>".join(f"`{test.removeprefix('tests/').replace('|', chr(92) + '|')}`" for test in tests)


_HEAD = """# Conformance: documented statements and their tests

This page lists what the documents of SMQ and of its MQTT modules state, with the tests of each statement in Lua and in
Python: {count} statements, {tests} tests. Paths are below `tests/`. The same test in both columns runs once for each
language, with a hub or a client of it, or tests code that both use. [Moving a Barracuda application here](moving.md)
lists how other Barracuda products differ, and the [specification](specification/smq.md) has the facts.

For [MQTT clients of a hub](mqtt-hub.md), `conformance/mqtt_hub.json` has {mqtt} cases with the numbers of the
statements of the OASIS standards. Each runs over TCP and over WebSockets, in the versions of MQTT that it applies to.
"""
