"""The web file manager, used in Chromium with mouse, keys and a dropped file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from tests.support.waiting import wait_until

PRELOAD = """
require "wfs"
io:mkdir "shared"
files = ba.create.wfs("fs", ba.mkio(io, "shared"), ".LOCK", 1)
dir:insert(files, true)
"""
DROP = """async ([name, text]) => {
    const data = new DataTransfer();
    data.items.add(new File([text], name));
    const how = {dataTransfer: data, bubbles: true, cancelable: true};
    const fire = (kind) => document.body.dispatchEvent(new DragEvent(kind, how));
    fire("dragenter");
    const shown = !document.getElementById("drop").hidden;
    fire("dragover");
    fire("drop");
    return shown;
}"""
NASTY = "<img src=x onerror=document.title='owned'>\"' %41;?#&.txt"


def test_the_file_manager(tmp_path: Path, serve: Any, new_page: Callable[..., Any]) -> None:
    folder = tmp_path / "shared"
    (folder / "old").mkdir(parents=True)
    (folder / "a.txt").write_text("alpha")
    (folder / NASTY).write_text("nasty")
    (tmp_path / ".preload").write_text(PRELOAD)
    served = serve(tmp_path)
    page = new_page(f"{served.url}/fs/")
    row = lambda name: page.locator(f'tr[data-name="{name}"]')  # noqa: E731
    answer, message = page.locator("#answer"), page.locator("#message")

    expect(page.locator("#count")).to_have_text("3 entries")

    # a folder, with the keyboard alone
    page.keyboard.press("n")
    answer.fill("new")
    answer.press("Enter")
    expect(row("new")).to_be_visible()
    expect(row("new").get_by_role("link")).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_url("**/fs/new/")
    expect(page.locator("#nothing")).to_be_visible()

    # uploads: chosen, several at once though the server takes one; dropped
    page.locator("#files").set_input_files([{"name": "big ü.bin", "mimeType": "x/y", "buffer": b"x" * 3_000_000}])
    expect(row("big ü.bin")).to_be_visible()
    assert (folder / "new/big ü.bin").stat().st_size == 3_000_000
    assert page.evaluate(DROP, ["dropped %41#.txt", "drop"]) is True
    expect(row("dropped %41#.txt")).to_be_visible()
    assert (folder / "new/dropped %41#.txt").read_text() == "drop"
    expect(page.locator("#uploads li")).to_have_count(0)
    page.evaluate(DROP, ["dropped %41#.txt", "again"])
    expect(page.get_by_role("heading", name="Replace")).to_be_visible()
    page.get_by_role("button", name="Replace").click()
    expect(page.locator("#ask")).to_be_hidden()
    wait_until(lambda: (folder / "new/dropped %41#.txt").read_text() == "again")
    expect(page.locator("#uploads li")).to_have_count(0)

    # back, a name that would like to be code
    page.keyboard.press("Backspace")
    page.wait_for_url("**/fs/")
    expect(page.locator("#count")).to_have_text("4 entries")
    nasty = page.locator("tr[data-name]").filter(has_text="onerror")
    nasty.get_by_role("link").first.focus()
    page.keyboard.press("F2")
    expect(page.locator("#question")).to_have_text(f"New name of “{NASTY}”")
    answer.fill("tame;?.txt")
    page.get_by_role("button", name="Rename").last.click()
    expect(row("tame;?.txt")).to_be_visible()
    assert (folder / "tame;?.txt").read_text() == "nasty"
    assert page.title() != "owned"

    # what can't be
    row("tame;?.txt").get_by_role("button", name="Rename").click()
    answer.fill("a.txt")
    answer.press("Enter")
    expect(message).to_have_text("A file or folder with this name already exists.")
    row("tame;?.txt").get_by_role("button", name="Rename").click()
    answer.fill("../../x")
    answer.press("Enter")
    expect(message).to_contain_text("a slash")

    # delete, after a question
    row("old").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Cancel").click()
    expect(row("old")).to_be_visible()
    row("old").get_by_role("link").focus()
    page.keyboard.press("Delete")
    page.keyboard.press("Enter")
    expect(row("old")).to_have_count(0)
    assert not (folder / "old").exists()
    with page.expect_download() as download:
        row("a.txt").get_by_role("link", name="Download").click()
    assert Path(download.value.path()).read_text() == "alpha"


def test_on_a_phone_nothing_is_wider_than_the_screen(tmp_path: Path, serve: Any, new_page: Callable[..., Any]) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / ("long" * 50)).write_text("x")
    (tmp_path / ".preload").write_text(PRELOAD)
    page = new_page(f"{serve(tmp_path).url}/fs/", phone=True)
    expect(page.locator("#count")).to_have_text("1 entry")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
