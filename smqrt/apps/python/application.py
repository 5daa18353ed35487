"""A running Python application: its `.preload.py` and the modules beside it."""

from __future__ import annotations

import builtins
import itertools
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import decode_source
from types import CodeType, ModuleType

import smqrt.app
from smqrt.apps.python.directory import PRELOAD, ApplicationDirectory
from smqrt.apps.python.exports import Namespace
from smqrt.errors import SmqrtError
from smqrt.http.resources import Io, IoError
from smqrt.process.current_process import AppScope

# ---- Application modules
#
# `.preload.py` runs as a package of its own, for example `smqrt_app_chat` for the application chat; `store.py` beside
# it is `smqrt_app_chat.store`. In the application's code `import store` imports that module, in preference to an
# installed one, as the folder of a script precedes installed modules. Two applications may therefore have different
# modules of the same name, and all modules of an application are removed when it ends.

_PREFIX = "smqrt_app_"
_BOUND_NAMES = ("app", "dir", "io")
_live: dict[str, Modules] = {}


class Modules:
    """The modules of an application; `close` removes them.

    Args:
        name: the name of the application, from which the package name derives.
        label: the name of the folder in tracebacks, such as "chat/".
        io: the folder.
        scope: the application.

    Attributes:
        package: the name of their package.
        main: the module of `.preload.py`.
    """

    def __init__(self, name: str, label: str, io: Io, scope: AppScope) -> None:
        if _finder not in sys.meta_path:
            sys.meta_path.append(_finder)
        package = _PREFIX + (re.sub(r"\W", "_", name, flags=re.ASCII) or "root")
        candidates = itertools.chain([package], (f"{package}_{number}" for number in itertools.count(2)))
        self.package = scope.package = next(candidate for candidate in candidates if candidate not in _live)
        self._label, self._io, self._scope = label, io, scope
        self._known_modules: dict[str, bool] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}
        _live[self.package] = self
        self.main = ModuleType(self.package)
        self.main.__file__ = self.file_of(PRELOAD)
        self.main.__path__ = []  # makes it a package; the finder below loads its modules
        self.main.__package__ = self.package
        self.main.__dict__["__builtins__"] = self._builtins
        sys.modules[self.package] = self.main

    def run_main(self) -> None:
        """Run `.preload.py`. Raises its exceptions."""
        source = self._io.read(PRELOAD)
        loader = self.main.__loader__ = _Loader(self, PRELOAD)
        self.main.__spec__ = ModuleSpec(self.package, loader, origin=self.main.__file__, is_package=True)
        # dont_inherit: the `from __future__` of this module must not apply to applications.
        exec(compile(source, self._label + PRELOAD, "exec", dont_inherit=True), self.main.__dict__)

    def close(self) -> None:
        """Remove the modules from `sys.modules`, and their source lines from the cache of tracebacks."""
        _live.pop(self.package, None)
        for name in [name for name in list(sys.modules) if name.partition(".")[0] == self.package]:
            del sys.modules[name]
        for file in [file for file in list(linecache.cache) if file.startswith(self._label)]:
            del linecache.cache[file]  # else tracebacks would show old lines after a reload
        self.main.__dict__.clear()

    def label_of(self, name: str) -> str:
        """Return the name of a file in tracebacks."""
        return self._label + name

    def file_of(self, name: str) -> str:
        """Return the path of a file; its name in tracebacks if it has no path, as in a ZIP file."""
        try:
            return self._io.realpath(name)
        except IoError:
            return self._label + name

    def read(self, name: str) -> bytes:
        """Read a file. Raises IoError."""
        return self._io.read(name)

    def prepare(self, module: ModuleType) -> None:
        """Give a module the `__import__` that finds the application's modules."""
        module.__dict__["__builtins__"] = self._builtins

    def spec(self, fullname: str) -> ModuleSpec | None:
        """Return the spec of a module by its full name; None if the application has no such module."""
        path = fullname.partition(".")[2].replace(".", "/")
        for name, is_package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            if self._has(name, folder=False):
                loader = _Loader(self, name)
                spec = ModuleSpec(fullname, loader, origin=self.file_of(name), is_package=is_package)
                spec.has_location = True  # so that the module gets a `__file__`
                return spec
        if not self._has(path, folder=True):
            return None
        return ModuleSpec(fullname, None, is_package=True)  # a folder of modules without an __init__.py

    def _has(self, name: str, folder: bool) -> bool:
        try:
            return self._io.stat(name).isdir is folder
        except IoError:
            return False

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Implement the `import` statement of the application's code."""
        names = fromlist or ()
        top = name.partition(".")[0]
        if names and not level and name == smqrt.app.__name__:
            # A copy of `smqrt.app` whose `app`, `dir` and `io` are those of this application in every greenlet.
            facade = ModuleType(smqrt.app.__name__, smqrt.app.__doc__)
            unbound = (name for name in smqrt.app.__all__ if name not in _BOUND_NAMES)
            facade.__dict__.update({name: getattr(smqrt.app, name) for name in unbound})
            facade.__dict__.update(self._scope.names, __all__=smqrt.app.__all__)
            return facade
        if level or self._scope.is_on_path():
            return builtins.__import__(name, globals, locals, names, level)
        has_module = self._known_modules.get(top)
        if has_module is None:
            has_module = self._has(f"{top}.py", folder=False) or self._has(f"{top}/__init__.py", folder=False)
            self._known_modules[top] = has_module
        if has_module:
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


class _Loader(InspectLoader):
    """Loads a module of an application.

    Args:
        modules: the modules of the application.
        name: the name of the file.
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
        """See `InspectLoader.get_source`; tracebacks show these lines."""
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
    """The finder of the modules of all applications."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder.find_spec`."""
        package, dot, _ = fullname.partition(".")
        modules = _live.get(package) if dot else None
        return modules.spec(fullname) if modules else None


_finder = _Finder()


class PythonAppError(SmqrtError):
    """An error in an application's code. The message contains its file and line, then Python's traceback."""


class PythonApplication:
    """A running Python application.

    Args:
        name: its name.
        directory: the directory that serves it.
        scope: owner of what the application creates.
    """

    def __init__(self, name: str, directory: ApplicationDirectory, scope: AppScope) -> None:
        self._modules = Modules(name, directory.label, directory.io, scope)
        self._directory = directory
        variables = self._modules.main.__dict__
        scope.names.update(app=Namespace(variables), dir=directory, io=directory.io)
        variables.update(scope.names)

    def load(self) -> None:
        """Run `.preload.py`. May block.

        Raises:
            PythonAppError: it raised an exception.
        """
        self._call(self._modules.run_main)

    def stop(self) -> None:
        """Run `onunload` if the application defines it. May block. Raises as `load`."""
        onunload = self._modules.main.__dict__.get("onunload")
        if callable(onunload):
            self._call(onunload)

    def clear(self) -> None:
        """Delete the variables and modules of the application."""
        self._modules.close()

    def _call(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            raise PythonAppError(self._directory.describe(error)) from error
