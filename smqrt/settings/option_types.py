"""Declarations of options and trees of settings.

A table of options is a dataclass whose fields are created by `option`:

    @dataclass(frozen=True, kw_only=True)
    class Options:
        keepalive: int = option(60, whole(0, 0xFFFF, "seconds"), "Interval of pings.")

`make(Options, {"keepalive": "often"})` raises

    ArgumentError: keepalive must be a whole number from 0 to 65535 (seconds), not 'often'.

The settings of the server, of hubs, journals and clients are such tables. The manual shows them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from math import inf, isfinite
from typing import Any, Generic, TypeVar, cast, overload

from smqrt.errors import ArgumentError

T = TypeVar("T")
S = TypeVar("S")
N = TypeVar("N", int, float)
_NUMBER = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*")
_SECONDS = {
    "us": 1e-6, "ms": 1e-3, "millisecond": 1e-3, "s": 1, "second": 1, "m": 60, "min": 60, "minute": 60,
    "h": 3600, "hour": 3600, "d": 86400, "day": 86400, "w": 604800, "week": 604800,
}  # fmt: skip
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{i}b": (1024 if i else 1000) ** power for power, prefix in enumerate("kmgt", 1) for i in ("", "i")
}


class InvalidValueError(ValueError):
    """A value breaks a rule. The argument, if any, replaces the text of the rule in the error."""


@dataclass(frozen=True)
class Rule(Generic[T]):
    """The permitted values of an option.

    Attributes:
        requirement: the text after "must be" in errors.
        read: returns the value to use; raises InvalidValueError, or ArgumentError with a complete sentence.
        kind: the type of the values, for strings from a command line or the environment.
        schema: the rule as JSON Schema; empty for any value.
    """

    requirement: str
    read: Callable[[object], T]
    kind: type = str
    schema: Mapping[str, object] = field(default_factory=dict)

    def check(self, name: str, value: object) -> T:
        """Return the value to use.

        Raises:
            ArgumentError: one sentence that names the option, the rule and the value.
        """
        try:
            return self.read(value)
        except InvalidValueError as error:
            raise ArgumentError(f"{name} must be {error if error.args else self.requirement}, not {value!r}.") from None
        except ArgumentError as error:  # of an inner table, whose error may start with the name
            raise error if str(error).startswith(name) else ArgumentError(f"{name}: {error}") from None

    def from_text(self, text: str) -> object:
        """Convert text from a command line or the environment to a value for `check`; return other text unchanged."""
        if self.kind is bool:
            return _WORDS_OF_SWITCHES.get(text.strip().lower(), text)
        try:
            return self.kind(text)
        except ValueError:
            return text


_WORDS_OF_SWITCHES = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False, "false": False, "no": False, "off": False
}  # fmt: skip


def option(
    default: object,
    rule: Rule[T],
    help_text: str,
    *,
    name: str | None = None,
    shown: str | None = None,
    live: bool = False,
    secret: bool = False,
) -> T:
    """Return the dataclass field of an option.

    Args:
        default: the default; a function is called for each table.
        rule: the permitted values.
        help_text: the text for the manual and the command line.
        name: the name for users; the name of the field by default.
        shown: the default as the manual shows it; the plain value by default.
        live: a reload applies a change while the server runs.
        secret: the value is never shown. A variable `..._FILE` may name a file that contains it.
    """
    metadata = {"rule": rule, "help": help_text, "name": name, "shown": shown, "live": live, "secret": secret}
    # `Any`, as `dataclasses.field` returns the type of the field for type checkers.
    made: Any = (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )
    return cast(T, made)


def group(table: type[T], help_text: str) -> T:
    """Return the dataclass field of an inner table: `limits.publish_rate`.

    Args:
        table: a dataclass of options that all have defaults.
        help_text: one sentence, for the manual.
    """
    made: Any = field(default_factory=table, metadata={"group": table, "help": help_text})
    return cast(T, made)


def tables(table: type[T], help_text: str) -> Mapping[str, T]:
    """Return the dataclass field of named tables: `listener.main.port`. By default there are none.

    Args:
        table: a dataclass with the options of each table.
        help_text: one sentence, for the manual.
    """
    made: Any = field(default_factory=dict, metadata={"tables": table, "help": help_text})
    return cast(Mapping[str, T], made)


def options_of(table: type) -> dict[str, Field[object]]:
    """Return the options of a table by their names for users, in the order of the manual."""
    return {item.metadata["name"] or item.name: item for item in fields(table) if "rule" in item.metadata}


def read(table: type, values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Check values and return them by the names of the fields.

    Args:
        table: a dataclass of options.
        values: by the names of the options.
        prefix: of the names in errors: "journal.".

    Raises:
        ArgumentError: an option is unknown, or a value breaks its rule.
    """
    known = options_of(table)
    for name in values:
        if name not in known:
            raise ArgumentError(unknown(f"{prefix}{name}", known, str(name)))
    return {known[name].name: known[name].metadata["rule"].check(prefix + name, values[name]) for name in values}


