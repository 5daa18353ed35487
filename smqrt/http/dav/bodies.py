"""The XML that WebDAV clients send, checked before anything parses it."""

from __future__ import annotations

from xml.parsers.expat import ExpatError, ParserCreate

from smqrt.http.status import HttpError

MAX_XML_BYTES = 64 << 10
MAX_DEPTH = 16  # lockinfo with an owner of several elements has 4
MAX_ELEMENTS = 500
MAX_TEXT_BYTES = 4096  # of all texts: the owner of a lock comes back with every listing


def check(data: bytes) -> None:
    """Refuse what is no XML, has a document type (entities that multiply), or is deep or large.

    Raises:
        HttpError: 400.
    """
    counter = _Counter()
    parser = ParserCreate(namespace_separator=" ")  # it looks at prefixes then, as the next parser does
    parser.StartElementHandler = counter.start
    parser.EndElementHandler = counter.end
    parser.CharacterDataHandler = counter.text
    parser.StartDoctypeDeclHandler = counter.doctype
    try:
        parser.Parse(data, True)
    except (ExpatError, ValueError) as error:
        raise HttpError(400, f"the body is no XML: {error}") from None


class _Counter:
    def __init__(self) -> None:
        self.depth = self.elements = self.text_bytes = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        self.elements += 1
        if self.depth > MAX_DEPTH or self.elements > MAX_ELEMENTS:
            raise HttpError(400, f"the XML has more than {MAX_ELEMENTS} elements, or {MAX_DEPTH} inside each other")

    def end(self, name: str) -> None:
        self.depth -= 1

    def text(self, data: str) -> None:
        self.text_bytes += len(data)
        if self.text_bytes > MAX_TEXT_BYTES:
            raise HttpError(400, f"the texts in the XML have more than {MAX_TEXT_BYTES} characters")

    def doctype(self, *about: object) -> None:
        raise HttpError(400, "XML with a document type is not accepted")
