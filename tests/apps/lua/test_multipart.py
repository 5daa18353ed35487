"""`request:multipart` and `require "rwfile"` (spec: bas-api §2.1, §6)."""

from __future__ import annotations

import pytest

from tests.apps.lua.app_server import AppServer

TYPE = {"Content-Type": "multipart/form-data; boundary=XX"}
FORM = (
    b'--XX\r\nContent-Disposition: form-data; name="title"\r\n\r\nhello\r\n'
    b'--XX\r\nContent-Disposition: form-data; name="up"; filename="a.txt"\r\nContent-Type: text/plain\r\n\r\n'
    b"DATA\r\n--XX--\r\n"
)
PAGE = """<?lsp
  local size, count = 0, 0
  print(request:multipart({
    formdata = function(name, value) print("field", name, value) return STOP end,
    beginfile = function(name, filename, type, encoding) print("file", name, filename, type, encoding) end,
    filedata = function(data) size, count = size + #data, count + 1 end,
    endmp = function() print("end", size, count) end,
    error = function(message) print("error", message) end,
  } SIZE))
?>"""


def upload(server: AppServer, page: str, body: bytes, **keywords: object) -> str:
    server.page(page)
    return server.ask("/page.lsp", "POST", body, headers=TYPE, **keywords).text


def test_a_form_arrives_in_order(server: AppServer):
    text = upload(server, PAGE.replace("STOP", "nil").replace("SIZE", ""), FORM)
    assert text == "field\ttitle\thello\nfile\tup\ta.txt\ttext/plain\tbinary\nend\t4\t1\ntrue\n"


def test_large_files_arrive_in_pieces(server: AppServer):
    text = upload(server, PAGE.replace("STOP", "true").replace("SIZE", ", 1000"), FORM.replace(b"DATA", b"x" * 6000000))
    size, count = text.split("\n")[2].split("\t")[1:]
    assert size == "6000000"
    assert int(count) > 5000


def test_a_callback_ends_the_reading(server: AppServer):
    assert upload(server, PAGE.replace("STOP", "false").replace("SIZE", ""), FORM).endswith(
        "nil\tOperation failed\t-2\n"
    )


def test_a_broken_form_is_reported(server: AppServer):
    text = upload(server, PAGE.replace("STOP", "nil").replace("SIZE", ""), FORM[:-10])
    assert text.endswith("error\tthe form ends in the middle of a part\nnil\tOperation failed\t-1\n")


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("<?lsp request:multipart() ?>", "bad argument #1 to 'multipart' (table expected"),
        ("<?lsp request:multipart{beginfile = print} ?>", "beginfile and filedata belong together"),
        ("<?lsp request:multipart{formdata = 1} ?>", "multipart.formdata' (function expected"),
        ("x<?lsp response:flush() request:multipart{} ?>", "iscommitted"),
    ],
)
def test_wrong_use_raises(server: AppServer, page, error):
    assert error in upload(server, page, FORM)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/mixed; boundary=x", "multipart/form-data"]
)
def test_another_body_is_415(server: AppServer, kind):
    server.page("<?lsp request:multipart{} ?>")
    answer = server.ask("/page.lsp", "POST", FORM, headers={"Content-Type": kind})
    assert (answer.status, answer.headers["Accept"]) == (415, "multipart/form-data")
    assert "not multipart/form-data" in answer.text


def test_other_bodies_raise_and_give_200_when_caught(server: AppServer):
    server.page("<?lsp print(pcall(request.multipart, request, {})) ?>")
    answer = server.ask("/page.lsp", "POST", b"x", headers={"Content-Type": "text/plain"})
    assert answer.status == 200
    assert "not multipart/form-data" in answer.text
    server.page("<?lsp pcall(request.multipart, request, {}) error'something else' ?>")
    assert server.ask("/page.lsp", "POST", b"x", headers={"Content-Type": "text/plain"}).status == 500


def test_rwfile(server: AppServer):
    source = """<?lsp
      local rw = require"rwfile"
      local home = ba.openio"home"
      print(rw.file(home, "f.txt", "text"), rw.file(home, "f.txt"), rw.file(home, "none"))
      print(rw.file(home, "e.txt", ""), #rw.file(home, "e.txt"))
      print(rw.json(home, "j.json", {a = {1, 2}}), rw.json(home, "j.json").a[2])
      rw.file(home, "bom.json", "\\xEF\\xBB\\xBF{}") print(type(rw.json(home, "bom.json")))
      rw.file(home, "bad.json", "{") print(rw.json(home, "bad.json")) print(rw.json(home, "none"))
      print(rw.file(home, "no/dir", "x"))
    ?>"""
    assert server.page(source).text.split("\n") == [
        "true\ttext\tnil\tnotfound", "true\t0", "true\t2", "table", "nil\tjsonerr", "nil\tnotfound", "nil\tnotfound",
        "",
    ]  # fmt: skip
