"""References lead somewhere: to sections of the specification, pages and decisions of the manual, and files.

One form each, in code, comments and documents: `spec: bas-api §7, §8.1, runtime §6`, `help: identity`, `decision 0033`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

HELP = REPOSITORY / "smqrt" / "help"
SPECIFICATION = HELP / "specification"
SUFFIXES = {".py", ".lua", ".lsp", ".js", ".md", ".toml", ".cfg", ""}  # "": .preload, and the scripts

SECTION = r"§\d+(?:\.\d+)*[a-z]?\b(?: [A-Z]\d+)?"
PAGE = r"\b(?!and |to )[a-z][a-z-]*(?:\.md)?"
ITEM = rf"(?:{PAGE} )?{SECTION}"
LIST = rf"{ITEM}(?:(?:, | and | to ){ITEM}| to [A-Z]\d+)*"
SPEC = re.compile(rf"\bspec: ({LIST})")
PARTS = re.compile(rf"({PAGE}) (?=§)|(§\d+(?:\.\d+)*[a-z]?\b)|\b([A-Z]\d+)\b")
OTHER_FORMS = {
    " §": r"\b(?!and |to |in |by |of )[a-z][a-z-]*(?:\.md)? §\d",  # a document without "spec:"
    "pec": r"\b[Ss]pec(?:ification)?:? (?:smq|bas-api|runtime)\b(?:\.md)?",  # no section, or another spelling
    "design": r"\(design: [a-z]|\bdesign of the [a-z]+ §",
    "shared/": r"[./]*\bshared/(?:spec|design)\b",
}
"""What must be in a text, which is quick to find out, and what is searched there."""
HELP_PAGE = re.compile(r"\((?:[\w ]+; )?help: ([a-z0-9/-]+(?:, (?!decision)[a-z0-9/-]+)*)")
HELP_FILE = re.compile(r"\bhelp/([a-z0-9/-]+\.md)\b")
DECISION = re.compile(r"\b[Dd]ecisions?[ /](\d{4})\b")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def files() -> list[Path]:
    """Return the files whose references are followed."""
    found = list(REPOSITORY.glob("*"))
    for folder in ("smqrt", "tests", "app_preload", "scripts"):
        found += (REPOSITORY / folder).rglob("*")
    found = [path.resolve() for path in found if path.is_file() and path.suffix in SUFFIXES]
    return sorted(path for path in set(found) if path != Path(__file__) and "__pycache__" not in path.parts)


@cache
def texts() -> dict[str, str]:
    """Return the text of each file by its name, with references that span lines on one line."""
    found = {}
    for path in files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found[str(path.relative_to(REPOSITORY))] = re.sub(r"\s*\n\s*(?:(?:#|--|//|\*)\s+)?", " ", text)
    return found


@cache
def sections(page: str) -> frozenset[str]:
    """Return the numbers of a page's headings, such as "§8.2" or "A4"; empty when there is no such page."""
    path = SPECIFICATION / f"{page}.md"
    if not path.is_file():
        return frozenset()
    headings = re.findall(r"^#+ (?:(\d[\d.]*[a-z]?)\.? |([A-Z]\d+) )", path.read_text("utf-8"), re.MULTILINE)
    return frozenset(f"§{number.rstrip('.')}" if number else label for number, label in headings)


def cited(reference: str) -> Iterator[tuple[str, str]]:
    """Yield page and section of each item of a reference, such as ("bas-api", "§8.1")."""
    page = ""
    for named, number, label in PARTS.findall(reference):
        page = named or page
        if number or label:
            yield page, number or label


def specified(text: str) -> list[str]:
    """Return the references to the specification; most texts have none, which is known without the search."""
    return SPEC.findall(text) if "spec: " in text else []


def broken(text: str) -> list[str]:
    """Return what is wrong with the references to the specification in a text."""
    references = specified(text)
    wrong = [
        f"no section {section} of {page!r}: {reference}"
        for reference in references
        for page, section in cited(reference)
        if section not in sections(page)
    ]
    rest = SPEC.sub("", text) if references else text
    forms = [form for word, form in OTHER_FORMS.items() if word in rest]
    return wrong + [f"not the form of references: {other}" for form in forms for other in re.findall(form, rest)]


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip("# ").lower()).replace(" ", "-")


