"""Pages of the manual as HTML: contents lists, highlighted code, wide tables; the static site."""

from __future__ import annotations

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from smqrt.manual import pages as manual
from smqrt.manual.pages import Slugs
from smqrt.manual.render import main, to_html, write_site
from tests.conftest import REPOSITORY

LONG = "# Title\n\nText.\n\n## One & `two`\n\n### Deep\n\n## Three\n\n#### No entry\n\n## Four\n"


def test_long_pages_have_a_contents_list_below_their_title() -> None:
    html = to_html(LONG)
    assert html.index("</h1>") < html.index('<details class="contents">') < html.index("<p>Text.")
    assert re.findall(r'<li class="level-(\d)"><a href="#([^"]*)">([^<]*)<', html) == [
        ("2", "one--two", "One &amp; two"),
        ("3", "deep", "Deep"),
        ("2", "three", "Three"),
        ("2", "four", "Four"),
    ]


def test_short_pages_have_no_contents_list() -> None:
    assert "contents" not in to_html("# Title\n\n## One\n\n## Two\n\n## Three\n")


def test_headings_link_to_themselves() -> None:
    assert '<h2 id="a-b">A b<a class="anchor" href="#a-b" aria-hidden="true" tabindex="-1">#</a></h2>' in to_html(
        "# T\n\n## A b\n"
    )


@pytest.mark.parametrize(
    ("language", "code", "marked"),
    [
        ("lua", "local x = 1", '<span class="kd">local</span>'),
        ("python", "def f(): pass", '<span class="k">def</span>'),
        ("console", "$ ls", '<span class="gp">$ </span>'),
        ("sh", "echo $HOME", '<span class="nb">echo</span>'),
        ("toml", "a = 1", '<span class="mi">1</span>'),
        ("ini", "a = 1", '<span class="na">a</span>'),
        ("json", '{"a": 1}', '<span class="mi">1</span>'),
        ("js", "const a = 1", '<span class="kd">const</span>'),
        ("sql", "SELECT 1", '<span class="k">SELECT</span>'),
        ("html", "<b>x</b>", '<span class="nt">b</span>'),
        ("html", "<p><?lsp= local x ?></p>", '<span class="kd">local</span>'),
    ],
)
def test_code_is_highlighted(language: str, code: str, marked: str) -> None:
    html = to_html(f"```{language}\n{code}\n```\n")
    assert marked in html
    assert f'<code class="language-{language}">' in html


@pytest.mark.parametrize("language", ["", "text", "nosuchlanguage"])
def test_other_code_stays_as_it_is(language: str) -> None:
    assert "a &lt;b&gt;\n</code></pre>" in to_html(f"```{language}\n\na <b>\n```\n")


def test_tables_scroll_in_a_box_of_their_own() -> None:
    assert to_html("| a |\n|---|\n| b |\n").startswith('<div class="wide"><table>')


def test_cells_of_tables() -> None:
    """Columns of text get some width, long names break after separators, and the corner of a table is no heading."""
    html = to_html(
        f"| | `a_b` |\n|---|---|\n| `limits.queue_bytes` `idle_s` | {'word ' * 12}`a`<br>`b` |\n\n`queue_bytes`\n"
    )
    assert "<td></td>" in html
    assert "<code>limits.<wbr>queue_<wbr>bytes</code> <code>idle_s</code>" in html
    assert '<td class="text">word' in html
    assert "<code>a</code><br />" in html
    assert "<code>queue_bytes</code>" in html


