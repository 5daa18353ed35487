"""Values of settings from flags, the environment and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smqrt.errors import StartError
from smqrt.settings.option_types import Path as SettingPath
from smqrt.settings.option_types import environment_name, flag, value_at
from smqrt.settings.sources import FORMER_NAMES, Sources, from_file, rows, setting_at, settings_file
from tests.settings.house import Door, House, Lock, file, house

__all__ = ["house"]


def test_precedence_is_flag_environment_file_mako_conf_default(tmp_path: Path) -> None:
    flags: dict[tuple[str, ...], object] = {("port",): 1}
    environment = {"SMQRT_PORT": "2", "SMQRT_HOST": "b", "SMQRT_PAGES__MANUAL": "off", "SMQRT_CERT": ""}
    path = file(tmp_path, 'port = 3\nhost = "c"\n\nhosts = "c"\n[pages]\nmanual = true\n')
    made = Sources(flags, environment, path, {"port": 4, "host": "d", "hosts": "d", "cert": "d"}, "mako.conf").read()
    found = made.settings
    assert (found.port, found.host, found.hosts, found.cert, found.pages.manual) == (1, "b", "c", "d", False)
    assert [row for row in rows(made) if row[2] != "default"] == [
        ("host", "b", "SMQRT_HOST"),
        ("port", 1, "--port"),
        ("cert", "d", "mako.conf"),
        ("hosts", "c", f"{path}, line 4"),
        ("pages.manual", False, "SMQRT_PAGES__MANUAL"),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\nprot = 80", r"smqrt.toml, line 2: prot is not a setting; did you mean port\?"),
        ("port 80", "smqrt.toml, line 1 is not valid TOML: Expected"),
        ("port = 80\nport = 81", "smqrt.toml, line 2: this name is set twice"),
        ("[pages]\n# text\nmanuel = 1", r"line 3: pages.manuel is not a setting; did you mean pages.manual\?"),
        ("manual = true", r"line 1: manual is not a setting; did you mean pages.manual\?"),
        ("pages = true", r"line 1: pages is a table of settings: write \[pages\] and its settings below"),
        ('hosts = """\na"""\nport = "x"', "line 3: port must be a whole number from 0 to 65535, not 'x'"),
        ("pages.manual = 7", "line 1: pages.manual must be true or false, not 7"),
        ("[page]\nmanual = true", r"line 2: page.manual is not a setting; did you mean pages.manual\?"),
        ("[[port]]\nx = 1", r"line 1: port must be a whole number from 0 to 65535, not \[\{'x': 1\}\]"),
        ("x = " + "[" * 5000, "is not valid TOML"),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(StartError, match=sentence):
        Sources(file=file(tmp_path, text)).read()


def test_a_missing_file_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="can't be read: No such file"):
        Sources(file=tmp_path / "smqrt.toml").read()


def test_wrong_variables_and_flags_are_named() -> None:
    with pytest.raises(StartError) as told:
        Sources({("drain_s",): "-1"}, {"SMQRT_PORT": "x", "SMQRT_RELOAD": "maybe"}).read()
    assert str(told.value).splitlines() == [
        "SMQRT_PORT: port must be a whole number from 0 to 65535, not 'x'.",
        "SMQRT_RELOAD: reload must be true or false, not 'maybe'.",
        "--drain-s: drain_s must be a number of at least 0, not '-1'.",
    ]


def test_tables_that_users_name(house: type[House], tmp_path: Path) -> None:
    path = file(tmp_path, '[door.Main]\nport = 2\n[door."a/#"]\nword = "x"\n[door.plain]\n')
    environment = {"SMQRT_DOOR__MAIN__PORT": "3", "SMQRT_DOOR__BACK__PORT": "4"}
    environment |= {"SMQRT_NAMES": "a, b", "SMQRT_AFTER_S": "2m"}
    made = Sources({("lock", "kind"): "abus"}, environment, path).read()
    assert made.settings == House(  # type: ignore[comparison-overlap]  # stands for Settings here
        after_s=120, names=("a", "b"), lock=Lock("abus"),
        door={"Main": Door(3), "a/#": Door(word="x"), "plain": Door(), "back": Door(4)},
    )  # fmt: skip
    places = {name: place for name, _, place in rows(made) if name.startswith("door")}
    assert (places["door.Main.port"], places["door.a/#.word"]) == ("SMQRT_DOOR__MAIN__PORT", f"{path}, line 4")
    assert [value for name, value, _ in rows(made) if name == "door.a/#.word"] == ["********"]


def test_a_wrong_table_that_a_user_names(house: type[House], tmp_path: Path) -> None:
    with pytest.raises(StartError) as told:
        Sources(file=file(tmp_path, "[door.main]\nprot = 2\n[door.back]\nport = -1\n[door]\nport = 4\n")).read()
    assert [line.partition("smqrt.toml, ")[2] for line in str(told.value).splitlines()] == [
        "line 2: door.main.prot is not a setting; did you mean door.NAME.port?",
        "line 4: door.back.port must be a whole number of at least 0, not -1.",
        "line 6: door.port is not a setting; did you mean door.NAME.port?",
    ]


def test_secrets_may_stand_in_files(house: type[House], tmp_path: Path) -> None:
    secret = tmp_path / "word"
    secret.write_text("open sesame\n")
    made = Sources(environment={"SMQRT_WORD_FILE": str(secret), "SMQRT_DOOR__A__WORD_FILE": str(secret)}).read()
    assert (made.settings.word, made.settings.door["a"].word) == ("open sesame", "open sesame")  # type: ignore[attr-defined]
    for environment, sentence in (
        ({"SMQRT_WORD_FILE": "/nowhere"}, "SMQRT_WORD_FILE: /nowhere can't be read: No such file"),
        ({"SMQRT_WORD_FILE": "/dev/null", "SMQRT_WORD": "x"}, "SMQRT_WORD_FILE: SMQRT_WORD is also set"),
    ):
        with pytest.raises(StartError, match=sentence):
            Sources(environment=environment).read()


def test_a_wrong_secret_is_not_shown(house: type[House], tmp_path: Path) -> None:
    with pytest.raises(StartError, match="word must be a string, or nothing, not the value given"):
        Sources(file=file(tmp_path, "word = 12345")).read()


@pytest.mark.parametrize(("former", "present"), FORMER_NAMES.items(), ids=map(".".join, FORMER_NAMES))
def test_a_former_name_works_and_warns_once(former: SettingPath, present: SettingPath, tmp_path: Path) -> None:
    old, new = ".".join(former), ".".join(present)
    value: object = "keys" if old == "key_file" else 12
    written = file(tmp_path, "".join(f"[{group}]\n" for group in former[:-1]) + f"{former[-1]} = {json.dumps(value)}\n")
    ways = (
        (Sources(file=written), f"{written}, line {len(former)}"),
        (Sources(environment={environment_name(former): str(value)}), environment_name(former)),
        (Sources({former: value}), flag(former)),
    )
    for source, place in ways:
        found = source.read()
        assert value_at(found.settings, present) == value
        assert found.warnings == (f"{place}: {old} is now {new}; the former name works for one release",)
        assert [row for row in rows(found) if row[2] != "default"] == [(new, value, place)]


def test_the_present_name_wins_over_the_former_one(tmp_path: Path) -> None:
    path = file(tmp_path, "[drain]\ntimeout_s = 1\nmost_s = 2\n")
    found = Sources({("drain", "most_s"): 3.0}, {"SMQRT_DRAIN__TIMEOUT_S": "4"}, path).read()
    assert found.settings.drain.timeout_s == 3  # a flag wins, by either name
    assert found.warnings[0].endswith(
        "line 3: drain.most_s is now drain.timeout_s, which is also set; this value is ignored"
    )
    assert len(found.warnings) == 2


def test_unknown_variables_are_reported() -> None:
    environment = {"SMQRT_PAGES_MANUAL": "1", "SMQRT_XYZZY": "1", "SMQRT_KERNELS": "1", "PATH": "x"}
    assert Sources(environment=environment).read().warnings == (
        "SMQRT_PAGES_MANUAL is not a setting; did you mean SMQRT_PAGES__MANUAL?",
        "SMQRT_XYZZY is not a setting; `smqrt help settings` lists them all.",
    )


# ---- smqrt.toml


def test_the_settings_file_is_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings_file() is None
    assert settings_file("other.toml") == Path("other.toml"), "a missing one is reported when it is read"
    file(tmp_path, "")
    assert settings_file() == Path("smqrt.toml")


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("\n# text\nport = 1\n", {("port",): 3}),
        ('names = [\n"a",\n# ]\n"b"\n]\nsize = 2\n', {("names",): 1, ("size",): 6}),
        ('word = """\nsize = 1\n"""\nsize = 2\n', {("word",): 1, ("size",): 4}),
        ('lock.kind = "abus"\n', {("lock", "kind"): 1}),
        ("door = {a = {port = 1}}\n", {("door", "a", "port"): 1}),
        ("[door]\na.port = 1\n[door.b]\n", {("door", "a", "port"): 2, ("door", "b"): 3}),
        ("\ufeffsize = 1\n", {("size",): 1}),
    ],
)
def test_values_have_the_line_of_their_statement(
    house: type[House], tmp_path: Path, text: str, places: dict[SettingPath, int]
) -> None:
    path = tmp_path / "smqrt.toml"
    path.write_text(text, "utf-8")
    found = {one.path: one.place for one in from_file(path)}
    assert found == {name: f"{path}, line {line}" for name, line in places.items()}


def test_a_file_not_in_utf_8_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "smqrt.toml"
    path.write_bytes(b'host = "\xff"')
    with pytest.raises(StartError, match="is not valid TOML: 'utf-8' codec can't decode byte 0xff"):
        Sources(file=path).read()


def test_a_statement_without_end_has_the_last_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"smqrt.toml, line 2 is not valid TOML: "):
        Sources(file=file(tmp_path, 'port = 1\nhosts = ["a",\n')).read()


def test_settings_of_named_tables_have_any_name(house: type[House]) -> None:
    for path, name in ((("size",), "size"), (("door", "any", "port"), "door.NAME.port")):
        setting = setting_at(path)
        assert setting is not None
        assert setting.name == name
    for unknown in (("sise",), ("door", "any", "prot"), ("door", "any"), ("lock", "any", "kind")):
        assert setting_at(unknown) is None


# ---- the environment


def test_variables_of_kubernetes_are_no_settings() -> None:
    environment = {
        "SMQRT_PORT": "tcp://10.0.0.1:9357",
        "SMQRT_SERVICE_HOST": "10.0.0.1",
        "SMQRT_SERVICE_PORT_HTTP": "9357",
        "SMQRT_PORT_9357_TCP_ADDR": "10.0.0.1",
    }
    found = Sources(environment=environment).read()
    assert found.warnings == ()
    assert found.places == {}


def test_variables_find_the_table_of_any_case(house: type[House], tmp_path: Path) -> None:
    path = file(tmp_path, "[door.Main]\n[door.MAin]\n[door.MAIn]\n[door.MAIN]\n")
    made = Sources(environment={"SMQRT_DOOR__MAIN__PORT": "3"}, file=path).read()
    doors = made.settings.door  # type: ignore[attr-defined]  # stands for Settings here
    assert (doors["Main"].port, doors["MAIN"].port) == (1, 3), "the one with this very name first"
    made = Sources(environment={"SMQRT_DOOR__Back__PORT": "3"}).read()
    assert list(made.settings.door) == ["Back"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "secret"),
    [(b"a\n", "a"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b" a", " a"), (b"", "")],
)
def test_a_secret_from_a_file_loses_one_line_end(
    house: type[House], tmp_path: Path, content: bytes, secret: str
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    assert Sources(environment={"SMQRT_WORD_FILE": str(path)}).read().settings.word == secret  # type: ignore[attr-defined]


def test_only_secrets_stand_in_files(house: type[House], tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\xff")
    with pytest.raises(StartError, match="SMQRT_WORD_FILE: .*/secret is not UTF-8 text"):
        Sources(environment={"SMQRT_WORD_FILE": str(path)}).read()
    (warning,) = Sources(environment={"SMQRT_SIZE_FILE": str(path)}).read().warnings
    assert warning == "SMQRT_SIZE_FILE is not a setting; did you mean SMQRT_SIZE?"