def test_sections_that_are_cited_exist() -> None:
    wrong = {name: found for name, text in texts().items() if (found := broken(text))}
    assert wrong == {}
    assert sum(len(specified(text)) for text in texts().values()) > 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(spec: bas-api §8.9)", "no section §8.9 of 'bas-api'"),
        ("(spec: bas-api §5, §77)", "no section §77 of 'bas-api'"),
        ("(spec: bas-api §5, runtime §99)", "no section §99 of 'runtime'"),
        ("(spec: bas-api §17 A1 to A9)", "no section A9 of 'bas-api'"),
        ("(spec: smq §2.3 to §2.9)", "no section §2.9 of 'smq'"),
        ("(spec: lua §4)", "no section §4 of 'lua'"),
        ("(spec: smq.md §2)", "no section §2 of 'smq.md'"),
        ("(specification: smq.md §2)", "not the form"),
        ("(smq §2)", "not the form"),
        ("(spec: bas-api 4)", "not the form"),
        ("(design: reliability)", "not the form"),
    ],
)
def test_a_broken_reference_is_found(text: str, message: str) -> None:
    assert any(found.startswith(message) for found in broken(text)), broken(text)


def test_references_in_all_forms_are_read() -> None:
    text = "spec: bas-api §7, §8.1, runtime §6 and §7, smq §6a, bas-api §17 A1 to A5"
    assert broken(text) == []
    assert list(cited(SPEC.findall(text)[0])) == [
        *(("bas-api", "§7"), ("bas-api", "§8.1"), ("runtime", "§6"), ("runtime", "§7"), ("smq", "§6a")),
        *(("bas-api", "§17"), ("bas-api", "A1"), ("bas-api", "A5")),
    ]


def test_section_numbers_are_unique() -> None:
    for path in SPECIFICATION.glob("*.md"):
        numbers = re.findall(r"^#+ (\d[\d.]*[a-z]?|[A-Z]\d+)\b", path.read_text("utf-8"), re.MULTILINE)
        assert len(numbers) == len(set(numbers)) > 10, path.name


def test_pages_and_decisions_that_are_named_exist() -> None:
    decisions = {path.name[:4] for path in (HELP / "decisions").glob("*.md")}
    wrong, count = [], 0
    for name, text in texts().items():
        pages = [page for names in HELP_PAGE.findall(text) for page in names.split(", ")]
        if "help/" in text:
            pages += [page.removesuffix(".md") for page in HELP_FILE.findall(text)]
        wrong += [f"{name}: no page {page}" for page in pages if not (HELP / f"{page}.md").is_file()]
        if "ecision" in text:
            wrong += [f"{name}: no decision {one}" for one in DECISION.findall(text) if one not in decisions]
        count += len(pages)
    assert wrong == []
    assert count > 80


def headings(page: Path) -> set[str]:
    return set(map(anchor, re.findall(r"^#+ .*$", page.read_text("utf-8"), re.MULTILINE)))


def test_links_of_all_documents_lead_somewhere() -> None:
    wrong = []
    for path in files():
        if path.suffix != ".md":
            continue
        for target, fragment in LINK.findall(re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)):
            file = (path.parent / target).resolve()
            if not file.exists() or (fragment and fragment[1:] not in headings(file)):
                wrong.append(f"{path.relative_to(REPOSITORY)}: {target}{fragment}")
    assert wrong == []


IMPORT = re.compile(r"from (smqrt[\w.]*) import (\w+(?:, *\w+)*)")


def test_imports_of_scripts_exist() -> None:
    """Scripts are shell, or run by hand: nothing else notices that a module of theirs has moved."""
    missing = []
    for name, text in texts().items():
        if name.startswith("scripts"):
            for module, names in IMPORT.findall(text):
                imported = import_module(module)
                for one in re.findall(r"\w+", names):
                    if not hasattr(imported, one) and find_spec(f"{module}.{one}") is None:
                        missing.append(f"{name}: {module}.{one}")
    assert not missing


def test_modules_in_the_table_of_former_names_exist() -> None:
    table = (REPOSITORY / "smqrt/help/decisions/0041-tree.md").read_text("utf-8")
    present = re.findall(r"`\w+` → `([\w.]+)`", table)
    assert present
    assert [name for name in present if find_spec(f"smqrt.{name}") is None] == []
