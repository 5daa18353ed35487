"""Groups, sections and search of the manual; `smqrt help WORD`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smqrt.cli import cli
from smqrt.manual import pages as manual
from smqrt.manual.pages import INDEX_VARIABLE, Section, all_sections, excerpt, find, index_script, near_names, sections

PAGE = """# Valves: open and shut

They move
*water*.

## A `list`, and more

* one [link](x.md)
* two

| name | what |
|---|---|
| `a \\| b` | first |

```python
# no heading
open_valve()
```

### Again

## Again ##
"""


# ---- groups


def test_every_page_is_in_one_group() -> None:
    pages = manual.pages()
    groups = manual.groups(pages)
    assert sorted(name for group in groups for name in group.names) == sorted(pages)
    assert [group.names for group in groups if group.part == manual.REST] == [], "name them in smqrt/manual/pages.py"


def test_the_table_of_groups_names_pages_that_exist() -> None:
    pages = manual.pages() | {"specification": "", "specification/x": ""}
    named = [name for group in manual._TABLE for name in group[2].split()]
    assert len(named) == len(set(named))
    assert [name for name in named if "*" not in name and name not in pages] == []


def test_the_parts_of_the_manual_in_their_order() -> None:
    pages = manual.pages() | {"specification/smq": "# SMQ", "new": "# New"}
    parts = list(dict.fromkeys(group.part for group in manual.groups(pages)))
    assert parts == ["Start", "Build", "Data", "Operate", "Reference", "Specification", "Decisions", "More"]


def test_short_titles() -> None:
    assert manual.short_title("# Modbus: PLCs\n") == "Modbus"
    assert manual.short_title("# 0001: The front\n") == "0001: The front"


# ---- sections


def test_sections_have_plain_text() -> None:
    title = "Valves: open and shut"
    assert list(sections("valves", PAGE)) == [
        Section("valves", title, title, "", ("They move water.",)),
        Section(
            "valves",
            title,
            "A list, and more",
            "a-list-and-more",
            ("one link", "two", "name · what", "a \\| b · first", "# no heading", "open_valve()"),
        ),
        Section("valves", title, "Again", "again", ()),
        Section("valves", title, "Again", "again-1", ()),
    ]


def test_sections_have_the_anchors_of_the_pages(site: Path) -> None:
    for name, page in manual.pages().items():
        rendered = re.findall(r'<h[1-6] id="([^"]*)"', (site / f"{name}.html").read_text("utf-8"))
        assert [section.anchor for section in sections(name, page)] == ["", *rendered[1:]], name


def test_the_index_is_a_script_with_every_section() -> None:
    pages = manual.pages()
    script = index_script(pages)
    assert script.startswith(f"var {INDEX_VARIABLE} = ")
    index = json.loads(script.partition(" = ")[2].rstrip(";\n"))
    assert sorted(name for name, _, _ in index["pages"]) == sorted(pages)
    found = [(index["pages"][number][0], anchor) for number, anchor, _, _ in index["sections"]]
    assert found == [(section.page, section.anchor) for section in all_sections(pages)]


# ---- search


def found(query: str, *pages: Section) -> list[str]:
    return [f"{one.section.page}#{one.section.anchor}" for one in find(pages, query)]


TITLE = Section("valves", "Valves", "Valves", "", ("They move water.",))
PART = Section("valves", "Valves", "Closing", "closing", ("Turn it. close_log has lines.", "Water stays."))
OTHER = Section("pumps", "Pumps", "Pumps", "", ("A pump moves water, and no valve does.", "catalog"))


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("valve", ["valves#", "pumps#"]),
        ("VALVES", ["valves#"]),
        ("log", ["valves#closing"]),
        ("close", ["valves#closing"]),
        ("valves closing", ["valves#closing"]),
        ("water pump", ["pumps#"]),
        ("alve", []),
        ("a.", []),
        ("", []),
        ("(", []),
    ],
)
def test_what_is_found(query: str, names: list[str]) -> None:
    assert found(query, OTHER, PART, TITLE) == names


def test_found_lines_have_most_of_the_words() -> None:
    assert [one.line for one in find([OTHER], "pump water")] == ["A pump moves water, and no valve does."]
    assert [one.line for one in find([PART], "closing")] == [""]


def test_decisions_come_last() -> None:
    decision = Section("decisions/0001-valves", "Valves", "Valves", "", ("Valves are valves.",))
    assert found("valves", decision, TITLE) == ["valves#", "decisions/0001-valves#"]


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("hot restart", "hot-restart"),
        ("watermark", "pipelines"),
        ("setkeepalive", "hub-api"),
        ("connections_per_address", "settings"),
        ("nginx", "deployment"),
        ("webdav", "file-servers"),
    ],
)
def test_words_of_the_manual_lead_to_their_page(query: str, page: str) -> None:
    assert page in [one.section.page for one in find(all_sections(manual.pages()), query)][:3]


def test_near_names() -> None:
    pages = manual.pages()
    assert near_names(pages, "setings")[0] == "settings"
    assert near_names(pages, "Hub api")[0] == "hub-api"
    assert near_names(pages, "0001-http-frnt")[0] == "decisions/0001-http-front"
    assert near_names(pages, "xyzzy") == []


@pytest.mark.parametrize("word", ["a", "m", "z", "none"])
def test_excerpts_are_short_and_have_the_word(word: str) -> None:
    line = " ".join(f"{letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz" * 2)
    part = excerpt(line, word, 40)
    assert len(part) <= 40
    assert word in part or word == "none"
    assert part.strip("…").strip() in line
    assert excerpt("short", word, 40) == "short"


# ---- the command


def smqrt_help(*words: str) -> Result:
    return CliRunner().invoke(cli, ["help", *words], prog_name="smqrt")


def test_help_lists_the_pages_by_group() -> None:
    answer = smqrt_help()
    assert answer.exit_code == 0
    lines = answer.output.splitlines()
    assert lines[:2] == ["Start", "  quick-start            " + manual.title(manual.pages()["quick-start"])]
    assert "Build: Lua" in lines
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        name for group in manual.groups(manual.pages()) for name in group.names
    ]


@pytest.mark.parametrize("words", [("hot-restart",), ("hot-restart.md",), ("Hot-Restart",), ("hot", "restart")])
def test_help_prints_a_page(words: tuple[str, ...]) -> None:
    answer = smqrt_help(*words)
    assert (answer.exit_code, answer.output) == (0, manual.pages()["hot-restart"])


def test_help_searches_for_other_words() -> None:
    answer = smqrt_help("setkeepalive")
    assert answer.exit_code == 0
    assert f"hub-api: {manual.title(manual.pages()['hub-api'])}\n  setkeepalive\n" in answer.output
    assert all(len(line) <= 100 for line in answer.output.splitlines())


def test_help_reports_the_number_of_omitted_pages() -> None:
    answer = smqrt_help("the")
    assert answer.exit_code == 0
    assert re.search(r"^\d+ more pages contain 'the'", answer.output, re.MULTILINE)
    assert re.search(r"^  and \d+ more sections$", answer.output, re.MULTILINE)


def test_help_suggests_pages_for_a_misspelt_name() -> None:
    answer = smqrt_help("setings")
    assert answer.exit_code == 2
    assert "'setings'" in answer.output
    assert "Did you mean: settings" in answer.output


def test_help_suggests_pages_beside_what_it_finds() -> None:
    answer = smqrt_help("worker")
    assert (answer.exit_code, answer.output.splitlines()[0]) == (0, "Did you mean: workers?")
    assert "\nworkers: " in answer.output


def test_help_without_anything_found() -> None:
    answer = smqrt_help("xyzzy")
    assert answer.exit_code == 2
    assert "'xyzzy'" in answer.output
    assert "smqrt help" in answer.output


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# T\n\nOne. Two.", "One."),
        ("# T\n\nA [link](x.md) and `code`\nof **two** lines: yes! And", "A link and code of two lines: yes!"),
        ("# T\n\nv1.2 is out. More", "v1.2 is out."),
        ("# T\n\n```\ncode\n```\n\nText.", ""),
        ("# T\n\n    code. more\n\nText.", ""),
        ("# T\n\n\nText. More", "Text."),
        ("# T\n\n| a |\n|---|", ""),
        ("# T", ""),
        ("", ""),
        ("No heading. Yes", "No heading."),
    ],
)
def test_first_sentences(text: str, sentence: str) -> None:
    assert manual.first_sentence(text) == sentence


def test_a_long_readme_takes_no_time() -> None:
    for text in ("[" * 8192, "[a](" * 2000, "`*" * 4096, "\n\n" * 4096, ". " * 4096, "[]" * 4096):
        begin = time.process_time()
        manual.first_sentence(text)
        assert time.process_time() - begin < 0.05
