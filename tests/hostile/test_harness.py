"""The harness notices what it is there for, and a quiet server passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.conftest import Besieged

HOLDS = '<?lsp local t = os.clock() while os.clock() < t + 0.2 do end print "done" ?>'
GROWS = '<?lsp big = (big or "") .. ("x"):rep(100 << 20) print "done" ?>'


@pytest.fixture
def bad(tmp_path: Path, besiege: Callable[..., Besieged]) -> Besieged:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "holds.lsp").write_text(HOLDS)
    (folder / "grows.lsp").write_text(GROWS)
    return besiege(folder)


def test_a_quiet_server_passes(besieged: Besieged) -> None:
    with besieged.attack("nothing special") as attack:
        assert b"200 OK" in besieged.post("/lua/body.lsp", b"x" * 100, "text/plain", attack)
    assert float("-inf") < attack.healthy_ms < 1000
    assert attack.sent_bytes > 100


def test_a_page_that_computes_is_noticed(bad: Besieged) -> None:
    with pytest.raises(AssertionError, match="a turn of the loop took 2"), bad.attack("computes") as attack:
        assert b"done" in bad.post("/bad/holds.lsp", b"", "text/plain", attack)
    assert attack.healthy_ms > 100


def test_memory_that_grows_is_noticed(bad: Besieged) -> None:
    with pytest.raises(AssertionError, match="the server grew by 1"), bad.attack("grows", held_ms=9999) as attack:
        assert b"done" in bad.post("/bad/grows.lsp", b"", "text/plain", attack)
