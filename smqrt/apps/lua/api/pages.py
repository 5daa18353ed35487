"""Lua Server Pages of one resource reader: compiled when first asked for, again when changed (spec: runtime §4)."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Hashable

from smqrt.apps.lua.api.exchange import Exchanges
from smqrt.apps.lua.bridge import LuaError, LuaResult, fail, utf8
from smqrt.apps.lua.vm import Vm
from smqrt.http.blocking_io import call_blocking_unless_local
from smqrt.http.message import Request
from smqrt.http.resources import Io, IoError, Stat
from smqrt.http.tree import ResourceReader

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
    (spec: bas-api §1)
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


MAX_PAGE_BYTES = 16 << 20
DEFAULT_TYPE = "text/html; charset=utf-8"


class Compiler:
    """Makes Lua functions of pages; they stay on the Lua side, by reader and name."""

    def __init__(self, vm: Vm) -> None:
        self._vm = vm
        self._ref = 0

    def attach(self, ref: int) -> None:
        """Take the reference of the Lua function that compiles."""
        self._ref = ref

    def compile(self, reader: int, pathname: bytes, text: bytes) -> None:
        """Make the page `pathname` of the reader with this handle from its text.

        Raises LspError or LuaError, which name the page or its line.
        """
        done, *message = self._vm.run(self._ref, reader, pathname, to_lua(text))
        if not done:
            raise LuaError(message[0])


class Pages:
    """What a resource reader calls for `*.lsp` (`ResourceReader.pages`).

    Args:
        exchanges: runs the compiled pages.
        compiler: makes them.
        reader: the reader's handle.
    """

    def __init__(self, exchanges: Exchanges, compiler: Compiler, reader: int) -> None:
        self._exchanges = exchanges
        self._compiler = compiler
        self._reader = reader
        self._compiled: dict[str, tuple[Hashable, bytes, str]] = {}  # version, name and folder by name

    def __call__(self, request: Request, found: Stat, name: str, directory: ResourceReader) -> None:
        """Answer with the page `name`; `found`: its present state."""
        page = self._compiled.get(name)
        if page is None or page[0] != found.version:
            try:
                page = self._compile(directory.io, name)
            except LuaError as error:
                self._exchanges.fail(request, error)
                return
        headers = request.response.headers
        if "content-type" not in headers and not request.response.committed:
            headers.set("Content-Type", DEFAULT_TYPE)
        self._exchanges.page(request, self._reader, page[1], (directory, page[2]))

    def _compile(self, io: Io, name: str) -> tuple[Hashable, bytes, str]:
        self._compiled.pop(name, None)
        pathname = utf8(name)
        try:
            stat, text = call_blocking_unless_local(io, name, io.read_published, name, MAX_PAGE_BYTES)
            self._compiler.compile(self._reader, pathname, text.removeprefix(BOM_UTF8))
        except (IoError, LspError) as error:
            raise LuaError(f"{name}: {error}") from None
        page = self._compiled[name] = stat.version, pathname, name[: name.rfind("/") + 1]
        return page


def parse(text: bytes, raw: bool) -> LuaResult:
    """The Lua source of a page's text, for `ba.parselsp`."""
    try:
        return to_lua(text, raw)
    except LspError as error:
        return fail(str(error))


def install_pages(vm: Vm) -> Compiler:
    """Give Lua `ba.parselsp`; return what compiles pages."""
    compiler = Compiler(vm)
    vm.namespace("ba.pages", {"parse": parse, "attach": compiler.attach})
    return compiler
