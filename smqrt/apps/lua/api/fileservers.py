"""File servers for Lua: the Python half (spec: bas-api §4)."""

from __future__ import annotations

from functools import partial

from smqrt.apps.lua.api.dirs import DirsBinding
from smqrt.apps.lua.api.files import FilesBinding
from smqrt.apps.lua.bridge import LuaValues, from_utf8, methods
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError
from smqrt.http.dav.directory import MAX_LOCKS, MAX_UPLOADS, DavDirectory, WfsDirectory
from smqrt.http.dav.names import canonical
from smqrt.http.headers import HttpError


class FileServersBinding:
    """What the handles of file servers do that those of other directories don't."""

    def __init__(self, dirs: DirsBinding, files: FilesBinding) -> None:
        self._dirs, self._files = dirs, files

    def create(
        self,
        name: bytes,
        priority: int,
        io: int,
        with_manager: bool,
        lockdir: bytes | None,
        max_uploads: int | None,
        max_locks: int | None,
    ) -> int:
        made = (WfsDirectory if with_manager else DavDirectory)(
            from_utf8(name),
            priority,
            io=self._files.io(io),
            lockdir=from_utf8(lockdir) if lockdir else None,
            max_uploads=max_uploads or MAX_UPLOADS,
            max_locks=max_locks or MAX_LOCKS,
        )
        return self._dirs.register(made)

    def locks(self, handle: int) -> LuaValues | bool:
        """False without a folder for locks; else True and five values for each lock."""
        locks = self._of(handle).locks
        if locks is None:
            return False
        return (True, *(value for lock in locks.about() for value in lock))

    def is_locked(self, handle: int, path: bytes) -> bool:
        locks = self._of(handle).locks
        return locks is not None and locks.guards(_name(path))

    def unlock(self, handle: int, path: bytes) -> bool:
        locks = self._of(handle).locks
        return locks is not None and locks.release(_name(path))

    def set_timeout(self, handle: int, seconds: int) -> bool:
        self._manager(handle).session_s = seconds
        return True

    def set_text(self, handle: int, name: bytes, text: bytes) -> bool:
        setattr(self._manager(handle), name.decode(), from_utf8(text))
        return True

    def set_hook(self, handle: int, name: bytes, inner: int) -> bool:
        """Let the function of the directory `inner` be asked as a hook of the file manager."""
        manager = self._manager(handle)
        setattr(manager, name.decode(), partial(self._dirs.call, inner, (manager, "")))
        return True

    def _of(self, handle: int) -> DavDirectory:
        directory = self._dirs.directory(handle)
        if not isinstance(directory, DavDirectory):
            raise ArgumentError("this directory is no file server: ba.create.dav makes one")
        return directory

    def _manager(self, handle: int) -> WfsDirectory:
        directory = self._dirs.directory(handle)
        if not isinstance(directory, WfsDirectory):
            raise ArgumentError("this directory is no web file manager: ba.create.wfs makes one")
        return directory


def _name(path: bytes) -> str:
    try:
        return canonical(from_utf8(path))
    except HttpError:
        raise ArgumentError(f"{path!r} is no path inside the file server") from None


_DIRECT = "create locks is_locked unlock set_timeout set_text set_hook"


def install(vm: Vm, dirs: DirsBinding, files: FilesBinding) -> None:
    """Give Lua the file servers."""
    vm.namespace("ba.fileservers", methods(FileServersBinding(dirs, files), _DIRECT))
