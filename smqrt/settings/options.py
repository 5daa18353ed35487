"""Options: one way to declare the name, kind, range, default and help of what users may set, and one wording of errors.

A table of options is a dataclass whose fields `option` makes:

    @dataclass(frozen=True, kw_only=True)
    class Options:
        keepalive: int = option(60, whole(0, 0xFFFF, "seconds"), "After this silence the other side is asked.")

`make(Options, {"keepalive": "often"})` raises

    ArgumentError: keepalive must be a whole number from 0 to 65535 (seconds), not 'often'.

The server's settings, a hub's, a journal's and the clients' are such tables, and the manual shows them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
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


class NotThisError(ValueError):
    """A value breaks a rule; the text, if any, is said in place of the rule's own."""


@dataclass(frozen=True)
class Rule(Generic[T]):
    """What values an option takes.

    Attributes:
        says: what follows "must be" in errors.
        read: returns the value to use; raises NotThisError, or ArgumentError with a sentence of its own.
        kind: the type that a text of a command line or the environment is read as first.
        schema: the same for other programs, as JSON Schema; empty for anything.
    """

    says: str
    read: Callable[[object], T]
    kind: type = str
    schema: Mapping[str, object] = field(default_factory=dict)

    def check(self, name: str, value: object) -> T:
        """Returns the value to use.

        Raises:
            ArgumentError: one sentence that names the option, the rule and the value.
        """
        try:
            return self.read(value)
        except NotThisError as error:
            raise ArgumentError(f"{name} must be {error if error.args else self.says}, not {value!r}.") from None
        except ArgumentError as error:  # of a table inside, which has said the name
            raise error if str(error).startswith(name) else ArgumentError(f"{name}: {error}") from None

    def from_text(self, text: str) -> object:
        """Returns what a text of a command line or the environment is, for `check`; the text itself when it is not of
        the kind that is asked for."""
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
    """Returns the dataclass field of an option.

    Args:
        default: its value when nothing is given; a function makes one for each table.
        rule: what it takes.
        help_text: for the manual and the command line.
        name: what users call it, when that is not the name of the field.
        shown: the default as the manual shows it, when it isn't a plain value.
        live: a setting of the server that may change while it runs.
        secret: its value is shown to nobody, and may stand in a file that a variable `..._FILE` names.
    """
    metadata = {"rule": rule, "help": help_text, "name": name, "shown": shown, "live": live, "secret": secret}
    made: Any = (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )
    return cast(T, made)  # of the field's type, for mypy, as `field` has it


def group(table: type[T], help_text: str) -> T:
    """Returns the dataclass field of a table inside a table: `limits.publish_rate`.

    Args:
        table: a dataclass of options whose defaults are all there.
        help_text: one sentence, for the manual.
    """
    made: Any = field(default_factory=table, metadata={"group": table, "help": help_text})
    return cast(T, made)


def tables(table: type[T], help_text: str) -> Mapping[str, T]:
    """Returns the dataclass field of tables by name: `listener.main.port`, of which there are none by default.

    Args:
        table: a dataclass of options: each table's.
        help_text: one sentence, for the manual.
    """
    made: Any = field(default_factory=dict, metadata={"tables": table, "help": help_text})
    return cast(Mapping[str, T], made)


def options_of(table: type) -> dict[str, Field[object]]:
    """Returns the options of a table by the names that users give them, in the order of the manual."""
    return {item.metadata["name"] or item.name: item for item in fields(table) if "rule" in item.metadata}


