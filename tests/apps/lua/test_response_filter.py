"""Response filters (spec: bas-api §2.2)."""

from __future__ import annotations

import zlib

from tests.apps.lua.app_server import AppServer


def test_collected_output_is_sent_compressed(server: AppServer):
    answer = server.page(
        "dropped<?lsp local f = response:setresponse() response:setcontenttype'text/plain'"
        " for i = 1, 5000 do print(i) end print(f:finalize(true)) ?>"
    )
    assert answer.headers["Content-Encoding"] == "deflate"
    assert answer.headers["Content-Type"] == "text/plain"
    assert zlib.decompress(answer.body).split() == [b"%d" % number for number in range(1, 5001)]


def test_collected_output_is_returned(server: AppServer):
    answer = server.page(
        "<?lsp local f = response:setresponse() print'inner' local z = f:finalize() print(#z > 0) ?>out"
    )
    assert answer.text == "true\nout"


def test_a_function_gets_each_buffer_and_nil(server: AppServer):
    answer = server.page(
        """<?lsp
        local sizes, ended = {}, 0
        local f = response:setresponse(function(text)
          if text then sizes[#sizes + 1] = #text else ended = ended + 1 end
        end)
        for i = 1, 30 do response:write(("x"):rep(1000)) end
        f:finalize()
        local all = 0
        for _, size in ipairs(sizes) do all = all + size end
        print(#sizes, all, ended)
        ?>"""
    )
    assert answer.text == "4\t30000\t1\n"


def test_an_open_filter_gets_the_rest_at_the_end(server: AppServer):
    server.page("<?lsp _G.got = {} response:setresponse(function(text) got[#got + 1] = text or 'end' end) ?>written")
    answer = server.ask("/page.lsp")
    assert answer.text == ""
    assert server.vm.eval("return table.unpack(got)") == (b"written", b"end")


def test_abort_and_close_drop_it(server: AppServer):
    assert server.page("<?lsp local f = response:setresponse() print'x' f:abort() ?>y").text == "y"
    assert server.page("<?lsp do local f <close> = response:setresponse() print'x' end ?>y").text == "y"


def test_wrong_use_raises(server: AppServer):
    assert "iscommitted" in server.page("x<?lsp response:flush() response:setresponse() ?>").text
    assert "iscommitted" in server.page("<?lsp response:setresponse() response:setresponse() ?>").text
    source = "<?lsp local f = response:setresponse() f:abort() f:finalize() ?>"
    assert "page.lsp:1: the response filter has ended" in server.page(source).text
    assert "page.lsp:1: inside" in server.page("<?lsp response:setresponse(function() error'inside' end) ?>x").text
