"""The test files that a change can break: `python -m tests.changed` prints them for `scripts/test --changed`.

The change is what differs from the commit in which the branch left `main`, in the working tree too. A test file is
among them when it changed, or imports what changed, whatever is between; the nearest ones come first. `python -m
tests.changed 2` leaves out those that are more than two imports away.

* An import in a function counts, one for type hints only does not.
* A test that starts `smqrt` as a process imports its main program.
* A package that imports modules by computed names imports all in it.
* A changed file that is no Python stands for all modules of its package, and for the test files that name it or its
  folder; one beside tests for those, too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
PROGRAM = "smqrt.__main__"
PROCESSES = {
    *("serve", "served_demos", "page", "new_page", "chromium", "besiege", "besieged"),
    *("Served", "Besieged", "smqrt"),
}
"""Fixtures, classes and words of a command line that say that a test starts `smqrt`."""
ALWAYS = ("tests/test_architecture.py",)
COMMON = {
    "",
    "smqrt",
    "tests",
    "apps",
    "examples",
    "lib",
    "static",
    "index.html",
    "index.lsp",
    ".preload",
    ".preload.py",
}
"""Names of files and folders that say nothing about who uses them."""
ROOTS = "smqrt", "tests", "app_preload", "scripts"


def changed_files(repository: Path = REPOSITORY) -> list[str]:
    """Return what differs from the base of this branch, and what is new."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (base,) = git("merge-base", "HEAD", "main")
    found = git("diff", "--name-only", "--no-renames", base) + git("ls-files", "--others", "--exclude-standard")
    return sorted({*found})


def module_of(path: str) -> str:
    """Return the name under which a file is imported."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Imports:
    """Who imports whom.

    Args:
        sources: the text of each Python file, by its path.

    Attributes:
        paths: of the modules, by their names.
    """

    def __init__(self, sources: dict[str, str]) -> None:
        self.paths = {module_of(path): path for path in sources}
        self._sources = sources
        self._with_packages = cache(self._find_with_packages)
        self._importers: dict[str, set[str]] = {name: set() for name in self.paths}
        for path, source in sources.items():
            name = module_of(path)
            for used in self._used(path, ast.parse(source)):
                self._importers[used].add(name)

    def importers(self, modules: Iterable[str]) -> dict[str, int]:
        """Return these modules, with 0, all that import one of them, with 1, all that import those, and so on."""
        found = dict.fromkeys(modules, 0)
        waiting = deque(found)
        while waiting:
            name = waiting.popleft()
            for importer in self._importers.get(name, ()):
                if importer not in found:
                    found[importer] = found[name] + 1
                    waiting.append(importer)
        return found

    def _used(self, path: str, tree: ast.Module) -> set[str]:
        own = module_of(path)
        found: set[str] = set()
        nodes = list(_telling(tree))
        for node in nodes:
            for name in _names(node, own if path.endswith("/__init__.py") else own.rpartition(".")[0]):
                found |= self._with_packages(name)
        if path.startswith("tests/"):
            found |= {module_of(one) for one in self._conftests(path)}
            if path != "tests/conftest.py" and any(map(_starts_program, nodes)):
                found |= self._with_packages(PROGRAM)
        elif path.endswith("/__init__.py") and own != "smqrt" and "import_module" in ast.dump(tree):
            found |= {name for name in self.paths if name.startswith(f"{own}.")}
        return found - {own}

    def _find_with_packages(self, name: str) -> set[str]:
        """A module, or that of a name in it, and the packages in which it lies."""
        parts = name.split(".")
        return {part for end in range(1, len(parts) + 1) if (part := ".".join(parts[:end])) in self.paths}

    def _conftests(self, path: str) -> Iterator[str]:
        for folder in Path(path).parents:
            if (found := str(folder / "conftest.py")) in self._sources:
                yield found


def _telling(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that can name a module or the program, but none that is for type hints only.

    `ast.walk` takes three times as long for the two million nodes of this repository.
    """
    waiting: list[Any] = [tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if kind in _TELLING:
            yield node
        if kind in _LEAVES or (kind is ast.If and type(node.test) is ast.Name and node.test.id == "TYPE_CHECKING"):
            continue
        for name in kind._fields:
            value = getattr(node, name, None)
            if type(value) is list:
                waiting += value
            elif value is not None:
                waiting.append(value)


_TELLING = frozenset((ast.Import, ast.ImportFrom, ast.Constant, ast.Name, ast.arg))
_LEAVES = frozenset((ast.Name, ast.Constant, ast.Load, ast.Store, str, int, type(None)))
"""What has no nodes below it; strings and numbers are among the fields, too."""


def _names(node: ast.AST, package: str) -> Iterator[str]:
    """What a node of a module in that package imports; a text that is the name of a module counts."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        yield source
        yield from (f"{source}.{each.name}" for each in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("smqrt.", "tests.")):
        yield node.value


def _starts_program(node: ast.AST) -> bool:
    if isinstance(node, ast.arg):
        return node.arg in PROCESSES
    if isinstance(node, ast.Name):
        return node.id in PROCESSES
    return isinstance(node, ast.Constant) and node.value == "smqrt"


def affected(changed: Iterable[str], sources: dict[str, str], most: int | None = None) -> list[str]:
    """Return the test files that changes of these files can break, the nearest first.

    Args:
        changed: paths below the repository.
        sources: the text of each Python file, by its path.
        most: imports between a test and a change.
    """
    imports = Imports(sources)
    modules: set[str] = set()
    found = {path: 0 for path in ALWAYS if path in sources}
    tests = {path: text for path, text in sources.items() if Path(path).name.startswith("test_")}
    for path in changed:
        if path.endswith(".py") and not path.startswith("tests/apps/examples/"):
            modules.add(module_of(path))
            continue
        folders = [str(folder) for folder in Path(path).parents]
        if package := next((one for one in folders if one != "smqrt" and f"{one}/__init__.py" in sources), None):
            modules |= {name for name, at in imports.paths.items() if at.startswith(f"{package}/")}
        if path.startswith("tests/") and not path.startswith("tests/apps/examples/"):
            beside = next(one for one in folders if any(str(Path(test).parent) == one for test in tests))
            found |= {test: 0 for test in tests if test.startswith(f"{beside}/")}
        words = {Path(one).name for one in (path, *folders)} - COMMON
        found |= {test: 1 for test, text in tests.items() if any(f'{word}"' in text for word in words)} | found
    distances = imports.importers(modules).items()
    found = {imports.paths[name]: far for name, far in distances if imports.paths.get(name) in tests} | found
    return sorted(
        (path for path, far in found.items() if most is None or far <= most), key=lambda path: (found[path], path)
    )


def read_sources(repository: Path = REPOSITORY) -> dict[str, str]:
    """Return the text of each Python file, by its path."""
    paths = (path for root in ROOTS for path in sorted((repository / root).rglob("*.py")))
    return {str(path.relative_to(repository)): path.read_text("utf-8") for path in paths}


if __name__ == "__main__":
    print(*affected(changed_files(), read_sources(), int(sys.argv[1]) if sys.argv[1:] else None), sep="\n")
