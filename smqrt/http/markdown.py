"""Markdown as HTML, for the manual: no raw HTML passes, headings have anchors, links lead to other pages."""

from __future__ import annotations

import re
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

_NO_SLUG = re.compile(r"[^\w\- ]")


def to_html(text: str) -> str:
    """Returns the HTML of a page in Markdown (CommonMark with tables)."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    slugs: dict[str, int] = {}
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            token.attrSet("id", _unused(slug(following.content), slugs))
        for child in token.children or ():
            _lead_on(child)
    return str(markdown.renderer.render(tokens, markdown.options, _ENVIRONMENT))


_ENVIRONMENT: Any = {}


def slug(heading: str) -> str:
    """Returns the anchor of a heading, the same as on GitHub: `## TLS, and more` is `tls-and-more`."""
    return _NO_SLUG.sub("", heading.lower()).replace(" ", "-")


def _unused(name: str, slugs: dict[str, int]) -> str:
    count = slugs[name] = slugs.get(name, -1) + 1
    return f"{name}-{count}" if count else name


def _lead_on(token: Token) -> None:
    """Have a link lead to the page, and not to its source."""
    href = str(token.attrGet("href") or "") if token.type == "link_open" else ""
    page, mark, anchor = href.partition("#")
    if "://" in href:
        token.attrSet("rel", "noopener noreferrer")
    elif page.endswith(".md"):
        token.attrSet("href", page.removesuffix(".md") + mark + anchor)
