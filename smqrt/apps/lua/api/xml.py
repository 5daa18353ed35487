"""XML for Lua: `require "xparser"`, on expat with the rules of defusedxml (spec: bas-api §13).

No entities or attributes are declared and none are fetched, and names are short, so that nothing in a document is much
larger than the document itself. What a chunk holds goes to Lua as one text of packed events, in their order:

    "S" name, count of attributes, name and value of each    "E" name    "T" text
    "C" comment                                              "P" target, data
"""

from __future__ import annotations

import itertools
from struct import pack
from typing import NoReturn
from xml.parsers import expat

from smqrt.apps.lua.bridge import LuaValues, fail, methods
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import SmqrtError

DOCUMENT_BYTES = 16 << 20
TOKEN_BYTES = 256 << 10  # a tag with its attributes, a comment; expat looks at it anew with every chunk
MAX_DEPTH = 200
MAX_ATTRIBUTES = 1000
MAX_NAME = 1000  # characters, with the URI of a namespace, which each element repeats
SLICE_BYTES = 8 << 10  # 2,000 empty elements: some milliseconds
_TEXT_BYTES = 32 << 10  # text comes in pieces of this size


class XmlError(SmqrtError):
    """A document is malformed, or larger in some way than is allowed."""


class XmlParser:
    """The parser of one document.

    Args:
        has_namespaces: names are "URI|name".

    Attributes:
        done: whether the root element has ended.
    """

    def __init__(self, has_namespaces: bool) -> None:
        parser = expat.ParserCreate(namespace_separator="|" if has_namespaces else None)
        parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
        parser.buffer_text, parser.buffer_size, parser.ordered_attributes = True, _TEXT_BYTES, True
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler, parser.CommentHandler = self._text, self._comment
        parser.ProcessingInstructionHandler = self._instruction
        parser.EntityDeclHandler = parser.UnparsedEntityDeclHandler = self._refuse_entity
        parser.AttlistDeclHandler = self._refuse_attribute
        parser.ExternalEntityRefHandler = self._refuse_reference
        self._parser = parser
        self._parts: list[bytes] = []
        self._fed_bytes = self._depth = 0
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Parse the next piece; give its events.

        Raises:
            XmlError: one sentence with line and column.
        """
        self._fed_bytes += len(data)
        try:
            if self._fed_bytes > DOCUMENT_BYTES:
                raise XmlError(f"the document has more than {DOCUMENT_BYTES} bytes")
            self._parser.Parse(data, False)
            if self._fed_bytes - max(self._parser.CurrentByteIndex, 0) > TOKEN_BYTES and not self.done:
                raise XmlError(f"a tag or comment has more than {TOKEN_BYTES} bytes")
        except (XmlError, expat.ExpatError) as error:
            text = expat.ErrorString(error.code) if isinstance(error, expat.ExpatError) else str(error)
            line, column = self._parser.CurrentLineNumber, self._parser.CurrentColumnNumber
            raise XmlError(f"{text}: line {line}, column {column}") from None
        events, self._parts = b"".join(self._parts), []
        return events

    def _start(self, name: str, attributes: list[str]) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise XmlError(f"elements are nested more than {MAX_DEPTH} deep")
        if len(attributes) > 2 * MAX_ATTRIBUTES:
            raise XmlError(f"an element has more than {MAX_ATTRIBUTES} attributes")
        if len(name) > MAX_NAME or any(len(each) > MAX_NAME for each in attributes[::2]):
            raise XmlError(f"a name with its namespace has more than {MAX_NAME} characters")
        self._put(b"S", name)
        self._parts.append(pack(">I", len(attributes) // 2))
        for text in attributes:
            self._put(b"", text)

    def _end(self, name: str) -> None:
        self._depth -= 1
        self.done = not self._depth
        self._put(b"E", name)

    def _text(self, text: str) -> None:
        self._put(b"T", text)

    def _comment(self, text: str) -> None:
        self._put(b"C", text)

    def _instruction(self, target: str, data: str) -> None:
        self._put(b"P", target)
        self._put(b"", data)

    def _refuse_entity(self, *_declaration: object) -> NoReturn:
        raise XmlError("entities can't be declared here")

    def _refuse_attribute(self, *_declaration: object) -> NoReturn:
        raise XmlError("attributes can't be declared here")  # one with a default value comes with every element

    def _refuse_reference(self, *_reference: object) -> NoReturn:
        raise XmlError("external entities are not read")

    def _put(self, kind: bytes, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self._parts += (kind, pack(">I", len(data)), data)


class XmlBinding:
    """The parsers of Lua by their handles."""

    def __init__(self) -> None:
        self._parsers: dict[int, XmlParser] = {}
        self._next_handle = itertools.count(1).__next__

    def new(self, has_namespaces: bool) -> int:
        handle = self._next_handle()
        self._parsers[handle] = XmlParser(has_namespaces)
        return handle

    def feed(self, handle: int, data: bytes) -> LuaValues:
        """The events of a piece of at most `SLICE_BYTES`, and whether the root has ended; None and a sentence when it
        is wrong."""
        parser = self._parsers[handle]
        try:
            return parser.feed(data), parser.done
        except XmlError as error:
            return fail(str(error))

    def collect(self, handle: int) -> None:
        self._parsers.pop(handle, None)


def install_xml(vm: Vm, services: Services) -> None:
    """Give Lua the parser."""
    binding = XmlBinding()
    vm.namespace("ba.xml", methods(binding, "new feed collect") | {"slice": lambda: SLICE_BYTES})
