"""The setting lua.version: Lua 5.4 by default, or 5.5 (decision 0040)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from smqrt.apps.lua import vm as vm_module
from smqrt.apps.lua.vm import Vm
from smqrt.errors import StartError
from smqrt.server.configuration import check_startable
from smqrt.settings.server_settings import LuaSettings, Settings
from tests.conftest import Served


def test_the_default() -> None:
    assert Settings().lua.version == "5.4"


@pytest.mark.parametrize("version", ["5.4", "5.5"])
def test_a_server_of_each_version(serve: Callable[..., Served], tmp_path: Path, version: str) -> None:
    (tmp_path / "index.lsp").write_text("<?lsp=_VERSION?>")
    assert requests.get(serve(tmp_path, "--lua-version", version).url, timeout=10).text == f"Lua {version}"


def test_a_lupa_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(vm_module, "import_module", lacks)
    message = r"lua.version: lupa \S+ has no Lua 5.5. Update it \(pip install -U lupa\), or remove the setting."
    for use in (lambda: Vm("5.5"), lambda: check_startable(Settings(lua=LuaSettings(version="5.5")))):
        with pytest.raises(StartError, match=message):
            use()


def test_a_version_that_there_is_none_of() -> None:
    with pytest.raises(StartError, match="lua.version"):
        Settings(lua=LuaSettings(version="5.3"))
