"""The signatures of the Lua API: those of the functions of a running server, and the annotations made from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lupa import lua54

from smqrt.apps.lua import signatures
from smqrt.apps.lua.api import smq_client, smq_hub
from smqrt.apps.lua.api.dirs import to_lua
from smqrt.apps.lua.check import Token, tokens
from smqrt.apps.lua.signatures import Entry, Parameter, entry_of, read, sections, stubs
from tests.apps.lua.app_server import AppServer

REPOSITORY = Path(__file__).parents[3]

OBJECTS = r"""
local request, response = request, response
local of = {request = request, response = response, dir = app.dir, io = app.io, FILE = _G.io.popen "true"}
of.sock, of.file = ba.socket.udpcon(), app.io:open "page.lsp"
of.session, of.cookie = request:session(true), response:createcookie "x"
of.timer, of.thread = ba.timer(print), ba.thread.create()
of.jsonparser, of.datetime = ba.json.parser(), ba.datetime()
of.symmetric = ba.crypto.symmetric("GCM", ("k"):rep(16), ("i"):rep(12), "encrypt")
of.certstore, of.shark = ba.create.certstore(), ba.sharkclient()
of.jsonuser = ba.create.jsonuser()
of.acl, of.authorizer = of.jsonuser:authorizer(), ba.create.authorizer(print)
of.authenticator = ba.create.authenticator(of.jsonuser, {type = "basic"})
require "wfs"
of.wfs, of.tracelogger = ba.create.wfs("w", app.io), ba.create.tracelogger()
of.dav = ba.create.dav("d", app.io, ".locks")
of.lockmgr = of.dav:lockmgr()
of.pty = ba.forkpty("true")
of["luasql.environment"] = luasql.sqlite()
of["luasql.connection"] = of["luasql.environment"]:connect ":memory:"
of["luasql.cursor"] = of["luasql.connection"]:execute "SELECT 1"
of["luasql.statement"] = of["luasql.connection"]:prepare "SELECT 1"
of.http, of.httpm = require "http".create(), require "httpm".create()
of.smq, of.mtl = require "smq.hub".create(), require "smq.mtl".create "x"
of.smqclient = require "smq.client".create "http://127.0.0.1:9/"
of.channel, of.conn = of.mtl:open("x", print, print), require "smq.conn".create(of.mtl, 0, {intf = "127.0.0.1"})
of.cluster = require "smq.cluster".create(of.smq, of.mtl, {name = "x"})
of.mqtt = require "mqttc".create(function() return nil, "none" end, function() end)
of.mqttbroker = require "mqttbroker".create{port = 0, address = "127.0.0.1"}
of["mqttbroker.Client"] = of.mqttbroker:createClient()
of["JSONS.Stream"], of.EventEmitter = require "JSONS".create(of.sock), require "EventEmitter".create()
of["luasocket.tcp"], of["luasocket.udp"], of["luasocket.dns"] = socket.tcp(), socket.udp(), socket.dns
of.xparser, of["xmlrpc.service"] = require "xparser".create(), require "xmlrpc".new("x", {})
of["sparkplug.node"] = require "SparkplugB".create("127.0.0.1:9", "g", "n")
"""
"""Makes an object of each class."""

PROBE = """<?lsp
%s
local function value_of(name)
  local module, key = name:match "^(.-)!M%%.?(.*)$"
  if module then
    local value = require(module)
    if key == "" then return value end
    return value[key]
  end
  local owner, last = name:match "^(.*)[.:]([%%w_]+)$"
  if owner and of[owner] ~= nil and owner ~= "io" then return of[owner][last] end
  if name:find "^io:" then return of.io[last] end
  local value = name:find "^io%%." and _G or _ENV
  for part in name:gmatch "[%%w_]+" do value = value[part] end
  return value
end
local found = {}
for name in app.io:open "names":read "a":gmatch "[^\\n]+" do
  local done, value = pcall(value_of, name)
  if not done then value = nil end
  local about = type(value) == "function" and debug.getinfo(value, "u") or {}
  local is_callable = type(value) == "function" or type((getmetatable(value) or {}).__call) == "function"
  found[name] = {kind = is_callable and "function" or type(value), count = about.nparams, more = about.isvararg,
                 table = type(value) == "table"}
