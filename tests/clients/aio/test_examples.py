"""The program with FastAPI of the manual, without FastAPI: a stand-in for the few names that it uses."""

from __future__ import annotations

import asyncio
import re
import sys
from types import ModuleType
from typing import Any

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "smqrt/help/asyncio.md"


class FastAPI:
    """Endpoints by method and path, and the lifespan."""

    def __init__(self, lifespan: Any) -> None:
        self.lifespan = lifespan
        self.endpoints: dict[tuple[str, str], Any] = {}

    def _register(self, method: str, path: str) -> Any:
        return lambda function: self.endpoints.setdefault((method, path), function)

    def get(self, path: str) -> Any:
        return self._register("GET", path)

    def post(self, path: str) -> Any:
        return self._register("POST", path)


def test_the_program_with_fastapi(run, broker, monkeypatch):
    module = ModuleType("fastapi")
    module.FastAPI = FastAPI
    monkeypatch.setitem(sys.modules, "fastapi", module)
    program_text = re.search(r"```python\n(# web/main\.py.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1]
    names: dict[str, Any] = {"__name__": "main"}
    exec(program_text.replace("http://127.0.0.1:9357/chat/smq.lsp", broker.url), names)
    app = names["app"]

    async def program():
        async with app.lifespan(app):
            assert await names["smq"].wait_connected(10)
            assert await app.endpoints["POST", "/say/{text}"]("hello") == {"connected": True}
            while not await app.endpoints["GET", "/last"]():
                await asyncio.sleep(0.001)
            assert await app.endpoints["GET", "/last"]() == {"say": "hello"}

    run(program)