def unknown(name: str, known: Iterable[str], given: str | None = None) -> str:
    """Return the error for an unknown name, with the nearest known one."""
    near = nearest(given or name, known)
    meant = f"; did you mean {near}?" if near else "."
    return f"{name} is not an option{meant} The options are: {', '.join(known)}."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that was probably meant, None when none is similar.

    Args:
        cutoff: the similarity that is needed, from 0 to 1 (equal).
    """
    near = difflib.get_close_matches(name[:64], list(known), 1, cutoff)  # cut, because this takes quadratic time
    return near[0] if near else None


def make(table: type[T], values: Mapping[str, object], prefix: str = "") -> T:
    """Return the table with these values. Arguments and errors are those of `read`."""
    return table(**read(table, values, prefix))


def options_table(table: type) -> str:
    """Return the options as a table of the manual, in Markdown."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name, item in options_of(table).items():
        lines.append(f"| `{name}` | {shown_default(item)} | {item.metadata['help']} |")
    return "\n".join(lines) + "\n"


def shown_default(item: Field[object]) -> str:
    """Return the default of an option for the manual; empty for none."""
    if item.metadata["shown"] is not None:
        return str(item.metadata["shown"])
    return "" if item.default in (None, "", MISSING) else f"`{str(item.default).lower()}`"


# ---- Rules


