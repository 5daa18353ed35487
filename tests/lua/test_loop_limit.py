"""`smqrt serve --lua-loop-s`: a real server ends the loops of one application and serves the others."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import requests

from tests.conftest import Served

Serve = Callable[..., Served]

PATIENCE_S = 60  # it is half a second of CPU time

PAGES = {
    "page": "<?lsp local n = 0\nwhile true do n = n + 1 end ?>",
    "timer": "<?lsp app.timer = ba.timer(function()\nwhile true do pcall(function() while true do end end) end end) "
    "app.timer:set(1) ?>set",
    "coroutine": "<?lsp local endless = function() ::a:: goto a end\n"
    "coroutine.wrap(function() while true do pcall(coroutine.wrap(endless)) end end)() ?>",
}


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / (".preload" if name == "preload" else f"{name}.lsp")).write_text(text)
    return folder


def test_every_other_application_goes_on(serve: Serve, tmp_path: Path) -> None:
    write(tmp_path / "apps" / "bad", **PAGES)
    write(tmp_path / "apps" / "well", index="<h1>well</h1>")
    served = serve(tmp_path / "apps", "--lua-loop-s", "0.5")
    session = requests.Session()
    for name in PAGES:
        answer = requests.get(f"{served.url}/bad/{name}.lsp", timeout=PATIENCE_S)
        assert answer.status_code == (200 if name == "timer" else 500)
        assert session.get(f"{served.url}/well/", timeout=PATIENCE_S).text == "<h1>well</h1>"
        assert served.wait_for(rf"\b{name}\.lsp:[12]: this ran for 0\.5 s without giving way", PATIENCE_S)
    assert session.get(f"{served.url}/well/", timeout=PATIENCE_S).text == "<h1>well</h1>"
    assert served.stop() == 0


def test_an_application_that_does_not_end_to_load_fails_and_the_others_load(serve: Serve, tmp_path: Path) -> None:
    write(tmp_path / "apps" / "bad", preload="local n = 0\nwhile true do n = n + 1 end")
    write(tmp_path / "apps" / "well", index="<h1>well</h1>")
    served = serve(tmp_path / "apps", "--lua-loop-s", "0.5")
    assert requests.get(f"{served.url}/well/", timeout=PATIENCE_S).text == "<h1>well</h1>"
    served.wait_for(r"^app bad at /bad/: failed: bad/\.preload:2: this ran for 0\.5 s without giving way", PATIENCE_S)


def test_a_limit_that_is_none_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "smqrt", "serve", "--lua-loop-s", "-1", str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert answer.returncode == 1
    assert re.fullmatch(r"Error: lua_loop_s is -1; give a number of seconds, or 0 for no limit\.\n", answer.stderr)
