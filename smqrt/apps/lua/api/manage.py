"""Management of applications by applications: `mako.getapps`, `createapp`, `startapp`, `stopapp`, `reloadapp` and
`removeapp` (spec: bas-api §3, runtime §2.1).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from smqrt.apps.lua.api.files import FilesBinding
from smqrt.apps.lua.bridge import LuaValue, LuaValues, fail, from_utf8, methods, utf8
from smqrt.apps.lua.vm import Vm
from smqrt.http.disk import DiskIo, ZipIo
from smqrt.http.resources import Io, IoError

if TYPE_CHECKING:
    from smqrt.apps.lua.applications import Application, Applications


class ManageBinding:
    """What Lua calls; it knows an application by its number. All but `apps` may block."""

    def __init__(self, applications: Applications, files: FilesBinding) -> None:
        self._applications = applications
        self._files = files

    def apps(self) -> LuaValues:
        """For each application: number, name, path, priority, whether it runs, its error or None."""
        found: list[LuaValue] = []
        for one in self._applications.all:
            error = utf8(one.error) if one.error else None
            found += (one.number, utf8(one.name), utf8(str(one.path)), one.priority, one.running, error)
        return tuple(found)

    def create(self, name: bytes, priority: int, path: bytes, io: int | None, start: bool) -> LuaValues:
        """Make an application of a path or an io; its number, or None and why not."""
        if any(one.name == from_utf8(name) for one in self._applications.all):
            return fail("exist")
        try:
            where, open_io = self._from_io(self._files.io(io)) if io is not None else self._from_path(from_utf8(path))
        except IoError as error:
            return fail(error.word)
        application = self._applications.make(from_utf8(name), where, open_io, priority)
        if start:
            application.load()
        if application.error is not None:
            application.unload()
            self._applications.all.remove(application)
            return fail(application.error)
        return (application.number,)

    @staticmethod
    def _from_io(io: Io) -> tuple[Path, Callable[[], Io]]:
        try:
            return Path(io.realpath()), lambda: io
        except IoError:
            return Path("io"), lambda: io

    def _from_path(self, given: str) -> tuple[Path, Callable[[], Io]]:
        """As for `-l`: relative paths start at the home io."""
        home = self._applications.services.ios.get("home")
        path = Path(home.realpath() if home else ".") / given
        if not path.exists():
            raise IoError("notfound", given)
        return path, lambda: DiskIo(path) if path.is_dir() else ZipIo(path)

    def start(self, number: int) -> LuaValues:
        application = self._find(number)
        if application is None or application.changing:
            return _not_now(application)
        if application.running:
            return fail("running")
        application.load()
        return (True,) if application.error is None else fail(application.error)

    def stop(self, number: int) -> LuaValues:
        application = self._find(number)
        if application is None or application.changing:
            return _not_now(application)
        if not application.running:
            return fail("stopped")
        return _unloaded(application)

    def reload(self, number: int) -> LuaValues:
        application = self._find(number)
        if application is None or application.changing:
            return _not_now(application)
        application.reload()
        return (True,) if application.error is None else fail(application.error)

    def remove(self, number: int) -> LuaValues:
        application = self._find(number)
        if application is None or application.changing:
            return _not_now(application)
        result = _unloaded(application)
        self._applications.all.remove(application)
        return result

    def _find(self, number: int) -> Application | None:
        return next((one for one in self._applications.all if one.number == number), None)


def _unloaded(application: Application) -> LuaValues:
    """Stop an application: True, or False and the error of its `onunload`."""
    failure = application.unload()
    return (True,) if failure is None else (False, utf8(failure))


def _not_now(application: Application | None) -> LuaValues:
    return fail("locked" if application else "notfound")


def install(vm: Vm, applications: Applications, files: FilesBinding) -> None:
    """Give Lua the management of applications."""
    binding = ManageBinding(applications, files)
    vm.namespace("ba.manage", methods(binding, "apps"), methods(binding, "create start stop reload remove"))
