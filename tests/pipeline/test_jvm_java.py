"""The Java that is found, and the sentence when there is none that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from smqrt.errors import PipelineError
from smqrt.pipeline import jvm
from tests.pipeline.java import INSTALL, fake


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize(("version", "major"), [("17.0.15", 17), ("21", 21)])
def test_java_home_wins(tmp_path: Path, version: str, major: int, release: bool) -> None:
    command = fake(tmp_path / "chosen", version, release)
    fake(tmp_path / "path", "21.0.1")
    found = jvm.find_java({"JAVA_HOME": str(tmp_path / "chosen"), "PATH": str(tmp_path / "path/bin")}, tmp_path)
    assert found == jvm.Java(command, version, major)
    assert found.home == tmp_path / "chosen"


def test_the_one_on_the_path_comes_before_debian(tmp_path: Path) -> None:
    command = fake(tmp_path / "path", "17.0.1")
    fake(tmp_path / "java-21-openjdk", "21.0.1")
    assert jvm.find_java({"PATH": str(command.parent)}, tmp_path).command == command


def test_an_old_one_on_the_path_is_passed_over(tmp_path: Path) -> None:
    fake(tmp_path / "path", "1.8.0_392")
    command = fake(tmp_path / "java-17-openjdk", "17.0.1")
    assert jvm.find_java({"PATH": str(tmp_path / "path/bin")}, tmp_path).command == command


@pytest.mark.parametrize("variables", [{"PATH": ""}, {}])
def test_no_java(tmp_path: Path, variables: dict[str, str]) -> None:
    with pytest.raises(PipelineError) as caught:
        jvm.find_java(variables, tmp_path)
    assert str(caught.value) == f"Java 17 or 21 is needed. Run as root: {INSTALL}"


@pytest.mark.parametrize(("version", "shown"), [("11.0.21", "11.0.21"), ("1.8.0_392", "8.0_392"), ("25", "25")])
def test_only_another_java(tmp_path: Path, version: str, shown: str) -> None:
    command = fake(tmp_path / "path", version)
    with pytest.raises(PipelineError) as caught:
        jvm.find_java({"PATH": str(command.parent)}, tmp_path)
    assert str(caught.value) == f"Java 17 or 21 is needed; found only Java {shown} ({command}). Run as root: {INSTALL}"


def test_java_home_that_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=rf"JAVA_HOME is {tmp_path}, which has no bin/java: unset it"):
        jvm.find_java({"JAVA_HOME": str(tmp_path)}, tmp_path)
    fake(tmp_path / "eleven", "11.0.21")
    with pytest.raises(PipelineError, match=r"eleven, which is Java 11.0.21, and Spark needs 17 or 21: unset it, or"):
        jvm.find_java({"JAVA_HOME": str(tmp_path / "eleven")}, tmp_path)
    command = fake(tmp_path / "mute", "17")
    command.write_text("#!/bin/sh\n")
    with pytest.raises(PipelineError, match=r"mute, whose bin/java prints no version: set it to Java 17 or 21"):
        jvm.find_java({"JAVA_HOME": str(tmp_path / "mute")}, tmp_path)


def test_what_cannot_be_started_is_no_java(tmp_path: Path) -> None:
    command = fake(tmp_path / "path", "17")
    command.write_bytes(b"\x7fELF nonsense")
    with pytest.raises(PipelineError, match="Java 17 or 21 is needed. Run as root"):
        jvm.find_java({"PATH": str(command.parent)}, tmp_path)


def test_the_one_of_this_machine() -> None:
    assert jvm.find_java().major in jvm.JAVA_VERSIONS


def test_use_java_sets_java_for_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    found = jvm.Java(fake(tmp_path / "home", "17"), "17", 17)
    jvm.use_java(found)
    assert jvm.find_java().command == tmp_path / "home/bin/java"
