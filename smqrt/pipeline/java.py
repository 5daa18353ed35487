"""Which Java Spark runs on: found where Spark looks for it, else where Debian puts it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from smqrt.errors import PipelineError

SUPPORTED = (17, 21)
"""Major versions that Spark 4 is made for."""

INSTALL = "apt-get install openjdk-17-jre-headless"
"""What brings one on Debian and Ubuntu."""

_DEBIAN = Path("/usr/lib/jvm")
_VERSION_S = 30
_VERSION = re.compile(r'(?:version "|JAVA_VERSION=")(?:1\.)?(\d+)([^"]*)"')


@dataclass(frozen=True)
class Java:
    """A Java that was found.

    Attributes:
        command: its `bin/java`.
        version: as it says of itself, such as "17.0.15".
        major: the first number of it.
    """

    command: Path
    version: str
    major: int

    @property
    def home(self) -> Path:
        """The folder that JAVA_HOME names."""
        return self.command.resolve().parent.parent


def find(environment: Mapping[str, str] | None = None, debian: Path = _DEBIAN) -> Java:
    """Finds a Java that Spark runs on: JAVA_HOME, else the one on the path, else the newest supported one of Debian's.

    Args:
        environment: variables to look at; those of the process when not given.
        debian: folder with one folder for each Java installed.

    Raises:
        PipelineError: there is none, or JAVA_HOME names something else.
    """
    variables = os.environ if environment is None else environment
    if home := variables.get("JAVA_HOME"):
        return _of_home(Path(home))
    found = [java for command in _candidates(variables, debian) if (java := _inspect(command))]
    for java in found:
        if java.major in SUPPORTED:
            return java
    there = f"; found only Java {found[0].version} ({found[0].command})" if found else ""
    raise PipelineError(f"Java 17 or 21 is needed{there}. As root, type: {INSTALL}")


def use(java: Java) -> None:
    """Lets the Spark that this process starts run on `java`."""
    os.environ["JAVA_HOME"] = str(java.home)


def _of_home(home: Path) -> Java:
    command = home / "bin" / "java"
    if not os.access(command, os.X_OK):
        raise PipelineError(f"JAVA_HOME is {home}, where there is no bin/java: unset it, or name Java 17 or 21.")
    java = _inspect(command)
    if java is None:
        raise PipelineError(f"JAVA_HOME is {home}, whose bin/java doesn't tell its version: name Java 17 or 21.")
    if java.major not in SUPPORTED:
        wrong = f"JAVA_HOME is {home}, which is Java {java.version}, and Spark needs 17 or 21"
        raise PipelineError(f"{wrong}: unset it, or type as root: {INSTALL}")
    return java


def _candidates(variables: Mapping[str, str], debian: Path) -> Iterator[Path]:
    if command := shutil.which("java", path=variables.get("PATH", "")):
        yield Path(command)
    for major in reversed(SUPPORTED):
        yield from sorted(debian.glob(f"java-{major}-*/bin/java"))


def _inspect(command: Path) -> Java | None:
    match = _VERSION.search(_release(command)) or _VERSION.search(_spoken(command))
    return Java(command, match[1] + match[2], int(match[1])) if match else None


def _release(command: Path) -> str:
    """What lies beside every Java since 9; reading it is a hundred times faster than starting it."""
    try:
        return (command.resolve().parent.parent / "release").read_text("utf-8", "replace")
    except OSError:
        return ""


def _spoken(command: Path) -> str:
    try:
        answer = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=_VERSION_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stderr + answer.stdout
