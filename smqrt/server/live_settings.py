"""The settings in force, and their change while the server runs.

Read again, settings that are marked `live` come into force, and those who asked for them are told. What else has
changed in the file needs a restart, and is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from smqrt.errors import SmqrtError, StartError
from smqrt.settings.options import options_of
from smqrt.settings.settings import Settings
from smqrt.settings.tree import Path, named_settings_of, settings_of, value_at, with_values

log = logging.getLogger("smqrt")

Apply = Callable[[Settings], None]
Read = Callable[[], Settings]


class LiveSettings:
    """The settings of a running server.

    Args:
        current: those it starts with.
        report: takes each line meant for the person at the terminal.

    Attributes:
        current: those in force.
    """

    def __init__(self, current: Settings, report: Callable[[str], None]) -> None:
        self.current = self._last = current
        self._read: Read | None = None
        self._report = report
        self._watchers: list[tuple[tuple[str, ...], Apply]] = []

    def read_with(self, read: Read, last: Settings) -> None:
        """Have them read again by `read`, which raises StartError; `last` is what it gave last, before the program
        itself changed any."""
        self._read, self._last = read, last

    def watch(self, names: tuple[str, ...], apply: Apply) -> None:
        """Have `apply` called, with all settings, after one of these has changed.

        Args:
            names: settings or groups: "max_connections", "limits".
            apply: brings them into force; raises SmqrtError when it can't, and leaves its part as it was.
        """
        self._watchers.append((names, apply))

    def reload(self) -> str | None:
        """Read the settings again and bring into force what may change; returns what was wrong, None for nothing."""
        if self._read is None:
            return None
        try:
            found = self._read()
        except StartError as error:
            return str(error)
        changed = dict(_changes(self._last, found))
        live = {path for path, is_live in changed.items() if is_live}
        if fixed := sorted(".".join(path) for path in changed.keys() - live):
            log.warning("settings that need a restart to change: %s", ", ".join(fixed))
        if not live:
            return None
        self._last = _with(self._last, found, live)
        self.current = _with(self.current, found, live)
        self._report(f"settings changed: {', '.join(sorted(map('.'.join, live)))}")
        faults = list(self._apply({path[0] for path in live} | {".".join(path) for path in live}))
        return "; ".join(faults) or None

    def _apply(self, changed: set[str]) -> Iterator[str]:
        for names, apply in self._watchers:
            if not changed.isdisjoint(names):
                try:
                    apply(self.current)
                except SmqrtError as error:
                    yield str(error)


def _with(made: Settings, found: Settings, paths: set[Path]) -> Settings:
    """`made`, with the values that `found` has at these paths; a group and a name are all of that table."""
    named = _named_groups()
    tables: dict[str, dict[str, object]] = {path[0]: dict(getattr(made, path[0])) for path in paths if path[0] in named}
    for group, name in (path for path in paths if path[0] in named):
        there: Mapping[str, object] = getattr(found, group)
        tables[group].pop(name, None)
        tables[group] |= {name: there[name]} if name in there else {}
    others = {path: value_at(found, path) for path in paths if path[0] not in named}
    return with_values(replace(made, **tables), others)  # type: ignore[arg-type]  # tables of settings, by their groups


def _changes(old: Settings, new: Settings) -> Iterator[tuple[Path, bool]]:
    """The paths of what is different, and whether it may change while the server runs."""
    for setting in settings_of(Settings):
        if value_at(old, setting.path) != value_at(new, setting.path):
            yield setting.path, setting.live
    for group, is_live in _named_groups().items():
        there: Mapping[str, object] = getattr(old, group)
        now: Mapping[str, object] = getattr(new, group)
        for name in there.keys() | now.keys():
            if there.get(name) != now.get(name):
                same_place = name in there and name in now
                yield (group, name), _may_change(there[name], now[name]) if same_place else is_live


def _may_change(table: object, other: object) -> bool:
    """Whether all that is different in a table that the user names may change while the server runs."""
    items = options_of(type(table)).values()
    return all(item.metadata["live"] for item in items if getattr(table, item.name) != getattr(other, item.name))


def _named_groups() -> dict[str, bool]:
    """The groups of tables that users name, and whether all of a table may change."""
    groups: dict[str, bool] = {}
    for setting in named_settings_of(Settings):
        groups[setting.path[0]] = groups.get(setting.path[0], True) and setting.live
    return groups
