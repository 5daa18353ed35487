"""The list of documented statements is complete, and the manual shows it."""

from __future__ import annotations

from tests.conformance.statements import PAGE, Statement, missing, page, statements


def test_every_statement_has_a_test_in_both_languages() -> None:
    assert not [fault for row in statements() for fault in missing(row)]


def test_no_statement_is_listed_twice() -> None:
    said = [row.says for row in statements()]
    assert not [one for one in said if said.count(one) > 1]


def test_the_page_shows_the_list() -> None:
    assert PAGE.read_text("utf-8") == page(), "scripts/fix makes it anew"


def test_what_is_missing_is_noticed() -> None:
    """A row without a test, of a file or of a name that does not exist."""
    for lua in ([], ["tests/nowhere.py::test_x"], ["tests/hub/test_hub.py::test_nothing"]):
        assert len(list(missing(Statement("", "x", lua, ["tests/hub/test_hub.py::test_pubon"])))) == 1
