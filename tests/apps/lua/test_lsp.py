"""The generated source is run by the real Lua, and what it emits is compared (spec: bas-api §1)."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lupa.lua54 import LuaRuntime

from smqrt.apps.lua.api.dirs import LspError, to_lua

RUN = b"""
return function(source, pathname)
  local out, env = {}, setmetatable({}, {__index = _G})
  function env._emit(text) out[#out + 1] = text end
  env.print = function(...) out[#out + 1] = table.concat({...}, "\\t") .. "\\n" end
  local chunk, message = load(source, "@" .. pathname, "t")
  if not chunk then return nil, message end
  local done, failure = pcall(chunk, env, pathname, "the io", {}, {name = "the app"})
  if not done then return nil, failure end
  return table.concat(out)
end
"""


@pytest.fixture(scope="module")
def run():
    lua = LuaRuntime(encoding=None)
    return lua.execute(RUN)


def page(run, text: bytes) -> bytes:
    answer = run(to_lua(text), b"page.lsp")
    assert not isinstance(answer, tuple), answer[1]
    return answer


@pytest.mark.parametrize(
    ("text", "emitted"),
    [
        (b"plain", b"plain"),
        (b"", b""),
        (b"\nfirst newline goes", b"first newline goes"),
        (b"\n\nonly one", b"\nonly one"),
        (b'<?xml version="1.0"?>\n<a/>', b'<?xml version="1.0"?>\n<a/>'),
        (b"<?lsp local a = 1 ?>\nx", b"x"),
        (b"<?lsp local a = 1 ?> \nx", b" \nx"),
        (b"a<?lsp= 1 + 1 ?>b", b"a2b"),
        (b"a<?lsp=nil?>\nb", b"anilb"),
        (b"<?lsp for i = 1, 3 do ?><i><?lsp= i ?></i><?lsp end ?>", b"<i>1</i><i>2</i><i>3</i>"),
        (b"<?lsp local function f(x) ?>[<?lsp= x ?>]<?lsp end f(1) f(2) ?>", b"[1][2]"),
        (b"x<?lsp local a ?> \r\n \n", b"x"),
        (b"one\r\ntwo\rthree", b"one\ntwo\nthree"),
        (b"\t\"\" \\n 'x' [[y]] ]===] ]] \x00 \x01\xff0", b"\t\"\" \\n 'x' [[y]] ]===] ]] \x00 \x01\xff0"),
        (b"<?lsp print('<?xml version=\"1.0\"?>') ?>", b'<?xml version="1.0"?>\n'),
        (b"<?lsp local a = 1 -- remark ?>shown<?lsp= a ?>", b"shown1"),
        (b"<?lsp= 7 -- remark ?>!", b"7!"),
        (b"<?lsp local a = '--' ?>shown", b"shown"),
        (b"<?lsp --[[ long ]] ?>shown", b"shown"),
        (b"<?lsp --[[ two\nlines --]] ?>shown", b"shown"),
        (b"<?lsp -- it's only a remark ?>\nshown", b"shown"),
        (b"x<?lsp (print or nil)('y') ?>", b"xy\n"),
        (b"<?lsp= pathname ?>,<?lsp= io ?>,<?lsp= app.name ?>,<?lsp= type(page) ?>", b"page.lsp,the io,the app,table"),
        (b"<?lsplit?>", b"<?lsplit?>"),
        (b"a<?lsp?>b", b"ab"),
        (b"a<?lsp return ?>  \n", b"a"),
        (b"<?lsp local keep = _emit; _emit = print ?>x<?lsp _emit = keep ?>y", b"x\ny"),
        (b"<?lsp local keep = _emit; function _emit(t) keep(t:upper()) end ?>x<?lsp= 'y' ?>", b"XY"),
    ],
)
def test_a_page_emits(run, text, emitted):
    assert page(run, text) == emitted


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"<?lsp error'x' ?>", 1),
        (b"a\nb\n<?lsp\n\nerror'x' ?>", 5),
        (b"\n\n<?lsp local a ?>\n\ntext\n<?lsp error'x' ?>", 6),
        (b'quote " and \\ \n"\n\n<?lsp= 1 ?>\n<?lsp error"x" ?>', 5),
        (b"crlf\r\n\r\n<?lsp\r\nerror'x'\r\n?>", 4),
        (b"<?lsp -- cut\n --gone ?>\nx\n<?lsp error'x' ?>", 4),
    ],
)
def test_lines_stay_where_they_were(run, text, line):
    _, message = run(to_lua(text), b"page.lsp")
    assert message == b"page.lsp:%d: x" % line


def test_a_tag_that_nothing_ends_names_its_line():
    with pytest.raises(LspError, match="start tag without end tag at line# 3"):
        to_lua(b"a\nb\n<?lsp print('<?x?>')")


def test_raw_leaves_the_prologue_out():
    assert to_lua(b"<?lsp x() ?>", raw=True).strip() == b"x()"
    assert to_lua(b"<?lsp x() ?>").startswith(b"local _ENV,")


@given(st.binary(min_size=1).filter(lambda text: b"<?lsp" not in text and b"\r" not in text and text.strip()))
def test_any_text_comes_out_as_it_was(run, text):
    assert page(run, text) == text.removeprefix(b"\n")


TAGS = st.sampled_from(
    [b"<?lsp ", b"<?lsp= ", b"?>", b"<?", b"--", b"[[", b"]]", b"\n", b"\r\n", b'"', b"'", b"end ", b"1", b"x "]
)


@given(st.lists(TAGS | st.binary(max_size=5), max_size=40))
def test_no_text_confuses_the_translation(run, parts):
    """Whatever is written, it is a page, or an error that names its line."""
    text = b"".join(parts)
    lines = re.sub(rb"\r\n|\n\r|\r", b"\n", text).count(b"\n")
    with suppress(LspError):
        source = to_lua(text)
        assert source.count(b"\n") <= lines
        answer = run(source, b"page.lsp")
        assert isinstance(answer, bytes) or b"page.lsp:" in answer[1]
