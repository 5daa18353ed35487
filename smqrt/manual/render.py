"""HTML of manual pages, for a server and as a static site.

The import of this module takes as long as rendering ten pages, so other modules import it when they render a page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexer import bygroups, inherit, using
from pygments.lexers import get_lexer_by_name
from pygments.lexers.html import HtmlLexer
from pygments.lexers.scripting import LuaLexer
from pygments.token import Comment
from pygments.util import ClassNotFound

from smqrt.manual import pages as manual
from smqrt.manual.pages import Slugs, index_script

_LONG_PAGE = 4  # headings; pages with fewer have no contents list
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="{assets}page.css">
<link rel="stylesheet" href="{assets}manual.css">
<script src="{assets}manual.js" defer></script>
</head>
<body class="manual">
<header>
<h1><a href="{home}">smqrt manual</a></h1>
<form class="search" role="search" data-pages="{pages}" data-suffix="{suffix}" data-index="{index}" hidden>
<input type="search" name="q" placeholder="Search" aria-label="Search the manual" autocomplete="off">
<div class="results" hidden></div>
</form>
<p>{links}</p>
</header>
{body}
</body>
</html>
"""
_COLUMNS = """<div class="columns">
<main>
{body}
</main>
<nav id="all-pages" aria-label="Pages of the manual">
{navigation}
</nav>
</div>"""


@dataclass(frozen=True)
class Site:
    """URLs within a site, as they appear in a page.

    Args:
        pages: the prefix of the name of a page.
        suffix: the suffix of the name of a page.
        assets: the folder of styles and scripts.
        home: the page with the list of pages.
        index: the script with the search index.
        links: HTML of further links in the header.
    """

    pages: str
    suffix: str
    assets: str
    home: str
    index: str
    links: str = ""


class _LspLexer(HtmlLexer):  # type: ignore[misc]  # Pygments has no types
    """Lua Server Pages: HTML with Lua between `<?lsp` and `?>`."""

    tokens = {"root": [(r"(<\?lsp=?)(.*?)(\?>)", bygroups(Comment.Preproc, using(LuaLexer), Comment.Preproc)), inherit]}


def render_page(pages: Mapping[str, str], name: str, site: Site) -> str:
    """Return a page of the manual as an HTML document.

    Args:
        pages: all pages, from `pages()`.
        name: the name of the page; empty for the list of all pages.
        site: the URLs of the site.
    """
    if name:
        body = _COLUMNS.format(body=to_html(pages[name], site.suffix), navigation=_navigation(pages, name, site))
        links = f'<a class="to-pages" href="#all-pages">Pages</a> {site.links}'
    else:
        body = f'<main class="parts">\n{_list_of_pages(pages, site)}\n</main>'
        links = site.links
    return _PAGE.format(
        title=f"{escape(manual.title(pages[name]) if name else 'Manual')} · smqrt",
        body=body,
        links=links.strip(),
        **{key: escape(getattr(site, key)) for key in ("pages", "suffix", "assets", "home", "index")},
    )


_GENERATED_MARK = re.compile(r"^<!-- (?:\w+: made by scripts/fix|end of \w+) -->\n", re.MULTILINE)
"""The comments around tables that `scripts/fix` writes. They are removed first, because raw HTML is shown as text."""


