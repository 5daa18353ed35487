"""The share of its time in which Java collects garbage, told without asking it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smqrt.pipeline import jvm
from smqrt.pipeline.jvm import GarbageTime


def test_the_java_of_a_session_is_watched(spark: Any) -> None:
    found = jvm.find_garbage_time()
    assert found
    before_s = jvm.collecting_s(found._path)
    spark._jvm.System.gc()
    assert jvm.collecting_s(found._path) > before_s > 0


def test_the_share_of_the_last_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    told_s = iter([100.0, 100.5, 109.5, 127.5, 127.5, 127.5])
    monkeypatch.setattr(jvm, "collecting_s", lambda path: next(told_s))
    java = GarbageTime(Path("counters"))
    shares = [java.share(now_s) for now_s in (0.0, 5.0, 15.0, 35.0, 66.0, 90.0)]
    assert shares == [None, None, 9.5 / 15, 0.9, None, 0.0]


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xca\xfe\xc0\xc0\1\2\0\1" + bytes(20) + b"\0\0\0\x20\1\0\0\0"])
def test_java_without_counters_reports_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "1").write_bytes(data)
    for path in (tmp_path / "1", tmp_path / "gone"):
        assert GarbageTime(path).share() is None


def test_classes_that_are_kept_exist_in_this_spark(spark: Any) -> None:
    from py4j.java_gateway import JavaClass  # a name that is no class becomes a package

    kept = vars(spark._jvm)
    assert [name for name in jvm._KEPT_CLASSES if not isinstance(kept.get(name), JavaClass)] == []
    assert kept["py4j"].reflection.TypeUtil.isInstanceOf("java.lang.String", "text")
