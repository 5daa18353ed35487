"""The JavaScript client at `/rtl/smq.mjs`, and the classic script `/rtl/smq.js` made from it.

The module is the file that the npm package of `smqrt/clients/javascript` has, so that there is one source.
"""

from __future__ import annotations

import re
from importlib import resources

from smqrt.http.resources import VirtualIo

_EXPORT = re.compile(rb"^export \{([\w, ]+)\};\n\Z", re.MULTILINE)


def client_scripts() -> VirtualIo:
    """Return the files `smq.mjs` and `smq.js`. They are read once; their time is that of the module."""
    with resources.as_file(resources.files("smqrt") / "clients" / "javascript" / "smq.mjs") as path:
        module, changed_s = path.read_bytes(), int(path.stat().st_mtime)
    script = classic_script(module)
    io = VirtualIo({"smq.mjs": lambda: module, "smq.js": lambda: script}, changed_s=changed_s)
    io.in_loop = True  # both are in memory
    return io


def classic_script(module: bytes) -> bytes:
    """Return a script that sets the global `SMQ` to the exports of `module`, at once when a page loads it.

    Args:
        module: the text of an ES module without imports, whose last line is its only `export {…};`.
    """
    exported = _EXPORT.search(module)
    assert exported, "smq.mjs ends with one line `export {…};`"
    names = exported[1]
    return (
        b'globalThis.SMQ = (() => {\n"use strict";\n'
        + module[: exported.start()]
        + b"return {"
        + names
        + b"};\n})();\n"
    )