end
of.conn:shutdown() of.mtl:shutdown()
local open = of.mqtt:disconnect(), of.smqclient:close(), of["sparkplug.node"]:close(), of.mqttbroker:close()
print(ba.json.encode(found)) ?>"""

NOT_MADE = {"deferred", "responsefilter", "upload", "servcon", "mqtt.Message", "mqtt.Delivery", "modbus"}
"""Classes whose objects need another server, or end the request."""
NOT_SET = {
    *("mako.daemon", "mako.fs", "mako.tldir", "mako.udb", "mako.cfgfname", "mako.sslport"),  # need mako.conf, or TLS
    *(
        "ba.create.wfs",
        "ba.json.null",
        "mako.rtldir",
        "appreq",
        "pathname",
        "page",
        "_emit",
        "dir",
        "app",
        "ba.serversslport",
    ),
}
OTHER_COUNTS = {
    "luasocket.tcp:listen": "has 1 parameters, not 2",  # LuaSocket's backlog is accepted and ignored
    "luasql.quotestr": "has 2 parameters, not 1",  # also called with a colon
    "luasql.environment.quotestr": "has 2 parameters, not 1",
    "org.conman.cbor!M.decode": "has 5 parameters, not 3",  # for its own recursion
}


def present() -> Iterator[tuple[str, Entry]]:
    """Names for the probe, with their entries."""
    for section in sections().values():
        for entry in section.entries():
            if entry.is_present and entry.owner not in NOT_MADE:
                module = section.module.replace(".", "/") if section.module == "acme.engine" else section.module
                yield f"{module}!{entry.name}" if entry.name.startswith("M") else entry.name, entry


def fault(entry: Entry, found: dict[str, object]) -> str:
    """What is wrong with a signature; empty for nothing."""
    if entry.parameters is None:
        return "nil" if found["kind"] == "nil" else ""
    if found["kind"] != "function":
        return f"is {found['kind']}"
    if found.get("count") is None:
        return ""  # a table that can be called
    names = [one.name for one in entry.parameters]
    fixed = len(names) - ("..." in names) + (":" in entry.name)
    count, more = found["count"], found["more"]
    assert isinstance(count, int)
    if "..." in names and not more:
        return f"has {count} parameters, not further ones"
    if (fixed > count and not more) or fixed < count:
        return f"has {count} parameters{' and more' if more else ''}, not {fixed}"
    return ""


def test_functions_of_the_server_have_the_documented_parameters(server: AppServer) -> None:
    hubs = smq_hub.install(server.vm, server.services, server.applications.exchanges)
    smq_client.install_smq_cluster(server.vm, server.services, hubs)
    smq_client.install_smq_client(server.vm, server.services)
    names = dict(present())
    server.write("", {"names": "\n".join(names)})
    answer = server.page(PROBE % OBJECTS)
    assert answer.status == 200, answer.text
    found = json.loads(answer.text)
    wrong = {name: fault(entry, found[name]) for name, entry in names.items() if name not in NOT_SET}
    assert len(wrong) > 500
    assert {name: text for name, text in wrong.items() if text} == OTHER_COUNTS


def test_a_line_of_the_data() -> None:
    entry = entry_of(
        'io:x(name: string, f?: fun(a: table<string, any>, b: "1"|"2"): true, ...: any): io.Stat?, string? err'
        "  !not yet  # a [b](c.md)"
    )
    assert (entry.name, entry.owner, entry.support, entry.note, entry.is_present) == (
        "io:x",
        "io",
        "not yet",
        "a [b](c.md)",
        False,
    )
    assert entry.parameters == (
        Parameter("name", "string"),
        Parameter("f", 'fun(a: table<string, any>, b: "1"|"2"): true', True),
        Parameter("...", "any"),
    )
    assert [(one.type, one.name) for one in entry.results] == [("io.Stat?", ""), ("string?", "err")]
    assert [one.type for one in entry_of("a.b(): fun(): string, integer").results] == ["fun(): string", "integer"]
    variable = entry_of("mako.port: integer?  # the port")
    assert (variable.parameters, variable.results[0].type, variable.owner) == (None, "integer?", "mako")


@pytest.mark.parametrize("line", ["a.b(x)", "a.b(x: string", "a.b() string", "a.b", "(x: string)"])
def test_a_wrong_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="^line 2: "):
        read(f"== x\n{line}")


# ---- the annotations


class Stub:
    """The names that an annotation file defines, as Lua has them after running it, and its annotations."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.functions: dict[str, list[str]] = {}
        params: list[str] = []
        for line in text.splitlines():
            if found := re.match(r"---@param (\S+?)\??(?= )", line):
                params.append(found[1])
            elif found := re.fullmatch(r"function ([\w.:]+)\((.*)\) end", line):
                self.functions[found[1]] = params
                assert params == [name for name in found[2].split(", ") if name], line
                params = []
            else:
                assert not params or line.startswith("---"), line


STUBS = [Stub(path, text) for path, text in stubs().items() if path != signatures.PLUGIN]


