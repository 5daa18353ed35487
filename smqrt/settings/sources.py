"""Values of settings from flags, environment and files, each with its place.

Sources in descending order of precedence: flags, environment, `smqrt.toml`, mako.conf, defaults. Errors name the place
of a value: the flag, the variable, or the file and line.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from smqrt.errors import ArgumentError, StartError
from smqrt.settings.option_types import ENVIRONMENT, NAME, Setting, environment_name, flag, value_at, with_values
from smqrt.settings.server_settings import FILE_NAME, Settings, named_table, table

OTHER_VARIABLES = {"SMQRT_CREDENTIALS", "SMQRT_FAULT", "SMQRT_HOSTILE_TABLE", "SMQRT_JOURNAL_TOKEN", "SMQRT_KERNELS"}
"""Variables of the package and its tests that are not settings."""
FORMER_NAMES = {
    ("drain", "most_s"): ("drain", "timeout_s"),
    ("key_file",): ("tpm_key_file",),
    ("limits", "publish_bytes"): ("limits", "publish_bytes_per_s"),
    ("limits", "queues_bytes"): ("limits", "total_queue_bytes"),
}
"""The former and the current paths of renamed settings. A former name works for one release, with a warning."""
DEFAULT = "default"
_TOML_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)")
_STATEMENT_END = re.compile(r"""\]|""\"|'''""")
"""The possible ends of a statement that spans several lines: the end of a list, or of a string."""
_KUBERNETES = re.compile(r"SMQRT_(SERVICE_(HOST|PORT(_.*)?)|PORT_\d+_(TCP|UDP)(_.*)?)")
"""Variables that Kubernetes sets in all containers for a service named smqrt, beside SMQRT_PORT=tcp://..."""
_MAX_SECRET_BYTES = 1 << 20  # larger than any key; a wrong path may name a device of unlimited size


def settings_file(given: str | Path | None = None) -> Path | None:
    """Return the path of the settings file: `given`, else smqrt.toml in the working folder; None without a file."""
    if given:
        return Path(given)
    return Path(FILE_NAME) if Path(FILE_NAME).is_file() else None


@dataclass(frozen=True)
class Given:
    """A value from a source.

    Attributes:
        path: the full path of the setting: ("listener", "main", "port").
        value: the value before its check.
        place: the place for messages: "smqrt.toml, line 3".
    """

    path: tuple[str, ...]
    value: object
    place: str


