"""Which applications `smqrt serve` runs: from its arguments, or from what lies in the current folder.

A folder, or a ZIP file, with `.preload`, `index.*` or `*.lsp` at its top is one application. Another one holds
applications: each of its sub-folders is one, mounted under its name.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from smqrt.errors import StartError

Folder = Path | zipfile.Path


@dataclass(frozen=True)
class AppSpec:
    """One application to load.

    Attributes:
        name: the path segment it is mounted under; empty for the root.
        path: a folder or a ZIP file.
        priority: -127 to 127, higher is asked first.
        inner: the folder inside the ZIP file; empty for its top.
    """

    name: str
    path: Path
    priority: int = 0
    inner: str = ""


def discover(arguments: Sequence[str], mounts: Sequence[str], current: Path) -> list[AppSpec]:
    """Returns the applications to load, in order.

    Args:
        arguments: the APP words; one is the root application, several are mounted under their names.
        mounts: the values of `-l`, each `NAME:PRIORITY:PATH` or Mako's short forms of it.
        current: the folder relative paths start at.

    Raises:
        StartError: a path is missing or can't be read, a ZIP file is broken, or two applications have one name.
    """
    specs = [_parse_mount(mount, current) for mount in mounts]
    if not arguments and not mounts:
        preload = current / "app_preload"
        specs += _applications(preload if preload.is_dir() else current, explicit=False)
    elif len(arguments) == 1:
        specs += _applications(current / arguments[0], explicit=True)
    else:
        specs += [_named(current / argument) for argument in arguments]
    _refuse_doubles(specs)
    return specs


def _parse_mount(text: str, current: Path) -> AppSpec:
    name, _, rest = text.partition(":")
    priority, colon, path = rest.partition(":")
    if not colon or not path:
        raise StartError(
            f"-l {text} must be NAME:PRIORITY:PATH, for example -l chat::apps/chat (an empty NAME is the root)."
        )
    if "/" in name:
        raise StartError(f"-l {text} names the application {name!r}; a name is one path segment and holds no slash.")
    try:
        number = int(priority or "0")
    except ValueError:
        number = 128
    if not -127 <= number <= 127:
        raise StartError(f"-l {text} has the priority {priority!r}; it must be a number from -127 to 127.")
    _open(current / path)
    return AppSpec(name, current / path, number)


def _named(path: Path) -> AppSpec:
    _open(path)
    resolved = path.resolve()
    return AppSpec(resolved.stem if resolved.is_file() else resolved.name, path)


def _applications(path: Path, explicit: bool) -> list[AppSpec]:
    top = _open(path)
    children = sorted((child for child in top.iterdir() if _is_visible_folder(child)), key=lambda child: child.name)
    if _is_application(top) or (explicit and not any(_is_application(child) for child in children)):
        return [AppSpec("", path)]
    if not children:
        raise StartError(
            f"{path} holds no application; give it a .preload or an index.lsp (`smqrt new FOLDER` makes one)."
        )
    return [_child(path, child) for child in children]


def _child(path: Path, child: Folder) -> AppSpec:
    return AppSpec(child.name, child) if isinstance(child, Path) else AppSpec(child.name, path, inner=child.name)


def _open(path: Path) -> Folder:
    """Returns the folder, or the top of the ZIP file, after listing it once."""
    try:
        folder = path if path.is_dir() else zipfile.Path(path)
        next(iter(folder.iterdir()), None)
    except FileNotFoundError:
        raise StartError(f"{path} does not exist; an application is a folder or a ZIP file.") from None
    except zipfile.BadZipFile:
        raise StartError(f"{path} is not a readable ZIP file; an application is a folder or a ZIP file.") from None
    except OSError as error:
        raise StartError(f"{path} can't be read: {error.strerror or error}.") from None
    return folder


def _is_visible_folder(child: Folder) -> bool:
    return child.is_dir() and not child.name.startswith((".", "__"))


def _is_application(folder: Folder) -> bool:
    try:
        return any(_is_mark(child.name) for child in folder.iterdir())
    except OSError:
        return False


def _is_mark(name: str) -> bool:
    return name in (".preload", ".preload.py") or name.startswith("index.") or name.endswith(".lsp")


def _refuse_doubles(specs: Sequence[AppSpec]) -> None:
    seen: dict[str, Path] = {}
    for spec in specs:
        if spec.name in seen:
            where = f"/{spec.name}/" if spec.name else "/"
            raise StartError(
                f"{seen[spec.name]} and {spec.path} would both be mounted at {where}; use -l NAME:PRIORITY:PATH."
            )
        seen[spec.name] = spec.path