def to_html(text: str, suffix: str = "") -> str:
    """Return the HTML of a page in Markdown (CommonMark with tables).

    Raw HTML is escaped. All headings have anchors, and long pages have a contents list.

    Args:
        text: the page.
        suffix: replaces ".md" in links to pages.
    """
    markdown = MarkdownIt("commonmark", {"html": False, "highlight": _highlighted}).enable("table")
    tokens = markdown.parse(_GENERATED_MARK.sub("", text))
    slugs, headings = Slugs(), list[tuple[int, str, str]]()
    for at, token in enumerate(tokens):
        if token.type in ("th_open", "td_open"):
            _prepare_cell(*tokens[at : at + 3])
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            anchor = slugs.add(following.content)
            token.attrSet("id", anchor)
            if token.tag in ("h2", "h3"):
                headings.append((int(token.tag[1]), anchor, manual.plain(following.content)))
                # A link for the mouse. Keyboards and screen readers use the contents list.
                fields = {"class": "anchor", "href": f"#{anchor}", "aria-hidden": "true", "tabindex": "-1"}
                opening = Token("link_open", "a", 1, attrs=dict(fields))
                link = [opening, Token("text", "", 0, content="#"), Token("link_close", "a", -1)]
                following.children = [*(following.children or ()), *link]
        for child in token.children or ():
            _rewrite_link(child, suffix)
    # The element around a table scrolls, so that the page does not become wider than the screen.
    markdown.add_render_rule("code_inline", _inline_code)
    markdown.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
    after_title = 3 if tokens and tokens[0].tag == "h1" else 0  # a heading has three tokens
    before, rest = tokens[:after_title], tokens[after_title:]
    contents = _contents(headings) if len(headings) >= _LONG_PAGE else ""
    render = markdown.renderer.render
    return f"{render(before, markdown.options, {})}{contents}{render(rest, markdown.options, {})}"


def _contents(headings: list[tuple[int, str, str]]) -> str:
    items = "".join(
        f'<li class="level-{level}"><a href="#{anchor}">{escape(heading)}</a></li>'
        for level, anchor, heading in headings
    )
    return (
        '<details class="contents"><summary>On this page</summary>'
        f'<nav aria-label="On this page"><ul>{items}</ul></nav></details>\n'
    )


_FORMATTER = HtmlFormatter(nowrap=True)


def _highlighted(code: str, language: str, attributes: str) -> str:
    """Return the HTML of a code block; empty when Pygments does not support its language."""
    if language == "html" and "<?lsp" in code:
        lexer = _LspLexer(stripnl=False)
    else:
        try:
            lexer = get_lexer_by_name(language, stripnl=False)
        except ClassNotFound:  # also for blocks without a language
            return ""
    return str(highlight(code, lexer, _FORMATTER))


_LONG_CELL = 45  # characters; a column with a longer text gets some width
_SEPARATORS = re.compile(r"(::|[_/.,:=]+)(?=[^\s_/.,:=]{3})")


def _prepare_cell(opening: Token, content: Token, closing: Token) -> None:
    """Give columns of text their width, and let long names of code break after separators."""
    if opening.type == "th_open" and not content.content:
        opening.tag = closing.tag = "td"  # the corner of a table, which is no heading
    parts = content.children or ()
    if sum(len(part.content) for part in parts if part.type == "text") > _LONG_CELL:
        opening.attrSet("class", "text")
    for part in parts:
        part.meta["is_in_cell"] = True
        if part.type == "text" and part.content.strip() == "<br>":  # other HTML is shown as text
            part.type, part.tag = "hardbreak", "br"


def _inline_code(renderer: object, tokens: Sequence[Token], index: int, *_: object) -> str:
    code = escape(tokens[index].content)
    if tokens[index].meta.get("is_in_cell"):
        code = _SEPARATORS.sub(r"\1<wbr>", code)
    return f"<code>{code}</code>"


def _rewrite_link(token: Token, suffix: str) -> None:
    """Change the target of a link from the Markdown file to the page."""
    href = str(token.attrGet("href") or "") if token.type == "link_open" else ""
    page, mark, anchor = href.partition("#")
    if "://" in href:
        token.attrSet("rel", "noopener noreferrer")
    elif page.endswith(".md"):
        token.attrSet("href", page.removesuffix(".md") + suffix + mark + anchor)