def declared() -> set[str]:
    text = "".join(stub.text for stub in STUBS)
    return set(re.findall(r"^---@(?:class|alias) ([\w.]+)", text, re.MULTILINE))


def test_annotation_files_run() -> None:
    lua = lua54.LuaRuntime()
    loaded = {path.removesuffix(".lua").replace("/", "."): text for path, text in stubs().items()}
    lua.globals().source = loaded.get
    lua.execute("""
        io, mako, ba, luasql = nil, nil, nil, nil
        package.searchers = {function(name) return source(name) and load(source(name), name) end}
    """)
    lua.execute(stubs()[signatures.STUBS])
    assert lua.eval("type(ba.create.dir)") == "function"
    assert lua.eval("type(io.popen)") == "function"
    for stub in STUBS:
        assert stub.text.startswith("---@meta"), stub.path
        value = lua.execute(stub.text)
        assert value is not None or stub.path in (signatures.STUBS, "wfs.lua"), stub.path


def test_every_function_of_the_page_has_an_annotation() -> None:
    functions = {name for stub in STUBS for name in stub.functions}
    named = [
        signatures._CLASS_NAMES.get(entry.owner, entry.owner) + entry.name[len(entry.owner) :]
        for table in signatures.TABLES
        for entry in sections()[table].entries()
        if entry.is_present and entry.parameters is not None and not entry.name.startswith("os.")
    ]
    assert len(named) > 250
    assert [name for name in named if name not in functions] == []
    assert not {"response:setdigest", "response.setdigest"} & functions  # missing functions have none


def test_every_module_of_the_page_has_an_annotation_file() -> None:
    page = (REPOSITORY / "smqrt/help/lua-api.md").read_text("utf-8")
    rows = re.findall(r"^\| (.*?) \| yes \|", page, re.MULTILINE)
    modules = {name for row in rows for name in re.findall(r'`require "([^"]+)"`', row)}
    assert len(modules) > 20
    assert {f"{name.replace('.', '/')}.lua" for name in modules} == {stub.path for stub in STUBS} - {signatures.STUBS}


def test_every_type_is_declared() -> None:
    known = declared() | {
        "any",
        "boolean",
        "string",
        "number",
        "integer",
        "function",
        "table",
        "userdata",
        "nil",
        "true",
        "false",
        "self",
    }
    unknown = set()
    for stub in STUBS:
        for kind in re.findall(
            r"^---@(?:param \S+|return|type|field \S+|alias \S+|overload|class [\w.]+:) (.*)$", stub.text, re.MULTILINE
        ):
            text = re.sub(r'"[^"]*"|\w+\??(?=: )|\bfun\b', " ", kind)
            words = re.findall(
                r"[A-Za-z_][\w.]*", text if not re.match(r".*[^:|,] \w+$", kind) else text.rpartition(" ")[0]
            )
            unknown |= {word for word in words if word.rstrip(".") not in known}
    assert unknown == set()


def test_options_of_create_are_those_of_the_manual() -> None:
    page = (REPOSITORY / "smqrt/help/hub-api.md").read_text("utf-8")
    at = page.index("## create") if "## create" in page else page.index("### create (module)")
    named = set(re.findall(r"^\| `(\w+)` \|", page[at : page.index("### connect")], re.MULTILINE))
    fields = {item.name for item in sections()["module smq.hub"].classes["smq.Options"].fields}
    assert fields <= named
    assert len(fields) > 25


def test_tables_of_the_manual_are_those_of_the_data() -> None:
    page = (REPOSITORY / "smqrt/help/lua-api.md").read_text("utf-8")
    missing = [
        name
        for name in signatures.TABLES
        if f"scripts/fix -->\n{signatures.manual(name)}<!-- end of {name}" not in page
    ]
    assert missing == [], "run scripts/fix"


# ---- calls of applications

APPLICATIONS = ("app_preload", "tests/apps/examples", "smqrt/cli/template")
CALLED = ("request", "response", "cmd", "dir", "io", "ba", "mako", "trace", "tracep", "appreq", "luasql", "smq", "mqtt")


def sources() -> Iterator[tuple[str, str]]:
    """The Lua files and pages of the demonstrations and of the tests' applications."""
    for folder in APPLICATIONS:
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix == ".lua" or path.name == ".preload":
                yield str(path), path.read_text("utf-8")
            elif path.suffix == ".lsp":
                yield str(path), to_lua(path.read_bytes()).decode("utf-8")


def chain_at(found: list[Token], at: int) -> tuple[str, int]:
    """The chain of names `a.b:c` at a token, and the position after it."""
    name, end = found[at].text, at + 1
    while end + 1 < len(found) and found[end].text in (".", ":") and found[end + 1].kind == "name":
        name, end = name + found[end].text + found[end + 1].text, end + 2
    return name, end


