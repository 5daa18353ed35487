"""Commands for the code of Lua applications."""

from __future__ import annotations

from pathlib import Path

import click

from smqrt.apps.lua import signatures
from smqrt.errors import StartError

# ---- `smqrt lua-stubs`

STUBS_FOLDER = ".luals"
"""The folder of the annotations in an application. Names that begin with a dot are not served."""
LUARC = ".luarc.json"


@click.command("lua-stubs")
@click.argument("folder", type=click.Path(path_type=Path))
def lua_stubs(folder: Path) -> None:
    """Write annotation files of the Lua API into FOLDER.

    Editors with LuaLS, the Lua language server, complete and check calls with them. FOLDER is created when it does
    not exist; files of an earlier release are overwritten. An application around FOLDER gets the file .luarc.json
    when it has none.

    \b
    Example:
      smqrt lua-stubs shop/.luals
    """
    try:
        count = write_stubs(folder)
        click.echo(f"Wrote {count} annotation files to {folder}.")
        application = folder.parent
        is_application = (application / ".preload").exists() or any(application.glob("*.lsp"))
        if is_application and not (application / LUARC).exists():
            write_luarc(application, folder.name)
            click.echo(f"Wrote {application / LUARC}.")
    except OSError as error:
        raise StartError(f"Cannot write {error.filename}: {error.strerror}.") from None


def write_stubs(folder: Path) -> int:
    """Write the annotation files into a folder and return their number. Raises OSError."""
    files = signatures.stubs()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return len(files)


def write_luarc(application: Path, stubs_folder: str = STUBS_FOLDER) -> None:
    """Write the settings of LuaLS into the folder of an application. Raises OSError."""
    (application / LUARC).write_text(signatures.luarc(stubs_folder), "utf-8")
