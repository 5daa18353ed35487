"""The manual as a static site, for a folder or any web server.

Links are relative, so the site works under any path. `scripts/docs FOLDER` runs this module.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from smqrt.manual import pages as manual
from smqrt.manual.pages import index_script
from smqrt.manual.render import Site, render_page

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
