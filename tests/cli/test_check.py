"""`smqrt check`: what it finds in an application, and that strange files don't hold it up."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smqrt.apps.lua import api as lua_api
from smqrt.apps.lua.check import check_application, read_table, tokens
from smqrt.apps.lua.vm import Services, Vm
from smqrt.cli.check import check

TABLE = """
| call | there | notes |
|---|---|---|
| `ba.there`, `ba.create.dir`, `ba.json.encode`, `ba.bytearray` | yes | |
| `ba.openio`, `io:open()`, `ba.socket.connect`, `sock:read()`, `file:read()` | yes | |
| `ba.gone`, `ba.create.wfs`, `ba.tpm` | not yet | see [the page](page.md) |
| `request:data()`, `response:write()`, `dir:insert()` | yes | |
| `dir:setauth()`, `response:setdigest()` | not yet | |
| `mako.udb` | with users | |
| `os.exit` | no | |
| `require "httpc"` | yes | |
| `require "lpeg"` | not yet | |
| `require "acme/dns"` | not yet | see [the page](page.md) |
"""

PRELOAD = """
local httpc, own, third = require "httpc", require("own.part"), require'nowhere'
local ok, lpeg = pcall(require, "lpeg")
if ba.tpm then ba.tpm.jsonuser "x" end
local create = ba.create -- ba.gone()
local d, e = create.dir "x", create.wfs "y"
d = ba.create.dir "x"
d:setauth(nil) d:insert() d:nothing() app.dir:setauth()
print("ba.gone()", [[ba.gone()]], 'ba.gone()')
--[==[ ba.gone()
]==] ba.gone()
function ba.mine() end ba.mine() ba.other = 1 print(ba.other)
ba.there() ba.json.encode{} ba.json.nothing() ba.bytearray.anything() mako.udb() _G.ba.gone "x"
local sock = ba.socket.connect("host", 1) sock:read() sock:nothing()
local f = io:open "x" f:read()
f:nothing()
os.exit() string.format "x" x.ba.gone() y:sub(1) dir:sub(1)
local alias = ba.gone
local response = up:response() response:setdigest()
"""


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smqrt.cli.check.read_table", lambda: read_table(TABLE))


def test_what_plain_lua_has_is_there(tmp_path: Path) -> None:
    """The manual's own table: what applications call of `io` and `os`."""
    names = ["io.popen", "os.execute", "os.tmpname", "os.remove", "os.rename", "os.setlocale"]
    page = read_table()
    assert set(names) <= page.supported
    machine = Vm()
    lua_api.install(machine, Services())
    assert [name for name in names if machine.eval(f"return type({name})") != (b"function",)] == []
    write(tmp_path, **{".preload": "".join(f"_G.{name} 'x' {name} 'x'\n" for name in names) + "os.exit()"})
    report = check_application(tmp_path, page)
    assert [(finding.line, finding.kind, finding.name) for finding in report.findings] == [(7, "absent", "os.exit")]


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(check, [str(word) for word in words])


