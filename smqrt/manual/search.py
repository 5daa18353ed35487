"""Search in the sections of the manual.

The pages at `/help/` and the static site search in the browser (`smqrt/rtl/manual.js`), with the same sections and
weights; `smqrt help WORD` uses this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from smqrt.manual.pages import groups, is_background, plain, title

_NOT_IN_A_SLUG = re.compile(r"[^\w\- ]")
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)(?:\s+#+)?\s*$")
_RULE_OF_TABLE = re.compile(r"\|?[\s:|-]*-[\s:|-]*")
_COMMENT = re.compile(r"<!--.*?-->")
_TITLE_WEIGHT, _HEADING_WEIGHT = 8.0, 5.0
_PART_WEIGHT = 0.5  # weight of the page's title for a section: "journal compaction" finds "Compaction" of "The journal"
_WHOLE_WORD = 2.0  # the query "log" matches the word "log" better than "logins"
_MAX_OCCURRENCES = 4  # further occurrences do not raise the score
_BACKGROUND_WEIGHT = 0.3
_NEAR = 0.7  # ratio of difflib: "setings" and "settings" have 0.93
INDEX_VARIABLE = "smqrtManual"
"""The variable that the index script defines."""


class Slugs:
    """The anchors of a page, as GitHub makes them, without duplicates."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, heading: str) -> str:
        """Return the anchor of the next heading in Markdown, such as `tls-and-more` for `## TLS, and more`."""
        slug = _NOT_IN_A_SLUG.sub("", heading.lower()).replace(" ", "-")
        count = self._counts[slug] = self._counts.get(slug, -1) + 1
        return f"{slug}-{count}" if count else slug


@dataclass(frozen=True)
class Section:
    """A heading of a page with the text up to the next heading.

    Args:
        page: name of the page.
        title: title of the page.
        heading: the heading without marks; the title for the text before the first heading.
        anchor: anchor of the heading; empty for the text before the first heading.
        lines: the text without marks; lines of a paragraph are joined, rows of tables are lines.
    """

    page: str
    title: str
    heading: str
    anchor: str
    lines: tuple[str, ...]


def sections(name: str, page: str) -> Iterator[Section]:
    """Yield the sections of a page.

    Args:
        name: of the page.
        page: its text in Markdown.
    """
    slugs, page_title = Slugs(), title(page)
    heading, anchor, lines = page_title, "", list[str]()
    fence = ""
    joins = False  # whether the next line continues the paragraph
    for line in page.splitlines():
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence, joins = "" if fence else mark[1], False
        elif fence:
            lines.append(line.strip())
        elif found := _HEADING.match(line):
            slug = slugs.add(found[2])
            if len(found[1]) > 1:
                yield Section(name, page_title, heading, anchor, tuple(filter(None, lines)))
                heading, anchor, lines = plain(found[2]), slug, []
            joins = False
        else:
            text = _text(line)
            if text and joins and not line.lstrip().startswith(("* ", "- ", "|")):
                lines[-1] += f" {text}"
            else:
                lines.append(text)
            joins = bool(text) and not line.startswith("|")
    yield Section(name, page_title, heading, anchor, tuple(filter(None, lines)))


def _text(line: str) -> str:
    """Return a line outside of code blocks without marks; a row of a table as its cells."""
    line = _COMMENT.sub("", line).strip()
    if line.startswith("|"):
        if _RULE_OF_TABLE.fullmatch(line):
            return ""
        line = " · ".join(cell.strip() for cell in line.strip("|").split(" | "))
    return plain(line).removeprefix("- ").strip()


def all_sections(pages: Mapping[str, str]) -> list[Section]:
    """Return the sections of all pages, in the order of the manual."""
    return [section for group in groups(pages) for name in group.names for section in sections(name, pages[name])]


def index_script(pages: Mapping[str, str]) -> str:
    """Return the index as a script, since pages opened from a folder may load scripts, but not fetch files.

    It sets a global variable to `{"pages": [[name, title, weight], …], "sections": [[number of the page, anchor,
    heading, text], …]}`.
    """
    names = [name for group in groups(pages) for name in group.names]
    numbers = {name: number for number, name in enumerate(names)}
    index = {
        "pages": [[name, title(pages[name]), _weight(name)] for name in names],
        "sections": [
            [numbers[section.page], section.anchor, section.heading, "\n".join(section.lines)]
            for section in all_sections(pages)
        ],
    }
    return f"var {INDEX_VARIABLE} = {json.dumps(index, ensure_ascii=False, separators=(',', ':'))};\n"


def _weight(name: str) -> float:
    return _BACKGROUND_WEIGHT if is_background(name) else 1.0


@dataclass(frozen=True)
class Found:
    """A section that matches a query.

    Args:
        section: the section.
        line: the line with the most words of the query; empty when only the headings contain them.
        score: the quality of the match.
    """

    section: Section
    line: str
    score: float


def find(found_in: Iterable[Section], query: str) -> list[Found]:
    """Return the sections that contain all words of a query, the best matches first.

    A word of the query matches the beginning of words: "log" matches "logins" and "close_log", but not "catalog". Case
    does not matter.
    """
    words = [re.compile(rf"(?<![^\W_]){re.escape(word)}(?P<end>\w)?") for word in query.lower().split()]
    scored = (_match(section, words) for section in found_in) if words else ()
    return sorted((found for found in scored if found), key=lambda found: -found.score)


def _match(section: Section, words: list[re.Pattern[str]]) -> Found | None:
    lines = [line.lower() for line in section.lines]
    text, heading = "\n".join(lines), section.heading.lower() if section.anchor else ""
    page = f"{section.title.lower()}\n{section.page}"
    title_weight = _PART_WEIGHT if section.anchor else _TITLE_WEIGHT
    score, is_here = 0.0, not section.anchor
    for word in words:
        times = min(len(word.findall(text)), _MAX_OCCURRENCES)
        own = _HEADING_WEIGHT * _points(word, heading) + times * _points(word, text) / _WHOLE_WORD
        points = own + title_weight * _points(word, page)
        if not points:
            return None
        score += points
        is_here = is_here or own > 0
    if not is_here:
        return None
    counts = [sum(bool(word.search(line)) for word in words) for line in lines]
    line = section.lines[counts.index(max(counts))] if any(counts) else ""
    return Found(section, line, score * _weight(section.page))


def _points(word: re.Pattern[str], text: str) -> float:
    """Return 0 for a text without the word, 1 for a prefix of a word, 2 for a whole word."""
    found = [match["end"] is None for match in word.finditer(text)]
    return _WHOLE_WORD if any(found) else float(bool(found))


def near_names(pages: Mapping[str, str], word: str) -> list[str]:
    """Return the names of pages with a similar spelling, the most similar first."""
    short = {name.rpartition("/")[2]: name for name in reversed(list(pages))}
    near = get_close_matches(word.lower().replace(" ", "-").rpartition("/")[2], short, n=4, cutoff=_NEAR)
    return [short[name] for name in near]


def excerpt(line: str, query: str, width: int) -> str:
    """Return the part of a line around the first word of a query, at most `width` characters."""
    if len(line) <= width:
        return line
    places = [place for word in query.lower().split() if (place := line.lower().find(word)) >= 0]
    begin = min(max(0, min(places, default=0) - width // 3), len(line) - width + 1)
    if begin:
        begin = line.find(" ", begin) + 1 or begin
    part, rest = line[begin : begin + width - 2], line[begin + width - 2 :]
    if rest:
        part = part.rpartition(" ")[0] or part
    return ("…" if begin else "") + part.strip() + ("…" if rest else "")
