"""Lua Server Pages of one resource reader: compiled when first asked for, again when changed (spec: runtime §4)."""

from __future__ import annotations

from collections.abc import Hashable

from smqrt.http.message import Request
from smqrt.http.resources import Io, IoError, Stat
from smqrt.http.tree import ResourceReader
from smqrt.lua.api.exchange import Exchanges
from smqrt.lua.api.text import utf8
from smqrt.lua.bridge import LuaError, fail
from smqrt.lua.lsp import LspError, to_lua
from smqrt.lua.vm import Vm

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
            stat, text = io.read_published(name, MAX_PAGE_BYTES)
            self._compiler.compile(self._reader, pathname, text)
        except (IoError, LspError) as error:
            raise LuaError(f"{name}: {error}") from None
        page = self._compiled[name] = stat.version, pathname, name[: name.rfind("/") + 1]
        return page


def parse(text: bytes, raw: bool) -> object:
    """The Lua source of a page's text, for `ba.parselsp`."""
    try:
        return to_lua(text, raw)
    except LspError as error:
        return fail(str(error))


def install(vm: Vm) -> Compiler:
    """Give Lua `ba.parselsp`; return what compiles pages."""
    compiler = Compiler(vm)
    vm.namespace("ba.pages", {"parse": parse, "attach": compiler.attach})
    return compiler
