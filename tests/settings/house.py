"""A small table of settings, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from smqrt.server import configuration
from smqrt.settings import sources
from smqrt.settings.option_types import (
    choice,
    duration,
    group,
    named_settings_of,
    option,
    optional,
    settings_of,
    tables,
    text,
    texts,
    whole,
)


def file(folder: Path, text: str) -> Path:
    path = folder / "smqrt.toml"
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Door:
    """A table that users name."""

    port: int = option(1, whole(0), "Its port.")
    word: str = option("", text(), "A password.", secret=True, live=True)


@dataclass(frozen=True)
class Lock:
    """A table of words."""

    kind: str = option("yale", choice("yale", "abus"), "Its make.", live=True)


@dataclass(frozen=True)
class House:
    """A table with all there is."""

    size: int = option(1, whole(0), "How large.")
    after_s: float = option(1.0, duration(), "When.")
    names: tuple[str, ...] = option((), texts(), "Who.")
    word: str | None = option(None, optional(text()), "A password.", secret=True)
    lock: Lock = group(Lock, "A lock.")
    door: Mapping[str, Door] = tables(Door, "Doors.")


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> type[House]:
    for module in (sources, configuration):
        monkeypatch.setattr(module, "Settings", House)
    monkeypatch.setattr(sources, "table", lambda: tuple(settings_of(House)))
    monkeypatch.setattr(sources, "named_table", lambda: tuple(named_settings_of(House)))
    return House
