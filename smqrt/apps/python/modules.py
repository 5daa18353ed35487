"""The modules of an application in Python: what lies beside its `.preload.py`, for that application only.

`.preload.py` runs as a package with a name of its own, `smqrt_app_chat` for the application chat; `store.py` beside it
is `smqrt_app_chat.store`. In the application's code `import store` finds that one, before an installed module of the
same name, as a script's folder comes first for a script. So two applications with a `store` each do not mix, and
nothing of an application is left when it ends.
"""

from __future__ import annotations

import builtins
import itertools
import linecache
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import decode_source
from types import CodeType, ModuleType

import smqrt.app
from smqrt.http.resources import Io, IoError
from smqrt.process.current_application import AppScope

PRELOAD = ".preload.py"
_PREFIX = "smqrt_app_"
_OWN = ("app", "dir", "io")
_live: dict[str, Modules] = {}


class Modules:
    """The modules of one application. `close` ends them.

    Args:
        name: the application's, for its package.
        label: what tracebacks call the folder, such as "chat/".
        io: the folder.
        scope: the application.

    Attributes:
        package: the name of the package they are in.
        main: the module that `.preload.py` is.
    """

    def __init__(self, name: str, label: str, io: Io, scope: AppScope) -> None:
        if _finder not in sys.meta_path:
            sys.meta_path.append(_finder)
        self.package = scope.package = _unused(_PREFIX + (re.sub(r"\W", "_", name, flags=re.ASCII) or "root"))
        self._label, self._io, self._scope = label, io, scope
        self._is_own: dict[str, bool] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}
        _live[self.package] = self
        self.main = ModuleType(self.package)
        self.main.__file__ = self.file_of(PRELOAD)
        self.main.__path__ = []  # it has modules; the finder below knows where
        self.main.__package__ = self.package
        self.main.__dict__["__builtins__"] = self._builtins
        sys.modules[self.package] = self.main

    def run_main(self) -> None:
        """Run `.preload.py`. Raises what it raises."""
        source = self._io.read(PRELOAD)
        loader = self.main.__loader__ = _Loader(self, PRELOAD)
        self.main.__spec__ = ModuleSpec(self.package, loader, origin=self.main.__file__, is_package=True)
        exec(compile(source, self._label + PRELOAD, "exec", dont_inherit=True), self.main.__dict__)

    def close(self) -> None:
        """Forget all of them."""
        _live.pop(self.package, None)
        for name in [name for name in list(sys.modules) if name.partition(".")[0] == self.package]:
            del sys.modules[name]
        for file in [file for file in list(linecache.cache) if file.startswith(self._label)]:
            del linecache.cache[file]  # or tracebacks would show the lines of today's code tomorrow
        self.main.__dict__.clear()

    def label_of(self, name: str) -> str:
        """What tracebacks call a file."""
        return self._label + name

    def file_of(self, name: str) -> str:
        """The file's path, or its name where it has none."""
        try:
            return self._io.realpath(name)
        except IoError:
            return self._label + name

    def read(self, name: str) -> bytes:
        """Read a file. Raises IoError."""
        return self._io.read(name)

    def prepare(self, module: ModuleType) -> None:
        """Let a module find the others."""
        module.__dict__["__builtins__"] = self._builtins

    def spec(self, fullname: str) -> ModuleSpec | None:
        """Look for a module by its full name."""
        path = fullname.partition(".")[2].replace(".", "/")
        for name, is_package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            if self._has(name, folder=False):
                loader = _Loader(self, name)
                spec = ModuleSpec(fullname, loader, origin=self.file_of(name), is_package=is_package)
                spec.has_location = True
                return spec
        if not self._has(path, folder=True):
            return None
        return ModuleSpec(fullname, None, is_package=True)  # a folder of modules without an __init__.py

    def _has(self, name: str, folder: bool) -> bool:
        try:
            return self._io.stat(name).isdir is folder
        except IoError:
            return False

    def _owns(self, top: str) -> bool:
        own = self._is_own.get(top)
        if own is None:
            own = self._has(f"{top}.py", folder=False) or self._has(f"{top}/__init__.py", folder=False)
            self._is_own[top] = own
        return own

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What `import` calls in the application's code."""
        names = fromlist or ()
        top = name.partition(".")[0]
        if names and not level and name == smqrt.app.__name__:
            return self._facade()
        if level or self._scope.is_on_path():
            return builtins.__import__(name, globals, locals, names, level)
        if self._owns(top):
            return self._import_own(name, top, names)
        try:
            return builtins.__import__(name, globals, locals, names, level)
        except ModuleNotFoundError as error:
            if error.name != top or not self._has(top, folder=True):
                raise
        return self._import_own(name, top, names)

    def _import_own(self, name: str, top: str, fromlist: Sequence[str]) -> ModuleType:
        try:
            leaf = builtins.__import__(f"{self.package}.{name}", None, None, fromlist or ("__name__",))
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(self.package):
                raise
            missing = error.name.removeprefix(self.package + ".")
            raise ModuleNotFoundError(f"the application has no module {missing!r}", name=missing) from None
        return leaf if fromlist else sys.modules[f"{self.package}.{top}"]

    def _facade(self) -> ModuleType:
        """`smqrt.app` with the names of this application, whichever greenlet asks."""
        facade = ModuleType(smqrt.app.__name__, smqrt.app.__doc__)
        facade.__dict__.update({name: getattr(smqrt.app, name) for name in smqrt.app.__all__ if name not in _OWN})
        facade.__dict__.update(self._scope.names, __all__=smqrt.app.__all__)
        return facade


class _Loader(InspectLoader):
    """Loads a module of an application.

    Args:
        modules: those of the application.
        name: the file.
    """

    def __init__(self, modules: Modules, name: str) -> None:
        self._modules, self._name = modules, name

    def exec_module(self, module: ModuleType) -> None:
        """See `Loader.exec_module`."""
        self._modules.prepare(module)
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        """See `InspectLoader.get_code`."""
        label = self._modules.label_of(self._name)
        return compile(self._read(), label, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        """See `InspectLoader.get_source`: tracebacks show the lines."""
        return decode_source(self._read())

    def is_package(self, fullname: str) -> bool:
        """See `InspectLoader.is_package`."""
        return self._name.endswith("/__init__.py") or self._name == PRELOAD

    def _read(self) -> bytes:
        try:
            return self._modules.read(self._name)
        except IoError as error:
            raise ImportError(f"{self._modules.label_of(self._name)} can't be read: {error}") from None


class _Finder(MetaPathFinder):
    """Finds the modules of all applications."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder.find_spec`."""
        package, dot, _ = fullname.partition(".")
        modules = _live.get(package) if dot else None
        return modules.spec(fullname) if modules else None


_finder = _Finder()


def _unused(package: str) -> str:
    names = itertools.chain([package], (f"{package}_{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in _live)