def _finite(value: object) -> float | None:
    """Return a finite number, None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):  # bool is a subclass of int
        return None
    return value if isinstance(value, int) or isfinite(value) else None  # isfinite raises for a huge int


def _range_text(minimum: float, maximum: float, unit: str) -> str:
    text = f"of at least {minimum}" if maximum == inf else f"from {minimum} to {maximum}"
    return f"{text} ({unit})" if unit else text


def _range_schema(kind: str, minimum: float, maximum: float) -> dict[str, object]:
    return {"type": kind, "minimum": minimum} | ({"maximum": maximum} if maximum < inf else {})


def whole(minimum: int, maximum: float = inf, unit: str = "") -> Rule[int]:
    """Return the rule of whole numbers in a range, including floats without a fraction, which Lua may pass."""

    def read_whole(value: object) -> int:
        found = _finite(value)
        if found is None or not minimum <= found <= maximum or found != int(found):
            raise InvalidValueError
        return int(found)

    schema = _range_schema("integer", minimum, maximum)
    return Rule(f"a whole number {_range_text(minimum, maximum, unit)}", read_whole, int, schema)


def number(minimum: float, maximum: float = inf, unit: str = "", *, above: bool = False) -> Rule[float]:
    """Return the rule of numbers in a range; with `above`, `minimum` itself is not permitted."""

    def read_number(value: object) -> float:
        found = _finite(value)
        if found is None or not minimum <= found <= maximum or (above and found == minimum):
            raise InvalidValueError
        return float(found)

    text = _range_text(minimum, maximum, unit)
    if above:
        text = text.replace("of at least", "greater than").replace("from 0 to", "greater than 0, at most")
    schema = _range_schema("number", minimum, maximum)
    if above:
        schema["exclusiveMinimum"] = schema.pop("minimum")
    return Rule(f"a number {text}", read_number, float, schema)


def switch() -> Rule[bool]:
    """Return the rule of True and False, or 1 and 0."""

    def read_switch(value: object) -> bool:
        if value not in (0, 1):
            raise InvalidValueError
        return bool(value)

    return Rule("true or false", read_switch, bool, {"type": "boolean"})


@overload
def instance(requirement: str, kind: type[T]) -> Rule[T]: ...
@overload
def instance(requirement: str, kind: type[T], other: type[S]) -> Rule[T | S]: ...
def instance(requirement: str, kind: type[T], other: type[S] | None = None) -> Rule[T | S]:
    """Return the rule of objects of one or two types."""

    def read_instance(value: object) -> T | S:
        if isinstance(value, kind) or (other is not None and isinstance(value, other)):
            return value
        raise InvalidValueError

    return Rule(requirement, read_instance)


def text() -> Rule[str]:
    """Return the rule of strings."""
    return replace(instance("a string", str), schema={"type": "string"})


def texts() -> Rule[tuple[str, ...]]:
    """Return the rule of lists of strings without commas; one comma-separated string is also permitted."""

    def read_texts(value: object) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
            raise InvalidValueError
        return tuple(one.strip() for one in given if one.strip())

    schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    return Rule("a list of strings, or one comma-separated string", read_texts, schema=schema)


def path() -> Rule[str]:
    """Return the rule of paths, which become str."""

    def read_path(value: object) -> str:
        if not isinstance(value, str | bytes | os.PathLike) or not os.fspath(value):
            raise InvalidValueError
        return os.fsdecode(value)

    return Rule("the path of a file", read_path, schema={"type": "string", "minLength": 1})


def file_mode() -> Rule[str]:
    """Return the rule of permissions of a file, as a string of octal digits."""

    def read_mode(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
            raise InvalidValueError
        return value

    return Rule('a string of octal digits such as "0660"', read_mode, schema={"type": "string"})


def function() -> Rule[Callable[..., Any]]:
    """Return the rule of callable objects."""

    def read_function(value: object) -> Callable[..., Any]:
        if not callable(value):
            raise InvalidValueError
        return value

    return Rule("a function", read_function)


def choice(*choices: T) -> Rule[T]:
    """Return the rule of these values."""

    def read_choice(value: object) -> T:
        for one in choices:
            if value == one and not isinstance(value, bool):  # True == 1
                return one
        raise InvalidValueError

    listed = ", ".join(map(repr, choices))
    requirement = f"one of {listed}" if len(choices) > 1 else listed
    return Rule(requirement, read_choice, type(choices[0]), {"enum": list(choices)})


def optional(rule: Rule[T]) -> Rule[T | None]:
    """Return a rule that also permits None."""
    requirement = f"{rule.requirement}, or nothing"
    return Rule(requirement, lambda one: None if one is None else rule.read(one), rule.kind, rule.schema)


def duration(min_s: float = 0.0, max_s: float = inf) -> Rule[float]:
    """Return the rule of durations: a number of seconds, or a string such as "10m"."""
    span = f" from {min_s:g} to {max_s:g} s" if max_s < inf else ""
    read_duration = _quantity(parse_duration, min_s, max_s)
    return Rule(f"a time{span} such as '200 ms', '10m', '2h', '7d'", read_duration, float, _QUANTITY_SCHEMA)


def positive_duration() -> Rule[float]:
    """Return the rule of durations above 0."""
    read_duration = _quantity(parse_duration, 1e-6, inf)
    return Rule("a time above 0 such as '200 ms', '10m', '2h', '7d'", read_duration, float, _QUANTITY_SCHEMA)


def size(min_bytes: int = 0) -> Rule[int]:
    """Return the rule of sizes: a number of bytes, or a string such as "64MB"."""
    span = f" of at least {min_bytes} bytes" if min_bytes else ""
    read_size = _quantity(parse_size, min_bytes, inf)
    return Rule(f"a size{span} such as '64MB', '20GB', '512MiB'", read_size, int, _QUANTITY_SCHEMA)


_QUANTITY_SCHEMA = {"anyOf": [{"type": "string", "pattern": f"^{_NUMBER.pattern}$"}, {"type": "number", "minimum": 0}]}


def _quantity(parse: Callable[[object], N], minimum: float, maximum: float) -> Callable[[object], N]:
    def read_quantity(value: object) -> N:
        try:
            found = parse(value)
        except ArgumentError:
            raise InvalidValueError from None
        if not minimum <= found <= maximum:
            raise InvalidValueError
        return found

    return read_quantity


def parse_duration(value: object) -> float:
    """Return a duration in seconds.

    Args:
        value: a string such as "200 ms", "10m", "7d", "1 hour"; or a number of seconds.

    Raises:
        ArgumentError: it is not a duration, or negative.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf:
        return float(value)
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    unit = match[2].lower() if match else ""
    factor = _SECONDS.get(unit) or _SECONDS.get(unit.removesuffix("s"))
    if not match or not factor:
        raise ArgumentError(
            f"{value!r} is not a duration; write a number and a unit, such as '200 ms', '10m', '2h', '7d'"
        )
    return float(match[1]) * factor


