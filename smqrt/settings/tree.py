"""Settings in a tree of tables: paths, spellings, values, manual page and schema.

A table is a dataclass whose fields `option`, `group` and `tables` made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace

from smqrt.settings.options import Rule, T, shown_default

Path = tuple[str, ...]
"""The names of the groups of a setting, and its own: ("limits", "publish_rate"), ("listener", "main", "port")."""
ENVIRONMENT = "SMQRT_"
NAME = "NAME"
"""The placeholder of a table's name in the path of a setting of `tables`."""


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        path: with NAME in place of the name of a named table.
        field: its declaration.
    """

    path: Path
    field: Field[object]

    @property
    def name(self) -> str:
        """The name in messages and the manual: "limits.publish_rate"."""
        return ".".join(self.path)

    @property
    def rule(self) -> Rule[object]:
        """The rule of its values."""
        rule: Rule[object] = self.field.metadata["rule"]
        return rule

    @property
    def help(self) -> str:
        """The help text."""
        return str(self.field.metadata["help"])

    @property
    def live(self) -> bool:
        """Whether it may change while the server runs."""
        return bool(self.field.metadata["live"])

    @property
    def secret(self) -> bool:
        """Whether its value is never shown."""
        return bool(self.field.metadata["secret"])


def settings_of(table: type, above: Path = ()) -> Iterator[Setting]:
    """Yield the settings outside named tables, in the order of declaration."""
    for item in fields(table):
        if "rule" in item.metadata:
            yield Setting((*above, item.name), item)
        elif "group" in item.metadata:
            yield from settings_of(item.metadata["group"], (*above, item.name))


def named_settings_of(table: type) -> Iterator[Setting]:
    """Yield the settings of named tables."""
    for item in fields(table):
        if "tables" in item.metadata:
            yield from settings_of(item.metadata["tables"], (item.name, NAME))


def check(made: object) -> None:
    """Check all values of a table.

    Raises:
        ArgumentError: one breaks its rule.
    """
    table = type(made)
    for setting in settings_of(table):
        setting.rule.check(setting.name, value_at(made, setting.path))
    for setting in named_settings_of(table):
        first, _, *rest = setting.path
        for name, one in getattr(made, first).items():
            setting.rule.check(".".join((first, name, *rest)), value_at(one, tuple(rest)))


def value_at(made: object, path: Path) -> object:
    """Return the value of a setting of a table."""
    for name in path:
        made = made[name] if isinstance(made, Mapping) else getattr(made, name)
    return made


def with_values(made: T, values: Mapping[Path, object]) -> T:
    """Return a checked copy of a table with other values. The path of a named table adds an empty one."""
    changes: dict[str, object] = {path[0]: value for path, value in values.items() if len(path) == 1}
    for item in fields(made):  # type: ignore[arg-type]  # a dataclass
        inner = {path[1:]: value for path, value in values.items() if path[0] == item.name and len(path) > 1}
        if inner and "group" in item.metadata:
            changes[item.name] = with_values(getattr(made, item.name), inner)
        elif inner:
            of_name: dict[str, dict[Path, object]] = {}
            for path, value in inner.items():
                of_name.setdefault(path[0], {}).update({path[1:]: value} if path[1:] else {})
            before: Mapping[str, object] = getattr(made, item.name)
            empty = item.metadata["tables"]
            changes[item.name] = {
                **before,
                **{name: with_values(before.get(name) or empty(), of) for name, of in of_name.items()},
            }
    return replace(made, **changes)  # type: ignore[type-var]  # a dataclass


def flag(path: Path) -> str:
    """Return the flag of a path: `limits.publish_rate` is `--limits-publish-rate`."""
    return "--" + "-".join(path).replace("_", "-")


def environment_name(path: Path) -> str:
    """Return the environment variable of a path: `limits.publish_rate` is `SMQRT_LIMITS__PUBLISH_RATE`."""
    return ENVIRONMENT + "__".join(path).upper()


# ---- manual and schema


def settings_manual(table: type) -> str:
    """Return the tables of the manual in Markdown: one of the settings without a group, one of each group."""
    parts = [_rows(setting for setting in settings_of(table) if len(setting.path) == 1)]
    for item in fields(table):
        if "group" in item.metadata:
            rows = _rows(settings_of(item.metadata["group"], (item.name,)))
            parts.append(f"## `[{item.name}]`\n\n{item.metadata['help']}\n\n{rows}")
        elif "tables" in item.metadata:
            rows = _rows(settings_of(item.metadata["tables"], (item.name, NAME)))
            parts.append(f"## `[{item.name}.{NAME}]`\n\n{item.metadata['help']}\n\n{rows}")
    return "\n".join(parts)


def _rows(settings: Iterable[Setting]) -> str:
    lines = ["| setting | flag | environment | default | meaning |", "|---|---|---|---|---|"]
    for setting in settings:
        spelt = f"`{flag(setting.path)}`" if NAME not in setting.path else ""
        variable = f"`{environment_name(setting.path)}`" + (", `..._FILE`" if setting.secret else "")
        row = f"`{setting.field.name}`" + (" ↻" if setting.live else ""), spelt, variable, shown_default(setting.field)
        lines.append(f"| {' | '.join(row)} | {setting.help} |")
    return "\n".join(lines) + "\n"


def schema(table: type) -> dict[str, object]:
    """Return the JSON Schema of a file with the settings of a table."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_object_schema(table)}


def _object_schema(table: type) -> dict[str, object]:
    properties: dict[str, object] = {}
    for item in fields(table):
        about: dict[str, object] = {"description": item.metadata["help"]} if "help" in item.metadata else {}
        if "rule" in item.metadata:
            default = {} if item.default in (None, MISSING) else {"default": item.default}
            properties[item.name] = {**item.metadata["rule"].schema, **about, **default}
        elif "group" in item.metadata:
            properties[item.name] = {**_object_schema(item.metadata["group"]), **about}
        elif "tables" in item.metadata:
            one = _object_schema(item.metadata["tables"])
            properties[item.name] = {"type": "object", "additionalProperties": one, **about}
    return {"type": "object", "properties": properties, "additionalProperties": False}
