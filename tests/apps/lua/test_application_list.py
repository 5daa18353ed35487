"""The list of applications at `/`."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from smqrt.http.access import Access
from smqrt.manual.web import ApplicationList
from tests.apps.lua.app_server import AppServer


@pytest.fixture
def listing(server: AppServer) -> AppServer:
    """A server with an application that runs and one that does not."""
    good = server.app({"README.md": "# A\n\nCounts <visitors>. Much.", "index.html": "x"}, "good&1")
    bad = server.app({"README.md": "# A\n\nIs broken.", ".preload": "error('<b>\\27[2J' .. 'why')"}, "bad")
    plain = server.app({"index.html": "x"}, "plain")
    server.root.insert(ApplicationList([good, bad, plain]))
    return server


def test_what_each_application_is(listing: AppServer) -> None:
    text = listing.ask("/").text
    assert "Counts &lt;visitors&gt;.</p>" in text
    assert "Much" not in text
    assert '<a href="/good%261/">good&amp;1</a>' in text
    assert '<a href="/plain/">plain</a></h2></li>' in text
    assert '<a href="/help/">' in text
    assert "3 applications" in text


def test_failure_reasons_are_shown_only_to_operators(listing: AppServer) -> None:
    listing.server.access = Access(debug=True)
    text = listing.ask("/").text
    assert "Is broken.</p>" in text
    assert "bad/.preload:1: &lt;b&gt;" in text
    assert '<a href="/bad/">' not in text
    listing.server.access = Access(debug=False)
    text = listing.ask("/").text
    assert "why" not in text.replace("says why", "")
    assert "Is broken.</p>" in text


def test_an_application_in_a_zip_file(server: AppServer, tmp_path: Path) -> None:
    with ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("inner/README.md", "# Z\n\nPacked. Yes.")
        archive.writestr("inner/index.html", "x")
    assert server.applications.load("z", tmp_path / "app.zip", inner="inner").about == "Packed."
