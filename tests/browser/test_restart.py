"""A server that is stopped, and an application that starts anew: browsers, Python clients and raw devices are closed
without a Disconnect, which would tell them not to come back, and come back.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.demos import WAIT_S, RawDevice, join, people
from tests.conftest import REPOSITORY, Served
from tests.support.waiting import wait_until

WORKERS = int(os.environ.get("SMQRT_WORKERS", "1"))


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """A window in which connections may fail."""
    context = chromium.new_context()
    yield context.new_page()
    context.close()


def anew(served: Served, app: Path) -> None:
    """Change the application's code; wait until it has started anew in every worker."""
    preload, ok = next(app.glob(".preload*")), rf"app {app.name} at .*: ok"
    begun = len(re.findall(ok, served.output))
    preload.write_text(preload.read_text() + "\n\n")
    wait_until(lambda: len(re.findall(ok, served.output)) == begun + WORKERS, served.lines, WAIT_S)


def test_every_client_reconnects(
    serve: Callable[..., Served], page: Any, device: Callable[..., Any], tmp_path: Path
) -> None:
    apps = tmp_path / "apps"
    for name in ("chat", "python"):
        shutil.copytree(REPOSITORY / "app_preload" / name, apps / name)
    served = serve(apps, "--reload")
    page.goto(served.url + "/chat/")
    join(page, "Ada")
    device("chat/device.py", served.url + "/chat/smq.lsp")
    expect(people(page)).to_have_text(["Ada (you)", "Clock"])
    lua, python = (RawDevice(served.port, path, b"raw device") for path in ("/chat/smq.lsp", "/python/smq"))

    anew(served, apps / "chat")
    lua.expect_bare_end()
    lua.come()
    lua.hear(b"Ada", b"Clock")
    anew(served, apps / "python")
    python.expect_bare_end()
    python.come()

    assert served.stop() == 0
    lua.expect_bare_end()
    python.expect_bare_end()
    serve(apps, "--port", str(served.port))
    lua.come()
    python.come()
    lua.hear(b"Ada", b"Clock")
    expect(people(page)).to_have_text(["Ada (you)", "Clock"])