def _list_of_pages(pages: Mapping[str, str], site: Site) -> str:
    lines, part = ["<h1>Manual</h1>"], ""
    for group in manual.groups(pages):
        if group.part != part:
            lines += ["</section>"] * bool(part) + [f'<section class="part"><h2>{escape(group.part)}</h2>']
            part = group.part
        own = [name for name in group.names if "/" not in name]
        inner = [name for name in group.names if "/" in name]
        entries = "\n".join(f"<dt>{_link(pages, name, site)}</dt><dd>{_summary(pages[name])}</dd>" for name in own)
        title = f"<h3>{escape(group.title)}</h3>\n" if group.title else ""
        listed = f"<dl>\n{entries}\n</dl>" if own else ""
        if inner:
            items = "\n".join(f"<li>{_link(pages, name, site)}</li>" for name in inner)
            listed += f"<details><summary>All {len(inner)} pages</summary>\n<ul>\n{items}\n</ul></details>"
        lines.append(f'<div class="group">{title}{listed}</div>')
    return "\n".join([*lines, "</section>"])


def _summary(page: str) -> str:
    text = manual.title(page).partition(": ")[2] or manual.first_sentence(page).rstrip(":")
    return escape(text[:1].upper() + text[1:])


def _navigation(pages: Mapping[str, str], current: str, site: Site) -> str:
    """Return the list of pages beside a page, with its part opened.

    Pages of a folder are listed only beside pages of that folder.
    """
    parts: dict[str, list[str]] = {}
    is_open: set[str] = set()
    for group in manual.groups(pages):
        inside = current in group.names
        names = [name for name in group.names if "/" not in name or inside]
        items = "".join(f"<li>{_link(pages, name, site, name == current)}</li>" for name in names)
        title = f"<h2>{escape(group.title)}</h2>" if group.title else ""
        if names:
            parts.setdefault(group.part, []).append(f"{title}<ul>{items}</ul>")
        if inside:
            is_open.add(group.part)
    return "\n".join(
        f"<details{' open' * (part in is_open)}><summary>{escape(part)}</summary>{''.join(lists)}</details>"
        for part, lists in parts.items()
    )


def _link(pages: Mapping[str, str], name: str, site: Site, is_current: bool = False) -> str:
    mark = ' aria-current="page"' if is_current else ""
    return f'<a href="{escape(site.pages + name + site.suffix)}"{mark}>{escape(manual.short_title(pages[name]))}</a>'


# ---- The manual as a static site, for a folder or any web server.
#
# Links are relative, so the site works under any path. `scripts/docs FOLDER` runs this module.

_ASSETS = ("page.css", "manual.css", "manual.js")
_HOME, _INDEX, _FOLDER = "index.html", "search-index.js", "assets/"


def write_site(folder: Path) -> int:
    """Write the manual into a folder, and return the number of its pages.

    Existing files with the same names are replaced.

    Args:
        folder: the folder, created when it does not exist.

    Raises:
        OSError: a file can't be written.
    """
    pages = manual.pages()
    for name in ("", *pages):
        path = folder / (f"{name}.html" if name else _HOME)
        path.parent.mkdir(parents=True, exist_ok=True)
        root = "../" * name.count("/")  # the folder of the site, relative to the page
        site = Site(root, ".html", root + _FOLDER, root + _HOME, root + _FOLDER + _INDEX)
        path.write_text(render_page(pages, name, site), "utf-8")
    assets = folder / _FOLDER
    assets.mkdir(exist_ok=True)
    for name in _ASSETS:
        (assets / name).write_bytes((resources.files("smqrt") / "rtl" / name).read_bytes())
    (assets / _INDEX).write_text(index_script(pages), "utf-8")
    return len(pages)


def main(arguments: list[str]) -> None:
    """Write the site into the folder of the arguments, by default `build/manual`."""
    if len(arguments) > 1 or any(word.startswith("-") for word in arguments):
        sys.exit("Usage: scripts/docs [FOLDER]")
    folder = Path(arguments[0] if arguments else "build/manual")
    try:
        count = write_site(folder)
    except OSError as error:
        sys.exit(f"Cannot write {folder}: {error.strerror}.")
    print(f"{count} pages: {folder / _HOME}")


if __name__ == "__main__":
    main(sys.argv[1:])
