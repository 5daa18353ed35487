"""Lua Server Pages: page text in, Lua source out, every line where it was (spec: bas-api §1)."""

from __future__ import annotations

import re

PROLOGUE = b"local _ENV,pathname,io,page,app=...;"
"""What a page begins with: the five values a compiled page is called with become its locals."""

_NEWLINE = re.compile(rb"\r\n|\n\r|\r")
_START_TAG = re.compile(rb"<\?lsp(?![A-Za-z0-9_])(=?)")
_ANY_TAG = re.compile(rb"<\?|\?>")
_UNSAFE = re.compile(rb'["\\\n\0]')
_ESCAPES = {b'"': b'\\"', b"\\": b"\\\\", b"\n": b"\\\n", b"\0": b"\\x00"}
_LUA_TOKEN = re.compile(
    rb"""--\[(=*)\[.*?\]\1\]|(?P<comment>--[^\n]*)|\[(=*)\[.*?\]\3\]|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|.""", re.S
)


class LspError(ValueError):
    """A page that can't be turned into Lua; the text names the line."""


def to_lua(text: bytes, raw: bool = False) -> bytes:
    """Return the Lua source of a page.

    text: the page as it lies in its file. raw: leave out the five-argument prologue.
    Line n of the source is line n of the page. Raises LspError for a start tag that nothing ends.
    Source: spec bas-api §1.
    """
    text = _NEWLINE.sub(b"\n", text)
    parts = [] if raw else [PROLOGUE]
    position = 0
    while (tag := _START_TAG.search(text, position)) is not None:
        parts.append(_emission(text[position : tag.start()]))
        end = _end_of_tag(text, tag.end(), tag.start())
        parts.append(_code(text[tag.end() : end], tag.group(1) == b"="))
        position = end + 2
    rest = text[position:]
    if rest.strip():
        parts.append(_emission(rest))
    return b"".join(parts)


def _end_of_tag(text: bytes, position: int, start: int) -> int:
    """Find the tag's own end, passing over `<?xml ?>` and the like inside the Lua text."""
    depth = 1
    for mark in _ANY_TAG.finditer(text, position):
        depth += 1 if mark.group() == b"<?" else -1
        if depth == 0:
            return mark.start()
    line = text.count(b"\n", 0, start) + 1
    raise LspError(f"start tag without end tag at line# {line}")


def _emission(text: bytes) -> bytes:
    """Call the environment's _emit; the newline right behind a tag is swallowed as by a Lua long string."""
    lead = b" "
    if text.startswith(b"\n"):
        lead, text = b"\n", text[1:]
    if not text:
        return lead
    return lead + b'_emit"' + _UNSAFE.sub(lambda match: _ESCAPES[match.group()], text) + b'";'


def _code(code: bytes, is_expression: bool) -> bytes:
    code = _without_last_comment(code)
    return b"_emit(tostring(" + code + b"));" if is_expression else code


def _without_last_comment(code: bytes) -> bytes:
    """Cut a comment that would run on into what follows the tag on the same line."""
    if b"--" not in code[code.rfind(b"\n") + 1 :]:
        return code
    *_, last = _LUA_TOKEN.finditer(code)
    return code[: last.start()] if last.group("comment") else code
