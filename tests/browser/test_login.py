"""Login pages in a browser: what the helper scripts send (spec: bas-api §5, §16)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PRELOAD = """
local users = ba.create.jsonuser()
local ha1 = ba.crypto.hash "md5" "bob:Barracuda Server:pässword" (true, "hex")
users:set {ann = {pwd = "sécret"}, bob = {pwd = {ha1}}}
local function page(_ENV, info)
  seen = info
  response:include ".page.lsp"
end
local closed = ba.create.resrdr("closed", 1, io)
closed:lspfilter(app)
closed:setauth(ba.create.authenticator(users, {type = "form", response = page}))
dir:insertprolog(closed, true)
closed = ba.create.resrdr("plain", 1, io)
closed:lspfilter(app)
closed:setauth(ba.create.authenticator(users, {type = "auth"}))
dir:insertprolog(closed, true)
"""
PAGE = """<!doctype html><title>login</title>
<form method="post">
  <input name="ba_username"><input name="ba_password" type="password">
  <input type="hidden" name="ba_seed" value="<?lsp=seen.seed?>">
  <input type="hidden" name="ba_seedkey" value="<?lsp=seen.seedkey?>">
  <?lsp if request:data "realm" then ?><input type="hidden" name="ba_realm" value="Barracuda Server"><?lsp end ?>
  <input type="<?lsp=request:data 'type' or 'submit'?>" id="ba_loginbut" value="Login">
</form>
<script src="/rtl/spark-md5.min.js"></script><script src="/rtl/sha1.js"></script>
"""


@pytest.fixture
def url(serve: Any, tmp_path: Path) -> str:
    """A server with login pages."""
    for name, text in {
        ".preload": PRELOAD,
        ".page.lsp": PAGE,
        "in.lsp": "<?lsp= request:user() ?>",
        "favicon.ico": "",
    }.items():
        (tmp_path / name).write_text(text, "utf-8")
    return f"http://127.0.0.1:{serve(tmp_path).port}"


@pytest.fixture
def posted(page: Any) -> list[str]:
    """What the page sent."""
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data) if request.method == "POST" else None)
    return sent


def sign_in(page: Any, url: str, name: str, password: str) -> None:
    page.goto(url)
    page.fill("[name=ba_username]", name)
    page.fill("[name=ba_password]", password)


def test_a_password_leaves_the_browser_hashed(url: str, page: Any, posted: list[str]) -> None:
    sign_in(page, f"{url}/closed/in.lsp", "ann", "sécret")
    page.click("#ba_loginbut")
    page.wait_for_function("document.body.innerText == 'ann'")
    page.context.clear_cookies()
    sign_in(page, f"{url}/closed/in.lsp?realm=1", "bob", "pässword")
    page.press("[name=ba_password]", "Enter")
    page.wait_for_function("document.body.innerText == 'bob'")
    page.context.clear_cookies()
    sign_in(page, f"{url}/closed/in.lsp?type=button", "ann", "sécret")
    page.click("#ba_loginbut")
    page.wait_for_function("document.body.innerText == 'ann'")
    assert len(posted) == 3
    assert not [text for text in posted if "cret" in text or "ssword=p" in text]


def test_the_page_of_a_directory_that_has_none(
    url: str, page: Any, new_page: Callable[..., Any], posted: list[str], screenshot: Callable[..., None]
) -> None:
    sign_in(page, f"{url}/plain/in.lsp", "ann", "wrong")
    page.click("#ba_loginbut")
    page.get_by_role("alert").get_by_text("wrong").wait_for()
    screenshot(page)
    screenshot(new_page(f"{url}/plain/in.lsp", phone=True), "phone")
    for name, password in (("ann", "sécret"), ("bob", "pässword")):
        page.context.clear_cookies()
        sign_in(page, f"{url}/plain/in.lsp", name, password)
        page.click("#ba_loginbut")
        page.wait_for_function(f"document.body.innerText == '{name}'")
    assert not [text for text in posted if "wrong" in text or "cret" in text]


def test_spark_md5(url: str, page: Any) -> None:
    page.goto(f"{url}/closed/in.lsp")
    for text in ("", "abc", "ä€😀", "x" * 55, "x" * 56, "x" * 64, "ab" * 500):
        assert page.evaluate("text => SparkMD5.hash(text)", text) == hashlib.md5(text.encode()).hexdigest()
    data = bytes(range(256)) * 3
    expected = hashlib.md5(data).hexdigest()
    binary = data.decode("latin-1")
    for code in (
        "SparkMD5.hashBinary(binary)",
        "SparkMD5.ArrayBuffer.hash(Uint8Array.from(binary, c => c.charCodeAt(0)).buffer)",
        "new SparkMD5().appendBinary(binary.slice(0, 100)).appendBinary(binary.slice(100)).end()",
        "new SparkMD5.ArrayBuffer().append(Uint8Array.from(binary, c => c.charCodeAt(0)).buffer).end()",
        "new SparkMD5().setState(new SparkMD5().appendBinary(binary.slice(0, 70)).getState())"
        ".appendBinary(binary.slice(70)).end()",
        "Array.from(SparkMD5.hashBinary(binary, true), c => c.charCodeAt(0).toString(16).padStart(2, '0')).join('')",
    ):
        assert page.evaluate(f"binary => {code}", binary) == expected, code
