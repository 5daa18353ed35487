"""The manual as a static site: files that a browser opens from a folder, or that any web server serves.

Links are relative, so the folder may lie under any path. `scripts/docs FOLDER` runs this module.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from smqrt.manual import pages as manual
from smqrt.manual.render import Site, render_page
from smqrt.manual.search import index_script

_ASSETS = ("page.css", "manual.css", "manual.js")
_HOME, _INDEX, _FOLDER = "index.html", "search-index.js", "assets/"


def write_site(folder: Path) -> int:
    """Write the manual into a folder, and return the number of its pages.

    Files of the same names are replaced; others stay.

    Args:
        folder: made when it is missing.

    Raises:
        OSError: when it cannot be written.
    """
    pages = manual.pages()
    for name in ("", *pages):
        path = folder / (f"{name}.html" if name else _HOME)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(pages, name, _site(name)), "utf-8")
    assets = folder / _FOLDER
    assets.mkdir(exist_ok=True)
    for name in _ASSETS:
        (assets / name).write_bytes((resources.files("smqrt") / "rtl" / name).read_bytes())
    (assets / _INDEX).write_text(index_script(pages), "utf-8")
    return len(pages)


def _site(name: str) -> Site:
    """Return where a page finds the others: the folder of the site, seen from the page's own."""
    root = "../" * name.count("/")
    return Site(root, ".html", root + _FOLDER, root + _HOME, root + _FOLDER + _INDEX)


def main(arguments: list[str]) -> None:
    """Write the site into the folder that is named; into `build/manual` without one."""
    if len(arguments) > 1 or any(word.startswith("-") for word in arguments):
        sys.exit("Usage: scripts/docs [FOLDER]")
    folder = Path(arguments[0] if arguments else "build/manual")
    try:
        count = write_site(folder)
    except OSError as error:
        sys.exit(f"{folder}: cannot be written: {error.strerror}.")
    print(f"{count} pages: {folder / _HOME}")


if __name__ == "__main__":
    main(sys.argv[1:])
