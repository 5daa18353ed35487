"""Programs that pretend to be Java."""

from __future__ import annotations

from pathlib import Path

INSTALL = "apt-get install openjdk-17-jre-headless"


def fake(home: Path, version: str, release: bool = False) -> Path:
    """A `java` that says it is `version`; with `release` the file beside it says so, and starting it fails."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    says = "exit 1" if release else f"""echo 'openjdk version "{version}" 2026-01-20' >&2"""
    command.write_text(f"#!/bin/sh\n{says}\n")
    command.chmod(0o755)
    if release:
        (home / "release").write_text(f'IMPLEMENTOR="Debian"\nJAVA_VERSION="{version}"\n')
    return command