def read(table: type, values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns what is to be used, by the names of the fields, of what a user gave.

    Args:
        table: a dataclass of options.
        values: by the names of the options; those that are missing keep their defaults.
        prefix: stands before the names in errors: "journal.".

    Raises:
        ArgumentError: there is no such option, or a value breaks its rule.
    """
    known = options_of(table)
    for name in values:
        if name not in known:
            raise ArgumentError(unknown(f"{prefix}{name}", known, str(name)))
    return {known[name].name: known[name].metadata["rule"].check(prefix + name, values[name]) for name in values}


def unknown(name: str, known: Iterable[str], given: str | None = None) -> str:
    """Returns the sentence for a name that doesn't exist, with the one that may have been meant."""
    near = difflib.get_close_matches((given or name)[:64], list(known), 1)
    meant = f"; did you mean {near[0]}?" if near else "."
    return f"{name} is no option{meant} There are: {', '.join(known)}."


def make(table: type[T], values: Mapping[str, object], prefix: str = "") -> T:
    """Returns the table with what a user gave. Arguments and errors are those of `read`."""
    return table(**read(table, values, prefix))


def manual(table: type) -> str:
    """Returns the options as a table of the manual, in Markdown."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name, item in options_of(table).items():
        lines.append(f"| `{name}` | {shown_default(item)} | {item.metadata['help']} |")
    return "\n".join(lines) + "\n"


def shown_default(item: Field[object]) -> str:
    """Returns the default of an option as the manual shows it; empty when there is none."""
    if item.metadata["shown"] is not None:
        return str(item.metadata["shown"])
    return "" if item.default in (None, "", MISSING) else f"`{str(item.default).lower()}`"


# ---- rules


def _finite(value: object) -> float | None:
    """A number as it is; None for anything else, for infinity and for nan."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or isfinite(value) else None


def _span(least: float, most: float, unit: str) -> str:
    span = f"of at least {least}" if most == inf else f"from {least} to {most}"
    return f"{span} ({unit})" if unit else span


def _range_schema(kind: str, least: float, most: float) -> dict[str, object]:
    return {"type": kind, "minimum": least} | ({"maximum": most} if most < inf else {})


def whole(least: int, most: float = inf, unit: str = "") -> Rule[int]:
    """Whole numbers from `least` to `most`; a float without a fraction is one, because Lua may give it."""

    def read_whole(value: object) -> int:
        found = _finite(value)
        if found is None or not least <= found <= most or found != int(found):
            raise NotThisError
        return int(found)

    return Rule(f"a whole number {_span(least, most, unit)}", read_whole, int, _range_schema("integer", least, most))


def number(least: float, most: float = inf, unit: str = "", *, above: bool = False) -> Rule[float]:
    """Numbers from `least` to `most`; with `above`, greater than `least`."""

    def read_number(value: object) -> float:
        found = _finite(value)
        if found is None or not least <= found <= most or (above and found == least):
            raise NotThisError
        return float(found)

    span = _span(least, most, unit)
    if above:
        span = span.replace("of at least", "greater than").replace("from 0 to", "greater than 0, at most")
    schema = _range_schema("number", least, most)
    if above:
        schema["exclusiveMinimum"] = schema.pop("minimum")
    return Rule(f"a number {span}", read_number, float, schema)


def switch() -> Rule[bool]:
    """True or False; 1 and 0 are taken for them."""

    def read_switch(value: object) -> bool:
        if value not in (0, 1):
            raise NotThisError
        return bool(value)

    return Rule("true or false", read_switch, bool, {"type": "boolean"})


@overload
def instance(says: str, kind: type[T]) -> Rule[T]: ...
@overload
def instance(says: str, kind: type[T], other: type[S]) -> Rule[T | S]: ...
def instance(says: str, kind: type[T], other: type[S] | None = None) -> Rule[T | S]:
    """Objects of this type, or of the other one, as they are."""

    def read_instance(value: object) -> T | S:
        if isinstance(value, kind) or (other is not None and isinstance(value, other)):
            return value
        raise NotThisError

    return Rule(says, read_instance)


def text() -> Rule[str]:
    """Texts."""
    return replace(instance("a text", str), schema={"type": "string"})


def texts() -> Rule[tuple[str, ...]]:
    """Texts without commas: several, or one text with commas between them."""

    def read_texts(value: object) -> tuple[str, ...]:
        several = value.split(",") if isinstance(value, str) else value
        if not isinstance(several, list | tuple) or not all(isinstance(one, str) for one in several):
            raise NotThisError
        return tuple(one.strip() for one in several if one.strip())

    schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    return Rule("a list of texts, or one text with commas between", read_texts, schema=schema)


def path() -> Rule[str]:
    """Paths of files, as str."""

    def read_path(value: object) -> str:
        if not isinstance(value, str | bytes | os.PathLike) or not os.fspath(value):
            raise NotThisError
        return os.fsdecode(value)

    return Rule("the path of a file", read_path, schema={"type": "string", "minLength": 1})


def function() -> Rule[Callable[..., Any]]:
    """What can be called."""

    def read_function(value: object) -> Callable[..., Any]:
        if not callable(value):
            raise NotThisError
        return value

    return Rule("a function", read_function)


def choice(*words: T) -> Rule[T]:
    """One of these values."""

    def read_choice(value: object) -> T:
        for word in words:
            if value == word and not isinstance(value, bool):
                return word
        raise NotThisError

    listed = ", ".join(map(repr, words))
    return Rule(f"one of {listed}" if len(words) > 1 else listed, read_choice, type(words[0]), {"enum": list(words)})


def optional(rule: Rule[T]) -> Rule[T | None]:
    """None, or what `rule` takes."""
    return Rule(f"{rule.says}, or nothing", lambda one: None if one is None else rule.read(one), rule.kind, rule.schema)


def duration(least_s: float = 0.0, most_s: float = inf) -> Rule[float]:
    """Times in seconds, given as a text such as "10m", or as a number."""
    span = f" from {least_s:g} to {most_s:g} s" if most_s < inf else ""
    read_duration = _quantity(parse_duration, least_s, most_s)
    return Rule(f"a time{span} such as '200 ms', '10m', '2h', '7d'", read_duration, float, _QUANTITY_SCHEMA)


def positive_duration() -> Rule[float]:
    """Times above 0, in seconds."""
    read_duration = _quantity(parse_duration, 1e-6, inf)
    return Rule("a time above 0 such as '200 ms', '10m', '2h', '7d'", read_duration, float, _QUANTITY_SCHEMA)


def size(least_bytes: int = 0) -> Rule[int]:
    """Bytes, given as a text such as "64MB", or as a number."""
    span = f" of at least {least_bytes} bytes" if least_bytes else ""
    read_size = _quantity(parse_size, least_bytes, inf)
    return Rule(f"a size{span} such as '64MB', '20GB', '512MiB'", read_size, int, _QUANTITY_SCHEMA)


_QUANTITY_SCHEMA = {"anyOf": [{"type": "string", "pattern": f"^{_NUMBER.pattern}$"}, {"type": "number", "minimum": 0}]}


def _quantity(parse: Callable[[object], N], least: float, most: float) -> Callable[[object], N]:
    def read_quantity(value: object) -> N:
        try:
            found = parse(value)
        except ArgumentError:
            raise NotThisError from None
        if not least <= found <= most:
            raise NotThisError
        return found

    return read_quantity


def parse_duration(value: object) -> float:
    """Returns seconds.

    Args:
        value: a text such as "200 ms", "10m", "7d", "1 hour"; or a number of seconds.

    Raises:
        ArgumentError: it is none, or negative.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf:
        return float(value)
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    unit = match[2].lower() if match else ""
    factor = _SECONDS.get(unit) or _SECONDS.get(unit.removesuffix("s"))
    if not match or not factor:
        raise ArgumentError(f"{value!r} is no duration; it's a number and a unit, such as '200 ms', '10m', '2h', '7d'")
    return float(match[1]) * factor


def parse_size(value: object) -> int:
    """Returns bytes.

    Args:
        value: a text such as "64MB" (10⁶), "64MiB" (2²⁰), "20 GB"; or a number of bytes.

    Raises:
        ArgumentError: it is none, or negative.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    factor = _BYTES.get(match[2].lower()) if match else None
    if not match or not factor:
        raise ArgumentError(f"{value!r} is no size; it's a number and a unit, such as '64MB', '20GB', '512MiB'")
    return int(float(match[1]) * factor)
