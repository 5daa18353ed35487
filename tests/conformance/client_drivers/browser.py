"""Driver of the JavaScript client in Chromium for the client cases; see the README of this folder.

The page is on the hub's host, so that the connections have its origin. It loads the client's module and `commands.mjs`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Page, Route, async_playwright

HERE = Path(__file__).parent
CLIENT = HERE.parents[2] / "smqrt/clients/javascript/smq.mjs"
START = """import * as module from "/smq.mjs"; import {makeDriver} from "/commands.mjs";
window.run = makeDriver(module, answer => window.emit(JSON.stringify(answer)));"""
FILES = {
    "driver.html": ("text/html", f"<!doctype html><script type='module'>{START}</script>"),
    "smq.mjs": ("text/javascript", CLIENT.read_text("utf-8")),
    "commands.mjs": ("text/javascript", (HERE / "commands.mjs").read_text("utf-8")),
}
# The page does not come from the network, so Chromium would not let it connect to this machine.
FEATURES = "--disable-features=LocalNetworkAccessChecks,LocalNetworkAccessChecksWebSockets"
FLAGS = ["--no-sandbox", "--disable-gpu", FEATURES]


async def serve(route: Route) -> None:
    """Answer a request of the page."""
    found = FILES.get(urlsplit(route.request.url).path.strip("/"))
    if found is None:
        await route.fulfill(status=404)
    else:
        await route.fulfill(content_type=f"{found[0]}; charset=utf-8", body=found[1])


def emit(line: str) -> None:
    """Write one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def open_page(page: Page, url: str) -> None:
    """Load the driver from the host of the first hub."""
    await page.expose_function("emit", emit)
    await page.route("**/*", serve)
    await page.goto(f"http://{urlsplit(url).netloc}/driver.html")
    await page.wait_for_function("() => Boolean(window.run)")


async def main() -> None:
    """Run the commands of standard input, until it ends."""
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    path = shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        page: Any = None
        while line := await reader.readline():
            command = json.loads(line)
            if page is None:
                page = await browser.new_page()
                await open_page(page, command["url"])
            await page.evaluate("command => { run(command); }", command)
        await browser.close()


asyncio.run(main())
