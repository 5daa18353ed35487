"""Import hook for former module names of the manual: they work for one more release, with a warning."""

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
"""Module names of the manual of 1.0.0rc1, and their present names."""


class _FormerModules(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "smqrt.net":  # an empty package: only the names above are found below it
            return ModuleSpec(name, None, is_package=True)
        return ModuleSpec(name, self) if name in FORMER else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: the import system creates a module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        warnings.warn(f"{name} is now {FORMER[name]}", DeprecationWarning, stacklevel=2)
        sys.modules[name] = import_module(FORMER[name])


def install() -> None:
    """Register the import hook. A second call does nothing."""
    if not any(isinstance(finder, _FormerModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FormerModules())
