"""Former names of modules that the manual has named: importing one works for a release, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FORMER = {
    "smqrt.message": "smqrt.smq.messages",
    "smqrt.net.contexts": "smqrt.transport.tls_contexts",
    "smqrt.net.mail": "smqrt.mail.smtp",
    "smqrt.net.smtp": "smqrt.mail.smtp",
    "smqrt.net.stream": "smqrt.transport.stream",
}
"""What the manual of 1.0.0rc1 imports from, and where it is."""


class _FormerModules(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "smqrt.net":  # an empty package: only the names above are found below it
            return ModuleSpec(name, None, is_package=True)
        return ModuleSpec(name, self) if name in FORMER else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system: what it makes is replaced at once."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(f"{name} is now {FORMER[name]}", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(FORMER[name])


def install() -> None:
    """Have the former names found. A second call does nothing."""
    if not any(isinstance(finder, _FormerModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FormerModules())
