"""Content types by file name."""

from __future__ import annotations

from mimetypes import MimeTypes

DEFAULT = "application/octet-stream"
_types = MimeTypes()  # the standard library's own table: the machine's files must not change what a browser gets
_MORE = {
    ".avif": "image/avif",
    ".js": "text/javascript",
    ".lua": "text/plain",
    ".map": "application/json",
    ".md": "text/markdown",
    ".mjs": "text/javascript",
    ".ttf": "font/ttf",
    ".wasm": "application/wasm",
    ".webmanifest": "application/manifest+json",
    ".webp": "image/webp",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
}
for _extension, _type in _MORE.items():
    _types.add_type(_type, _extension)


def content_type(name: str) -> str:
    """Give the content type for a file's name, with the character set for text."""
    kind, encoding = _types.guess_type(name, strict=True)
    if kind is None or encoding is not None:  # an archive: nobody should unpack it on the way
        return DEFAULT if encoding is None else f"application/{encoding}"
    is_text = kind.startswith("text/") or kind in (
        "application/json",
        "application/javascript",
        "application/xml",
        "image/svg+xml",
    )
    return f"{kind}; charset=utf-8" if is_text and kind != "application/json" else kind