def write(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


FILES = {
    ".preload": PRELOAD,
    ".lua/own/part.lua": "return {}",
    "page.lsp": "<p>ba.gone()</p>\n<?lsp cmd:data() request:write()\nresponse:setdigest() ?>\n<?lsp= ba.gone() ?>",
    "bad.lsp": "one\n<?lsp if ?>",
    "open.lsp": "one\ntwo <?lsp print(1)",
    "bad.xlua": "\n\nx = = 1",
    "notes.txt": "ba.gone()",
}


def test_every_kind_of_finding(tmp_path: Path) -> None:
    result = run(write(tmp_path, **FILES))
    assert result.exit_code == 1, result.output
    lines = [line.removeprefix(f"{tmp_path}/") for line in result.output.splitlines()]
    assert lines == [
        '.preload:2: require "nowhere" is unknown',
        '.preload:3: require "lpeg" is absent, but the file tests for it',
        ".preload:4: ba.tpm.jsonuser is absent, but the file tests for it (see the page)",
        ".preload:6: ba.create.wfs is absent (see the page)",
        ".preload:8: dir:setauth is absent",
        ".preload:8: dir:nothing is unknown",
        ".preload:11: ba.gone is absent (see the page)",
        ".preload:13: ba.gone is absent (see the page)",
        ".preload:13: ba.json.nothing is unknown",
        ".preload:14: sock:nothing is unknown",
        ".preload:16: file:nothing is unknown",
        ".preload:17: os.exit is absent",
        ".preload:18: ba.gone is absent (see the page)",
        "bad.lsp:2: syntax error: unexpected symbol near <eof>",
        "bad.xlua:3: syntax error: unexpected symbol near '='",
        "open.lsp:2: syntax error: start tag without end tag at line# 2",
        "page.lsp:3: response:setdigest is absent",
        "page.lsp:4: ba.gone is absent (see the page)",
        "6 files read: 10 absent, 5 unknown, 3 with syntax errors",
    ]


@pytest.mark.parametrize("spelling", ["acme/dns", "acme.dns"])
def test_modules_in_folders_are_known_in_both_spellings(tmp_path: Path, spelling: str) -> None:
    result = run(write(tmp_path, **{".preload": f'require "{spelling}"'}))
    assert f'.preload:1: require "{spelling}" is absent (see the page)' in result.output


def test_json_and_zip_files(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr(".preload", "ba.gone()\n")
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as archive:
        archive.write(tmp_path / "app.zip", "inner.zip")
    wanted = {"file": ".preload", "line": 1, "finding": "absent", "call": "ba.gone", "note": "see the page"}
    result = run("--json", tmp_path / "app.zip")
    assert (json.loads(result.output), result.exit_code) == (wanted | {"tested": False}, 1)
    assert "app.zip/.preload:1: ba.gone is absent" in run(tmp_path).output
    assert run(tmp_path / "outer.zip").output == "0 files read: all calls are supported\n"


def test_an_application_that_lacks_nothing(tmp_path: Path) -> None:
    result = run(write(tmp_path, **{".preload": "ba.there()", "odd": "ba.gone()", "a.lsp": "<?lsp ba.unheard() ?>"}))
    assert result.exit_code == 0, "what nobody knows is told, no more"
    assert result.output.endswith("2 files read: 1 unknown\n")
    (tmp_path / "a.lsp").unlink()
    assert run(tmp_path).output == "1 file read: all calls are supported\n"


def test_nothing_to_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", write(tmp_path, x="no archive") / "x"):
        result = run(path)
        assert result.exit_code == 1
        assert "neither a folder nor a ZIP file" in str(result.exception)


def test_hostile_files(tmp_path: Path) -> None:
    texts = [
        "x" * 3_000_000,
        "((" * 50_000,
        "'\n" * 100_000,
        "[=[" * 100_000,
        "a.b:" * 50_000,
        "\x1b[2J\0\xff",
        "--[[" * 99_999,
    ]
    files = {f"{number}.lua": text for number, text in enumerate(texts)}
    (write(tmp_path, **files) / "loop").symlink_to(tmp_path)
    began_s = time.perf_counter()
    result = run(tmp_path)
    assert time.perf_counter() - began_s < 20
    assert "0.lua: not read: toomuchdata: a file may have 2 MiB" in result.output
    assert "\x1b" not in result.output
    assert result.output.endswith("6 files read: 6 with syntax errors, 1 not read\n"), "each of them once"


def test_tokens_know_their_lines() -> None:
    source = 'a = "x\\\ny" -- c\n--[[ d\n]] b [==[\n]]]==] 0x1F z'
    found = [(token.kind, token.line) for token in tokens(source)]
    assert found == [
        ("name", 1),
        ("mark", 1),
        ("string", 1),
        ("name", 4),
        ("string", 4),
        ("number", 5),
        ("name", 5),
    ]


def test_modules_of_mako_that_are_absent_here_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the table of the manual
    absent = ("re", "pb", "protoc", "soap", "basoap", "asyncresp", "lpeg")
    there = ("modbus.client", "SparkplugB", "socket.smtp", "xmlrpc")
    source = "\n".join(f'require "{name}"' for name in (*absent, *there))
    lines = run(write(tmp_path, **{".preload": source})).output.splitlines()
    assert [line.partition(" is absent")[0] for line in lines[:-1]] == [
        f'{tmp_path}/.preload:{number}: require "{name}"' for number, name in enumerate(absent, 1)
    ]
    assert lines[-1] == "1 file read: 7 absent"