def parse_size(value: object) -> int:
    """Return a size in bytes.

    Args:
        value: a string such as "64MB" (10⁶), "64MiB" (2²⁰), "20 GB"; or a number of bytes.

    Raises:
        ArgumentError: it is not a size, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    factor = _BYTES.get(match[2].lower()) if match else None
    if not match or not factor:
        raise ArgumentError(f"{value!r} is not a size; write a number and a unit, such as '64MB', '20GB', '512MiB'")
    return int(float(match[1]) * factor)


# ---- Trees of settings
#
# A table is a dataclass whose fields are created by `option`, `group` and `tables`.

Path = tuple[str, ...]
"""The names of the groups of a setting, then its name: ("limits", "publish_rate"), ("listener", "main", "port")."""
ENVIRONMENT = "SMQRT_"
NAME = "NAME"
"""The placeholder of a table's name in the path of a setting of `tables`."""


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        path: the path, with NAME in place of the name of a named table.
        field: the declaration.
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
        """Whether a reload applies a change while the server runs."""
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
    """Return a checked copy of a table with other values. The path of a named table adds an empty table."""
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


# ---- Manual page and schema


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


def schema(table: type, former_names: Mapping[Path, Path] = {}) -> dict[str, object]:
    """Return the JSON Schema of a file with the settings of a table.

    Args:
        table: a dataclass of options, groups and named tables.
        former_names: former paths of renamed settings, each with its current path. The schema marks them as deprecated.
    """
    found = _object_schema(table)
    for former, current in former_names.items():
        properties = _properties_of(found, current[:-1])
        renamed = dict(properties[current[-1]])
        renamed.pop("default", None)  # otherwise editors insert the former name with its default
        renamed |= {"description": f"Former name of `{'.'.join(current)}`, for one release.", "deprecated": True}
        _properties_of(found, former[:-1])[former[-1]] = renamed
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _properties_of(found: Mapping[str, Any], groups: Path) -> dict[str, dict[str, object]]:
    """Return the properties of an inner table in a schema."""
    for name in groups:
        found = found["properties"][name]
    properties: dict[str, dict[str, object]] = found["properties"]
    return properties


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
