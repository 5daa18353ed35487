"""Names of limits for operators."""

from __future__ import annotations

import re
from pathlib import Path

import smqrt
from smqrt.operations.limit_usage import TITLES


def test_each_limit_has_a_noun_phrase() -> None:
    """Modules that are imported on first use register their limits later, so the sources are searched."""
    sources = Path(smqrt.__file__).parent.rglob("*.py")
    names = {name for path in sources for name in re.findall(r'\bLimit\(\s*"([a-z_]+)"', path.read_text("utf-8"))}
    assert names == set(TITLES)
