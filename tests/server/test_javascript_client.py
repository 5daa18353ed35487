"""The files `/rtl/smq.mjs` and `/rtl/smq.js`, which have one source."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from smqrt.server.javascript_client import classic_script, client_scripts
from tests.conftest import REPOSITORY, Served

MODULE = REPOSITORY / "smqrt/clients/javascript/smq.mjs"


def test_the_script_is_the_module_without_its_export() -> None:
    script = classic_script(b"const a = 1, b = 2;\nexport {a, b};\n").decode()
    assert script == 'globalThis.SMQ = (() => {\n"use strict";\nconst a = 1, b = 2;\nreturn {a, b};\n})();\n'


def test_old_browsers_can_read_the_script() -> None:
    """The syntax of 2018: a browser that does not know one word of it runs nothing."""
    text = re.sub(r"//.*|/\*.*?\*/", "", client_scripts().read("smq.js").decode(), flags=re.DOTALL | re.NOFLAG)
    newer = re.findall(r"\?\.[\w\[(]|\?\?|\|\|=|&&=|^ *(?:static )?#\w|\d_\d|\bexport\b|\bimport\b|\bwindow\b", text)
    assert newer == []


def test_a_module_without_its_last_line_is_refused() -> None:
    with pytest.raises(AssertionError, match="one line `export"):
        classic_script(b"export const a = 1;\n")


@pytest.mark.servers
def test_servers_have_both(serve: Callable[..., Served], tmp_path: Path) -> None:
    """As other files are: with types, conditions, and compressed. The console has the script too."""
    served = serve(tmp_path)
    for name in ("smq.mjs", "smq.js"):
        answer = requests.get(f"{served.url}/rtl/{name}", timeout=20)
        assert answer.headers["Content-Type"] == "text/javascript; charset=utf-8"
        assert answer.headers["Content-Encoding"] == "gzip"
        assert answer.content == client_scripts().read(name)
        condition = {"If-None-Match": answer.headers["ETag"]}
        assert requests.get(f"{served.url}/rtl/{name}", headers=condition, timeout=20).status_code == 304
    assert client_scripts().read("smq.mjs") == MODULE.read_bytes()
    assert requests.get(f"{served.admin_url}/console/smq.js", timeout=20).content == client_scripts().read("smq.js")
    assert requests.get(f"{served.url}/rtl/package.json", timeout=20).status_code == 404
