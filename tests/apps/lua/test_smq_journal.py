"""Journals of Lua hubs: the option `journal`, its counters, and what a reload does to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smqrt.apps.lua.api import smq_hub
from smqrt.journal import arrow, segment, writer
from tests.apps.lua.app_server import AppServer

PRELOAD = "smq = require 'smq.hub'.create{journal = %s}\n"


@pytest.fixture
def hubs(server: AppServer) -> Iterator[AppServer]:
    smq_hub.install(server.vm, server.services, server.applications.exchanges)
    yield server
    writer.close_all()


def payloads(server: AppServer, folder: str) -> list[bytes]:
    found = []
    for path in sorted((server.folder / folder).rglob("*.arrows")):
        for entry in segment.read_index(path):
            rows = arrow.decode(path.read_bytes()[entry.offset : entry.end])
            found += [row.payload for row in rows]
    return found


def test_true_is_a_folder_of_the_application(hubs: AppServer) -> None:
    application = hubs.app({".preload": PRELOAD % "true" + "smq:publish('hello', 'greetings')"}, "shop")
    assert application.error is None, application.error
    application.unload()
    assert payloads(hubs, "shop/.journal") == [b"hello"]


def test_settings_and_counters(hubs: AppServer) -> None:
    settings = "{path = 'kept', topics = {'site/#'}, flush_ms = 1}"
    page = (
        "<? smq = app.smq smq:publish('1', 'site/1') smq:publish('2', 'other') ba.sleep(50) local c = smq:journal() ?>"
    )
    counts = "<?lsp= c.rows .. ' ' .. c.skipped .. ' ' .. c.next_seq ?>"
    application = hubs.app({".preload": PRELOAD % settings, "index.lsp": page.replace("<?", "<?lsp") + counts}, "shop")
    assert application.error is None, application.error
    assert hubs.ask("/shop/").text == "1 1 1"
    assert payloads(hubs, "shop/kept") == [b"1"]


def test_without_a_journal_there_are_no_counters(hubs: AppServer) -> None:
    files = {".preload": "smq = require 'smq.hub'.create()", "index.lsp": "<?lsp= tostring(app.smq:journal()) ?>"}
    assert hubs.app(files, "shop").error is None
    assert hubs.ask("/shop/").text == "nil"


def test_a_reload_goes_on_in_the_same_journal(hubs: AppServer) -> None:
    application = hubs.app({".preload": PRELOAD % "true" + "smq:publish('hello', 'greetings')"}, "shop")
    for _ in range(2):
        application.reload()
        assert application.error is None, application.error
    application.unload()
    assert not writer.opened
    assert payloads(hubs, "shop/.journal") == [b"hello"] * 3


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("{flush = 3}", "journal.flush"),
        ("{flush_ms = 'soon'}", "journal.flush_ms"),
        ("{topics = {print}}", "journal.topics"),
        ("7", "journal"),
    ],
)
def test_mistakes_are_named_with_file_and_line(hubs: AppServer, value: str, fault: str) -> None:
    application = hubs.app({".preload": PRELOAD % value}, "shop")
    assert application.error is not None
    assert application.error.startswith("shop/.preload:1: ")
    assert fault in application.error
