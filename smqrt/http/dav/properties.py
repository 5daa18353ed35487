"""Properties that WebDAV clients set by themselves, RFC 4918's "dead" ones: in memory, bounded, and kept beside the
locks."""

from __future__ import annotations

from smqrt.http.dav.kept import SavedState

MAX_PROPERTIES = 1000
"""So many has a file server; beyond, setting one is answered with 507."""
MAX_VALUE_CHARACTERS = 1024


class DeadProperties(SavedState):
    """The properties of all files: by the file's name, by their names in Clark notation, as XML."""

    file = "properties.json"

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[str, dict[str, str]] = {}
        self._count = 0

    def of(self, name: str) -> dict[str, str]:
        """Those of a file or folder."""
        return self._of.get(name, {})

    def has_room(self, name: str, key: str, value: str) -> bool:
        """Whether one more can be set."""
        known = key in self.of(name)
        return len(value) <= MAX_VALUE_CHARACTERS >= len(key) and (known or self._count < MAX_PROPERTIES)

    def set(self, name: str, key: str, value: str | None) -> None:
        """Set one; None removes it."""
        of = self._of.setdefault(name, {})
        self._count -= key in of
        of.pop(key, None)
        if value is not None:
            of[key] = value
            self._count += 1
        if not of:
            del self._of[name]
        self.changed = True

    def forget(self, name: str) -> None:
        """Remove those of a file or folder, and of all in it."""
        for gone in self._below(name):
            self._count -= len(self._of.pop(gone))
            self.changed = True

    def copy(self, old: str, new: str, deep: bool = True) -> None:
        """Give a copy what the original has, as far as there is room."""
        self.forget(new)
        for name in self._below(old) if deep else [old]:
            for key, value in self.of(name).items():
                target = new + name[len(old) :]
                if self.has_room(target, key, value):
                    self.set(target, key, value)

    def move(self, old: str, new: str) -> None:
        """Let them go with a file or folder."""
        self.forget(new)
        for name in self._below(old):
            self._of[new + name[len(old) :]] = self._of.pop(name)
            self.changed = True

    def as_json(self) -> object:
        """See `Kept`."""
        return self._of

    def take(self, kept: object) -> None:
        """See `Kept`."""
        if not isinstance(kept, dict):
            return
        for name, of in kept.items():
            for key, value in of.items():
                if self.has_room(str(name), str(key), str(value)):
                    self.set(str(name), str(key), str(value))
        self.changed = False

    def _below(self, name: str) -> list[str]:
        return [each for each in self._of if each == name or not name or each.startswith(name + "/")]
