"""`smqrt check`: what an application for the Barracuda App Server calls that is absent here."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from smqrt.apps.lua import check as api_table
from smqrt.apps.lua.check import ABSENT, SKIPPED, SYNTAX, UNKNOWN, Finding, Report
from smqrt.apps.lua.check import check as read_application
from smqrt.printable import json_line, printable


@click.command()
@click.argument("path", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For programs: JSON.")
def check(path: Path, as_json: bool) -> None:
    """List what the application in FOLDER, or a ZIP file, calls that is absent here.

    Reads its Lua and its pages; nothing is run. The list has file and line; "unknown" is what neither this server nor
    the documentation of the Barracuda App Server has. Exit code 1 when something is absent or has a syntax error.
    """
    report = read_application(path, api_table.read())
    for finding in report.findings:
        if as_json:
            click.echo(json_line(_named(finding)))
        else:
            click.echo(printable(f"{path / finding.path}{_line(finding)}: {sentence(finding)}"))
    if not as_json:
        click.echo(summary(report))
    sys.exit(1 if report.count(ABSENT) or report.count(SYNTAX) or report.count(SKIPPED) else 0)


def _named(finding: Finding) -> dict[str, object]:
    """The finding with the names that the JSON of all commands has."""
    values = {"file": finding.path, "line": finding.line, "finding": finding.kind, "call": finding.name}
    return values | {"tested": finding.is_tested, "note": finding.note}


def _line(finding: Finding) -> str:
    return f":{finding.line}" if finding.line else ""


def sentence(finding: Finding) -> str:
    """Returns what is said about a finding."""
    if finding.kind == SYNTAX:
        return f"syntax error: {finding.note}"
    if finding.kind == SKIPPED:
        return f"not read: {finding.note}"
    text = f"{finding.name} is {finding.kind}"
    if finding.is_tested:
        text += ", but the file tests for it"
    return f"{text} ({finding.note})" if finding.note else text


def summary(report: Report) -> str:
    """Returns the last line."""
    files = "1 file" if report.files == 1 else f"{report.files} files"
    counts = [f"{report.count(kind)} {word}" for kind, word in _WORDS.items() if report.count(kind)]
    return f"{files} read: {', '.join(counts) or 'everything it calls is there'}"


_WORDS = {ABSENT: "absent", UNKNOWN: "unknown", SYNTAX: "with syntax errors", SKIPPED: "not read"}