@dataclass(frozen=True)
class Configuration:
    """The settings of a server, with their places.

    Attributes:
        settings: the values.
        places: the places of the values that are not defaults, by the path of the setting.
        files: the files that were read.
        warnings: the warnings, one line each.
    """

    settings: Settings
    places: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sources:
    """The sources of settings. `read` may be called again when files have changed.

    Attributes:
        flags: values by the path of the setting.
        environment: all environment variables.
        file: a smqrt.toml; None for none.
        fallback: values of a mako.conf by the names of settings.
        fallback_place: the name of the mako.conf in messages.
    """

    flags: Mapping[tuple[str, ...], object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    fallback: Mapping[str, object] = field(default_factory=dict)
    fallback_place: str = "mako.conf"

    def read(self) -> Configuration:
        """Read and check all settings.

        Raises:
            StartError: a file can't be read, or values are invalid: a line for each fault.
        """
        warnings: list[str] = []
        given = [Given(tuple(name.split(".")), value, self.fallback_place) for name, value in self.fallback.items()]
        given += _with_current_names(from_file(self.file), warnings) if self.file else []
        groups, named = _named_groups(), dict[str, set[str]]()
        for one in given:
            if one.path[0] in groups and len(one.path) > 1:
                named.setdefault(one.path[0], set()).add(one.path[1])
        given += _with_current_names(from_environment(self.environment, named, warnings), warnings)
        flags = [Given(path, value, flag(path)) for path, value in self.flags.items()]
        given += _with_current_names(flags, warnings)
        checked: dict[tuple[str, ...], object] = {}
        faults: list[str] = []
        for one in given:  # values of later sources replace those of earlier ones; all are checked
            try:
                checked[one.path] = _checked(one)
            except ArgumentError as error:
                faults.append(f"{one.place}: {error}")
        if faults:
            raise StartError("\n".join(faults))
        places = {one.path: one.place for one in given}
        files = (self.file,) if self.file else ()
        return Configuration(with_values(Settings(), checked), places, files, tuple(warnings))


def _with_current_names(source: Iterable[Given], warnings: list[str]) -> list[Given]:
    """Replace former names in the values of one source. A current name in the same source takes precedence."""
    given = {one.path: one for one in source}
    for former, current in FORMER_NAMES.items():
        if (one := given.pop(former, None)) is None:
            continue
        names = f"{'.'.join(former)} is now {'.'.join(current)}"
        if current in given:
            warnings.append(f"{one.place}: {names}, which is also set; this value is ignored")
        else:
            given[current] = replace(one, path=current)
            warnings.append(f"{one.place}: {names}; the former name works for one release")
    return list(given.values())


def setting_at(path: tuple[str, ...]) -> Setting | None:
    """Return the setting of a path; None for an unknown path."""
    if path in (known := _by_path()):
        return known[path]
    return known.get((path[0], NAME, *path[2:])) if len(path) > 2 else None


def _by_path() -> dict[tuple[str, ...], Setting]:
    return {setting.path: setting for setting in (*table(), *named_table())}


def _named_groups() -> set[str]:
    return {setting.path[0] for setting in named_table()}


def _checked(given: Given) -> object:
    setting = setting_at(given.path)
    if setting is None:
        if given.value == {} and len(given.path) == 2 and given.path[0] in _named_groups():
            return given.value  # an empty table, whose settings have their defaults
        raise ArgumentError(_unknown(given.path))
    name = ".".join(given.path)
    try:
        return setting.rule.check(name, given.value)
    except ArgumentError:
        if setting.secret:
            raise ArgumentError(f"{name} must be {setting.rule.requirement}, not the value given.") from None
        raise


def _unknown(path: tuple[str, ...]) -> str:
    """Return the error for an unknown name, with the nearest known one."""
    name, known = ".".join(path), [setting.name for setting in (*table(), *named_table())]
    if any(one.startswith(f"{name}.") for one in known):
        header = f"{name}.{NAME}" if name in _named_groups() else name
        return f"{name} is a table of settings: write [{header}] and its settings below."
    last = name.rpartition(".")[2]
    near = (
        [one for one in known if one.rpartition(".")[2] == last]
        or difflib.get_close_matches(name[:64], known, 1)  # cut, because this takes quadratic time
        or [one for one in known if difflib.get_close_matches(last[:64], [one.rpartition(".")[2]], 1)]
    )
    hint = f"; did you mean {near[0]}?" if near else "; `smqrt help settings` lists them all."
    return f"{name} is not a setting{hint}"


# ---- smqrt.toml


def from_file(path: Path) -> list[Given]:
    """Read a smqrt.toml.

    Raises:
        StartError: the file can't be read, or is not TOML.
    """
    try:
        text = path.read_text("utf-8-sig")  # some editors write a byte order mark
        values = tomllib.loads(text)
    except OSError as error:
        raise StartError(f"{path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise StartError(f"{path} is not valid TOML: {error}.") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        at = _TOML_PLACE.search(str(error))
        # An error at the end of the document has no line number: it is that of the last line.
        place = f"{path}, line {at[1] or text.count(chr(10), 0, -1) + 1}" if at else f"{path}"
        message = _TOML_PLACE.sub("", str(error))
        if message.startswith(("Cannot overwrite", "Cannot declare")):
            raise StartError(f"{place}: this name is set twice.") from None
        raise StartError(f"{place} is not valid TOML: {message}.") from None
    lines = _lines(text)
    return [Given(one, value, f"{path}, line {_line_of(one, lines)}") for one, value in _leaves(values)]


def _leaves(values: Mapping[str, object], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the values of settings. Unknown names count as tables, so that errors name the values in them."""
    for name, value in values.items():
        path = (*above, name)
        is_table = setting_at(path) is None and (
            len(path) < 3 or any(one[: len(path)] in (path, (path[0], NAME, *path[2:])) for one in _by_path())
        )
        if isinstance(value, dict) and value and is_table:
            yield from _leaves(value, path)
        else:
            yield path, value


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the first line of each name in a valid document.

    tomllib has no line numbers, so each statement is parsed alone.
    """
    found: dict[tuple[str, ...], int] = {}
    header: tuple[str, ...] = ()
    statement, begin = "", 1
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        is_first = not statement
        begin = number if is_first else begin
        statement += line
        if not (is_first or _STATEMENT_END.search(line)):
            continue  # else a long list would be parsed again at each of its lines
        try:
            values = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # the statement continues in the next line
        names = tuple(_names(values))
        if statement.lstrip().startswith("["):
            header = names[0] if names else ()
            names = ((),)
        found |= {(*header, *name): begin for name in names if (*header, *name) not in found}
        statement = ""
    return found


def _names(values: Mapping[str, object], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of a document's innermost values and empty tables."""
    for name, value in values.items():
        value = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        if isinstance(value, dict) and value:
            yield from _names(value, (*above, name))
        else:
            yield *above, name


def _line_of(path: tuple[str, ...], lines: Mapping[tuple[str, ...], int]) -> int:
    """Return the line of a value, else of its table, else of the first value in it."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return min((line for one, line in lines.items() if one[: len(path)] == path), default=1)


# ---- the environment


def from_environment(
    variables: Mapping[str, str], named: Mapping[str, Iterable[str]], warnings: list[str]
) -> list[Given]:
    """Read the variables `SMQRT_...`; empty ones are ignored.

    Args:
        variables: the whole environment.
        named: the names of tables in the file, by their group: a variable may set a value in such a table.
        warnings: a line is appended for each unknown variable.

    Raises:
        StartError: the file of a secret can't be read, or the secret is set twice.
    """
    known = {environment_name(setting.path): setting for setting in table()}
    by_path = _by_path()
    known |= {
        environment_name(former): replace(by_path[new], path=former)
        for former, new in FORMER_NAMES.items()
        if new in by_path
    }
    found: list[Given] = []
    for variable, text in sorted(variables.items()):
        if not variable.startswith(ENVIRONMENT) or not text or variable in OTHER_VARIABLES:
            continue
        if _KUBERNETES.fullmatch(variable) or (variable == "SMQRT_PORT" and text.startswith(("tcp://", "udp://"))):
            continue
        setting = known.get(variable)
        path = setting.path if setting else _path_of(variable, named)
        if setting is None and path:
            setting = setting_at(path)
        if setting and path:
            found.append(Given(path, setting.rule.from_text(text), variable))
        elif secret := _of_file(variable, known, named):
            if variables.get(variable.removesuffix("_FILE")):
                raise StartError(f"{variable}: {variable.removesuffix('_FILE')} is also set; set only one of them.")
            found.append(Given(secret, _content(variable, text), variable))
        else:
            # Without the common prefix, which would make all names similar.
            names = [one.removeprefix(ENVIRONMENT) for one in known]
            near = difflib.get_close_matches(variable.removeprefix(ENVIRONMENT)[:64], names, 1)
            hint = f"; did you mean {ENVIRONMENT}{near[0]}?" if near else "; `smqrt help settings` lists them all."
            warnings.append(f"{variable} is not a setting{hint}")
    return found


def _path_of(variable: str, named: Mapping[str, Iterable[str]]) -> tuple[str, ...] | None:
    """Return the path of a setting in a named table: SMQRT_LISTENER__MAIN__PORT is listener.main.port."""
    group, _, rest = variable.removeprefix(ENVIRONMENT).partition("__")
    name, _, last = rest.rpartition("__")
    if not name:
        return None
    group, last = group.lower(), last.lower()
    # Variables are in upper case, and the names of tables in a file may not be.
    same = [one for one in named.get(group, ()) if one.lower() == name.lower()]
    name = name if name in same else same[0] if same else name.lower() if name.isupper() else name
    path = (group, name, last)
    return path if setting_at(path) else None


def _of_file(variable: str, known: Mapping[str, Setting], named: Mapping[str, Iterable[str]]) -> tuple[str, ...] | None:
    """Return the path of the secret whose file a variable names."""
    plain = variable.removesuffix("_FILE")
    if plain == variable:
        return None
    path = known[plain].path if plain in known else _path_of(plain, named)
    setting = setting_at(path) if path else None
    return path if setting and setting.secret else None


def _content(variable: str, path: str) -> str:
    try:
        with open(path, "rb") as file:
            secret = file.read(_MAX_SECRET_BYTES).decode()
    except OSError as error:
        raise StartError(f"{variable}: {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise StartError(f"{variable}: {path} is not UTF-8 text.") from None
    return secret.removesuffix("\n").removesuffix("\r")  # editors add a line end to the last line


def rows(configuration: Configuration) -> Iterator[tuple[str, object, str]]:
    """Yield name, value and place of each setting, in the order of the manual."""
    named = {path for path in configuration.places if path not in _by_path()}
    for path in [*(setting.path for setting in table()), *sorted(named)]:
        setting, value = setting_at(path), value_at(configuration.settings, path)
        if setting and setting.secret and value not in (None, ""):
            value = "********"
        yield ".".join(path), value, configuration.places.get(path, DEFAULT)