def arguments_at(found: list[Token], at: int) -> tuple[int, bool] | None:
    """The number of arguments of a call whose arguments begin at a token, and whether the last has further values; None
    for no call."""
    if found[at].kind == "string" or found[at].text == "{":
        return 1, False
    if found[at].text != "(":
        return None
    depth, count, last = 0, 0, at
    for position in range(at, len(found)):
        text = found[position].text if found[position].kind == "mark" else ""
        word = found[position].text if found[position].kind == "name" else ""
        depth += (text in ("(", "{", "[")) + (word in ("function", "do", "then", "repeat")) - (text in (")", "}", "]"))
        depth -= word in ("end", "until", "elseif")
        if depth == 0:
            return count + (position > at + 1), found[last].text in (")", "...")
        count += text == "," and depth == 1
        last = position
    return None


def calls(source: str) -> Iterator[tuple[str, int, int, bool]]:
    """The calls of the API in Lua source: name, line, number of arguments, whether there may be more of them."""
    found = list(tokens(source))
    at = 0
    while at < len(found):
        if found[at].kind != "name" or (at and found[at - 1].text in (".", ":", "function", "local")):
            at += 1
            continue
        name, end = chain_at(found, at)
        head = re.split("[.:]", name)[0]
        if head in CALLED and end < len(found) and (seen := arguments_at(found, end)):
            yield name, found[at].line, *seen
        at = end


def misfit(name: str, count: int, is_open: bool, entries: dict[str, Entry]) -> str:
    """What is wrong with a call; empty for nothing."""
    names = [name, name.replace("request:", "response:"), name.replace("response:", "request:")]
    names += [
        name.replace("cmd:", "request:"),
        name.replace("cmd:", "response:"),
        name.replace("response:", "deferred:"),
    ]
    owner, _, method = name.partition(":")
    if owner in entries and entries[owner].parameters is None:  # a method of a variable
        kind = entries[owner].results[0].type.rstrip("?")
        if kind == "string":
            return ""
        names += [f"{kind}:{method}", f"dir:{method}"]
    entry = next((entries[one] for one in names if one in entries), None)
    if entry is None or entry.parameters is None:
        return "is unknown"
    needed = sum(not one.is_optional and one.name != "..." for one in entry.parameters)
    if count > len(entry.parameters) and all(one.name != "..." for one in entry.parameters):
        return f"takes at most {len(entry.parameters)} arguments, not {count}"
    return f"needs {needed} arguments, not {count}" if count < needed and not is_open else ""


def test_calls_of_applications_fit_the_signatures() -> None:
    entries = {entry.name: entry for section in sections().values() for entry in section.entries() if entry.is_present}
    wrong, count = [], 0
    for path, source in sources():
        for name, line, arguments, is_open in calls(source):
            count += 1
            if text := misfit(name, arguments, is_open, entries):
                wrong.append(f"{path}:{line}: {name} {text}")
    assert count > 200
    assert wrong == []


def test_calls_that_do_not_fit() -> None:
    entries = {
        name: entry_of(name + rest) for name, rest in (("ba.sleep", "(ms: number)"), ("dir:insert", "(x?: dir)"))
    }
    source = """ba.sleep() ba.sleep(1, f(2, 3)) ba.sleep(f()) ba.gone{} dir:insert()
        dir:insert(function(a, b) return {1, 2} end)"""
    found = [misfit(name, count, is_open, entries) for name, _, count, is_open in calls(source)]
    assert found == ["needs 1 arguments, not 0", "takes at most 1 arguments, not 2", "", "is unknown", "", ""]


# ---- pages in an editor


def test_pages_are_lua_in_an_editor() -> None:
    page = "<p>é</p>\n<?lsp local x = 1\nif x then ?>\n<b><?lsp= x ?></b>\n<?lsp end ?> tail"
    lua = lua54.LuaRuntime(encoding="latin-1")
    lua.execute(stubs()[signatures.PLUGIN])
    text = page.encode().decode("latin-1")
    for diff in sorted(lua.globals().OnSetText("file:///a/b.lsp", text).values(), key=lambda diff: -diff.start):
        text = text[: diff.start - 1] + diff.text + text[diff.finish :]
    assert text.count("\n") == page.count("\n")
    assert " ".join(text.split()) == "local x = 1 if x then ; _emit( x ); end ;"
    lua.execute(f"local _emit = print\n{text}")
    assert lua.globals().OnSetText("file:///a/b.lua", page) is None
