"""Hints in messages and manual pages name what exists: options of commands, of decorators, of `format("smq")`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from smqrt.cli import cli
from smqrt.pipeline import api
from smqrt.pipeline.smq_source import options

ROOT = Path(__file__).parent.parent.parent / "smqrt"
PAGES = sorted([*ROOT.glob("help/pipeline*.md"), ROOT / "help/format-smq.md", ROOT / "help/exactly-once.md"])
CODE = sorted([*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("journal/*.py"), *ROOT.glob("cli/pipeline*.py")])
SPARKS = {"--py-files", "--conf", "--files", "--jars", "--name", "--load-spark-defaults", "--properties-file"}
SPARKS |= {
    "--driver-java-options",
    "--executor-memory",
    "--num-executors",
    "--executor-cores",
    "--archives",
    "--total-executor-cores",
}
OTHERS = {"--no-install-recommends", "--upgrade", "--help", "--user"}


def commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if found := command.get_command(context, name):
                yield from commands(found)


def known() -> set[str]:
    found = [each for one in commands(cli) for each in one.params]
    return {name for each in found for name in (*each.opts, *each.secondary_opts)} | SPARKS | OTHERS


def strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("path", [*CODE, *PAGES], ids=lambda path: path.name)
def test_options_of_commands_exist(path: Path) -> None:
    text = "\n".join(strings(path)) if path.suffix == ".py" else path.read_text("utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert named <= known(), f"{path} names options that no command has"


def test_options_of_decorators_exist() -> None:
    pattern = re.compile(r"@(source|publish|table|alert|reference|expect|stateful)\(((?:[^()]|\([^()]*\))*)\)")
    seen = 0
    for page in PAGES:
        for kind, arguments in pattern.findall(page.read_text("utf-8")):
            there = inspect.signature(getattr(api, kind)).parameters
            for name in re.findall(r"(?:^|[,\s])(\w+)=", re.sub(r"\"[^\"]*\"", "", arguments)):
                seen += 1
                assert name in there, f"{page}: @{kind} has no option {name}"
    assert seen > 20


def test_options_of_the_source_exist() -> None:
    names = {
        *options.READ_OPTIONS,
        *options.KAFKA_NAMES,
        *options.WRITE_OPTIONS,
        *options.SPARK_OPTIONS,
        "checkpointLocation",
    }
    names |= {"stateVarName", "readRegisteredTimers"}  # of Spark's format statestore
    for page in PAGES:
        for name in re.findall(r"\.option\(\"(\w+)\"", page.read_text("utf-8")):
            assert name in names or "." in name, f"{page}: format smq has no option {name}"


def test_every_option_of_a_source_is_in_the_manual() -> None:
    page = (ROOT / "help/pipelines.md").read_text("utf-8")
    for name in inspect.signature(api.source).parameters:
        assert name == "unknown" or f"`{name}`" in page, f"help/pipelines.md says nothing about {name}"