class Text(HTMLParser):
    """The text of blocks of code, and what a page refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.code: list[str] = []
        self.references: list[str] = []
        self.anchors: set[str] = set()
        self._inside = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        self.references += [fields[key] or "" for key in ("href", "src", "data-index") if key in fields]
        self.anchors.add(fields.get("id") or "")
        if tag == "pre":
            self._inside = True
            self.code.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.code[-1] += data


# ---- the static site


@pytest.fixture(scope="module")
def documents(site: Path) -> dict[Path, Text]:
    """Every page of the site, read once."""
    return {path: Text(path.read_text("utf-8")) for path in site.rglob("*.html")}


def test_code_keeps_its_text(site: Path, documents: dict[Path, Text]) -> None:
    for name, page in manual.pages().items():
        blocks = re.findall(r"^```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        shown = documents[site / f"{name}.html"].code
        assert [block for block in blocks if block not in shown] == [], name


def test_every_link_of_the_site_is_relative_and_valid(site: Path, documents: dict[Path, Text]) -> None:
    assert len(documents) == len(manual.pages()) + 1
    lost = []
    for path, document in documents.items():
        for reference in document.references:
            if "://" in reference or reference.startswith("data:"):
                continue
            target, _, anchor = reference.partition("#")
            file = Path(os.path.normpath(path.parent / target)) if target else path
            is_there = file.is_file() and site in file.parents and not target.startswith("/")
            if not is_there or (anchor and unquote(anchor) not in documents[file].anchors):
                lost.append((str(path), reference))
    assert lost == []


def test_the_index_of_the_site_leads_to_every_page(site: Path) -> None:
    linked = {link for link in Text((site / "index.html").read_text("utf-8")).references if "assets" not in link}
    assert linked >= {f"{name}.html" for name in manual.pages()}


def test_the_site_is_written_anew_over_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"settings": manual.pages()["settings"]}
    monkeypatch.setattr(manual, "pages", lambda: settings)
    assert write_site(tmp_path) == 1
    written = (tmp_path / "settings.html").read_text("utf-8")
    (tmp_path / "settings.html").write_text("old" + written + "longer than the new one")
    (tmp_path / "mine.txt").write_text("mine")
    write_site(tmp_path)
    assert (tmp_path / "settings.html").read_text("utf-8") == written
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_the_command_reports_faults(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="Cannot write"):
        main([str(tmp_path / "file" / "site")])
    for words in (["--nonsense"], ["a", "b"]):
        with pytest.raises(SystemExit, match=r"Usage: scripts/docs \[FOLDER\]"):
            main(words)


def test_the_script_resolves_folders_from_the_working_directory(tmp_path: Path) -> None:
    """`scripts/docs site`, with the part of the script that finds the folder and a Python that shows its arguments."""
    script = (REPOSITORY / "scripts/docs").read_text("utf-8")
    assert os.access(REPOSITORY / "scripts/docs", os.X_OK)
    shown = re.sub(r"^\. .*$|^python_env$", "", script, flags=re.MULTILINE).replace("exec .venv/bin/python", "echo")
    answer = subprocess.run(
        ["bash", "-c", shown, "docs", "site"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["-m", "smqrt.manual.render", str(tmp_path / "site")]


def test_marks_of_generated_tables_are_not_shown() -> None:
    page = "# A\n\n<!-- settings: made by scripts/fix -->\n| a |\n|---|\n| b |\n<!-- end of settings -->\n"
    assert "<!--" not in (html := to_html(page))
    assert "scripts/fix" not in html
    assert "<td>b</td>" in html


def test_no_html_and_no_scripts_pass() -> None:
    html = to_html("<script>alert(1)</script>\n\n<img src=x onerror=alert(1)>\n\n[x](javascript:alert(1)) `<b>`")
    assert not re.search("<script|<img|<b>", html)
    assert 'href="javascript' not in html


def test_anchors() -> None:
    assert Slugs().add("TLS, and `more`") == "tls-and-more"
    assert re.findall('id="([^"]*)"', to_html("# A b\n## A b\n### `c_d`-e")) == ["a-b", "a-b-1", "c_d-e"]


def test_links_lose_their_ending_and_others_stay() -> None:
    html = to_html("[a](b.md#c) [d](https://example.com/x.md) [e](#f)")
    assert re.findall('href="([^"]*)"', html) == ["b#c", "https://example.com/x.md", "#f"]
    assert html.count("noopener") == 1
