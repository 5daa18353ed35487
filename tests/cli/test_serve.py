"""`smqrt serve` as a user meets it: a real process, its output, its exit code."""

from __future__ import annotations

import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from click.testing import CliRunner

from smqrt.cli.serve import COMMON_OPTIONS
from smqrt.settings.option_types import flag
from smqrt.settings.server_settings import table
from tests.conftest import Served
from tests.support.applications import SMQ_PAGE, application, packet, smq_client

Serve = Callable[..., Served]

pytestmark = pytest.mark.servers

HUB = """
smq = require"smq.hub".create()
function onunload() trace"onunload ran" end
"""


def refused(*arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Runs a serve that must fail with exit code 1 and one sentence; returns the sentence."""
    served = Served(*arguments, cwd=cwd, env=env)
    assert served.wait() == 1, served.output
    assert len(served.lines) == 1, served.output
    assert served.output.startswith("Error: ")
    return served.output.removeprefix("Error: ")


def test_a_folder_with_pages_is_the_root_application(serve: Serve, tmp_path: Path) -> None:
    served = serve(application(tmp_path / "chat"))
    assert requests.get(served.url).text == "<h1>chat</h1>"
    said = ["app chat at /: ok", f"listening on http://127.0.0.1:{served.port}", f"admin at {served.admin_url}/"]
    assert served.lines == said


def test_without_argument_the_applications_of_app_preload_are_listed(serve: Serve, tmp_path: Path) -> None:
    application(tmp_path / "app_preload" / "chat")
    application(tmp_path / "app_preload" / "a&b")
    served = serve(cwd=tmp_path)
    assert requests.get(f"{served.url}/chat/").text == "<h1>chat</h1>"
    assert requests.get(f"{served.url}/a%26b/").text == "<h1>a&b</h1>"
    page = requests.get(served.url)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<a href="/a%26b/">a&amp;b</a>' in page.text
    assert '<a href="/chat/">chat</a>' in page.text
    assert served.lines[:2] == ["app a&b at /a&b/: ok", "app chat at /chat/: ok"]
    assert requests.get(f"{served.url}/nothing.html").status_code == 404


def test_a_failing_application_is_reported_with_its_line(serve: Serve, tmp_path: Path) -> None:
    application(tmp_path / "apps" / "broken", "local x = 1\nerror('no luck')")
    application(tmp_path / "apps" / "wrong", "x = = 1")
    application(tmp_path / "apps" / "well")
    served = serve(tmp_path / "apps")
    assert requests.get(f"{served.url}/well/").text == "<h1>well</h1>"
    assert requests.get(f"{served.url}/broken/").status_code == 503
    served.wait_for(r"^app broken at /broken/: failed: broken/\.preload:2: no luck$")
    served.wait_for(r"^app wrong at /wrong/: failed: wrong/\.preload:1: unexpected symbol near '='$")
    assert "broken/.preload:2: no luck" in requests.get(served.url).text


def test_several_arguments_and_mounts(serve: Serve, tmp_path: Path) -> None:
    one, two = application(tmp_path / "one"), application(tmp_path / "two")
    first, second = application(tmp_path / "first"), application(tmp_path / "second")
    served = serve(one, two, "-l", f"api:5:{first}", f"-l::{second}")
    paths = ["one/", "two/", "api/", ""]
    assert [requests.get(f"{served.url}/{path}").text for path in paths] == [
        f"<h1>{name}</h1>" for name in ("one", "two", "first", "second")
    ]


def test_a_zip_file_has_one_application_or_several(serve: Serve, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
        archive.writestr(".preload", "name = 'zipped'")
        archive.writestr("index.lsp", "<?lsp= app.name ?>")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a/.preload", "name = 'a'")
        archive.writestr("a/index.lsp", "<?lsp= app.name ?>")
        archive.writestr("b/index.lsp", "b")
    assert requests.get(serve(tmp_path / "one.zip").url).text == "zipped"
    several = serve(tmp_path / "two.zip")
    assert [requests.get(f"{several.url}/{name}/").text for name in "ab"] == ["a", "b"]


def test_a_zip_file_as_windows_packs_it(serve: Serve, tmp_path: Path) -> None:
    """In Lua and in Python."""
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a\\.preload", "word = appreq 'm.word'")
        archive.writestr("a\\.lua\\m\\word.lua", "return 'lua'")
        archive.writestr("./a/sub\\page.lsp", "<?lsp= app.word ?>")
        archive.writestr("p\\", "")
        archive.writestr("p\\.preload.py", PYTHON_PRELOAD)
        archive.writestr("p\\words\\__init__.py", "WORD = 'python'\n")
    served = serve(tmp_path / "two.zip")
    assert [requests.get(f"{served.url}/{path}").text for path in ("a/sub/page.lsp", "p/x")] == ["lua", "python"]


PYTHON_PRELOAD = """from smqrt.app import dir
from .words import WORD

dir.setfunc(lambda request, relpath: request.response.write(WORD))
"""


def test_rtl_always_wins(serve: Serve, tmp_path: Path) -> None:
    application(tmp_path / "root")
    (tmp_path / "root" / "rtl").mkdir()
    (tmp_path / "root" / "rtl" / "smq.js").write_text("mine")
    served = serve("-l", f":126:{tmp_path / 'root'}")
    assert "SMQ" in requests.get(f"{served.url}/rtl/smq.js").text


def test_jquery_is_served(serve: Serve, tmp_path: Path) -> None:
    url = serve(application(tmp_path / "app")).url
    for name in ("jquery.js", "jquery.min.js"):
        answer = requests.get(f"{url}/rtl/{name}")
        assert answer.status_code == 200
        assert "javascript" in answer.headers["Content-Type"]
        assert re.search(r"jQuery (JavaScript Library )?v3\.\d", answer.text[:400])
        assert "jquery.org/license" in answer.text[:400]
    assert requests.get(f"{url}/rtl/jquery.none.js").status_code == 404


def test_tls_with_a_pair_made_on_first_use(serve: Serve, tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    served = serve(application(tmp_path / "app"), "--tls-port", "0", env=env)
    url = f"https://127.0.0.1:{served.tls_port}"
    cert, key = (tmp_path / "cache" / "smqrt" / name for name in ("certificate.pem", "key.pem"))
    assert requests.get(url, verify=str(cert)).text == "<h1>app</h1>"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert requests.get(served.url).text == "<h1>app</h1>"
    made = cert.read_bytes()
    again = serve(tmp_path / "app", "--tls-port", "0", env=env)
    assert ssl.get_server_certificate(("127.0.0.1", again.tls_port)).encode() == made


def test_tls_with_a_given_pair(serve: Serve, tmp_path: Path) -> None:
    from smqrt.transport.tls_contexts import self_signed_pair

    cert, key = self_signed_pair("127.0.0.1", tmp_path)
    served = serve(application(tmp_path / "app"), "--tls-port", "0", "--cert", cert, "--key", key)
    assert requests.get(f"https://127.0.0.1:{served.tls_port}", verify=cert).text == "<h1>app</h1>"


def test_allowed_hosts_and_shown_errors_are_settings(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", index="<?lsp error 'the secret' ?>")
    (app / "tool.py").write_text("code")

    def statuses(served: Served) -> list[int]:
        asked = [("GET", "/tool.py", {}), ("GET", "/tool.py", {"Host": "evil.example"})]
        asked += [("POST", "/", {"Origin": "https://friend.example"})]
        return [requests.request(how, served.url + path, headers=fields).status_code for how, path, fields in asked]

    closed = serve(app)
    assert statuses(closed) == [404, 403, 403]
    assert "the secret" in requests.get(closed.url).text
    closed.wait_for(r"^refused: GET '/tool.py' for the host 'evil.example': to allow it, set hosts=evil.example; ")
    options = ("--hosts", "evil.example", "--origins", "https://friend.example", "--served-files", "*.py", "--no-debug")
    opened = serve(app, *options)
    assert statuses(opened) == [200, 200, 500]
    assert "the secret" not in requests.get(opened.url).text
    opened.wait_for("^error [0-9a-f]{8} in /: .*the secret")
    elsewhere = serve(app, "--host", "0.0.0.0")
    assert statuses(elsewhere) == [404, 404, 403]
    assert "the secret" not in requests.get(elsewhere.url).text


@pytest.mark.parametrize(("option", "value"), [("--origins", "example.com"), ("--hosts", "https://example.com")])
def test_what_is_no_origin_or_host_is_one_sentence(serve: Serve, tmp_path: Path, option: str, value: str) -> None:
    served = serve(application(tmp_path / "app"), option, value)
    assert served.wait() == 1
    assert served.output.startswith(f"Error: {option[2:]}: {value!r} is not a")
    assert len(served.lines) == 1


def test_sighup_reads_the_certificates_again(serve: Serve, tmp_path: Path) -> None:
    from smqrt.transport.tls_contexts import self_signed_pair

    pairs = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        pairs.append([Path(path) for path in self_signed_pair("127.0.0.1", tmp_path / name)])
    (cert, key), (new_cert, new_key) = pairs
    served = serve(application(tmp_path / "app"), "--tls-port", "0", "--cert", cert, "--key", key)

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", served.tls_port))

    old = shown()
    context = ssl.create_default_context(cafile=cert)
    plain = socket.create_connection(("127.0.0.1", served.tls_port))
    kept = context.wrap_socket(plain, server_hostname="127.0.0.1")
    cert.write_text("rubbish")
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("certificates not reloaded: .* are not a certificate and its key")
    assert shown() == old
    cert.write_bytes(new_cert.read_bytes())
    key.write_bytes(new_key.read_bytes())
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("certificates reloaded")
    assert shown().encode() == new_cert.read_bytes()
    kept.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert kept.recv(100).startswith(b"HTTP/1.1 200")
    kept.close()
    assert served.stop() == 0


def test_last_values_by_a_setting(serve: Serve, tmp_path: Path) -> None:
    config = tmp_path / "smqrt.toml"
    config.write_text('[topics."site1/#"]\nlast_value = true\n')
    preload = 'local smq = require "smq.hub".create()\nfunction app.connect(r) smq:connect(r) end'
    app = application(tmp_path / "app", preload)
    (app / "smq.lsp").write_text("<?lsp app.connect(request) ?>")
    served = serve(app, "--config", config, "--host", "0.0.0.0", "--hosts", "*")
    served.wait_for("^hubs accept anonymous clients, unless an application requires a login; see auth.users$")
    url = served.url.replace("0.0.0.0", "127.0.0.1")

    def smqrt(*words: str) -> str:
        command = [sys.executable, "-m", "smqrt", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout

    smqrt("pub", url, "site1/door", "open")
    assert smqrt("sub", "--count", "1", "--timeout", "10", url, "site1/door") == "open\n"
    config.write_text('[topics."site1/#"]\nlast_value = false\n')
    served.process.send_signal(signal.SIGHUP)
    served.wait_for(r"^settings changed: topics\.site1/#$")
    assert smqrt("sub", "--count", "1", "--timeout", "1", url, "site1/door") == ""


def test_sighup_reads_the_settings_again(serve: Serve, tmp_path: Path) -> None:
    config = tmp_path / "smqrt.toml"
    config.write_text('json_values = 7\nhosts = "a.example"\n')
    app = application(tmp_path / "app")
    (app / "smqrt.toml").write_text("port = 1")
    served = serve(app, "--config", config, env={"SMQRT_PROT": "1", "SMQRT_SERVICE_HOST": "10.0.0.1"})

    def status() -> int:
        return requests.get(served.url, headers={"Host": "b.example"}).status_code

    assert status() == 403
    served.wait_for(r"^configuration: .*/smqrt\.toml$")
    served.wait_for(r"^configuration: .*/app/smqrt\.toml is not read; select it with --config")
    served.wait_for(r"^SMQRT_PROT is not a setting; did you mean SMQRT_PORT\?$")
    config.write_text('json_values = 8\nhosts = "b.example"\n')
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("^settings that need a restart to change: json_values$")
    served.wait_for("^settings changed: hosts$")
    assert status() == 200
    config.write_text('hosts = "c.example"\nhosts = 1')
    served.process.send_signal(signal.SIGHUP)
    served.wait_for("^settings not reloaded: .*smqrt.toml, line 2: this name is set twice")
    assert status() == 200


def test_sigusr1_prints_all_stacks(serve: Serve, tmp_path: Path) -> None:
    preload = """
ba.thread.run(function()
   ba.sleep(60000)
end)
local l = ba.socket.bind(0, {intf = "127.0.0.1"})
l:event(function(me) me:accept() end)
"""
    served = serve(application(tmp_path / "app", preload, slow="<?lsp ba.exec 'sleep 60' ?>"))
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(b"GET /slow.lsp HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        served.process.send_signal(signal.SIGUSR1)
        served.wait_for(r"\.preload:3 in ba.thread.sleep for \d+\.\d s")
        served.wait_for(r"\.preload:6 in ba.sockets.read for \d+\.\d s")
        served.wait_for(r"\d+ greenlets\n(.*\n)*.*runtime\.py:\d+ run")
    assert served.stop() == 0


def test_words_for_the_application(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", index="<?lsp= table.concat(mako.argv, '|') ?>")
    assert requests.get(serve(app, "--", "one", "--two").url).text.endswith(f"{app}|one|--two")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_with_a_mako_conf_each_line_is_shown_once(serve: Serve, tmp_path: Path, log_format: str) -> None:
    """The file runs before the log is set up, and again with the applications."""
    application(tmp_path / "app", "trace'from the preload'", index="<?lsp trace'from the page' ?>")
    (tmp_path / "mako.conf").write_text("apps = {'app'}\ntrace'from the file'\nprint'printed'\n")
    served = serve("--log-format", log_format, cwd=tmp_path)
    port = served.wait_for(r"listening on http://127\.0\.0\.1:(\d+)")[1]
    assert requests.get(f"http://127.0.0.1:{port}/app/").ok
    served.wait_for("from the page")
    for word in ("from the file", "from the preload", "from the page", "printed"):
        assert sum(word in line for line in served.lines) == 1, served.output
    if log_format == "json":
        assert [line for line in served.lines if not line.startswith("{")] == ["printed"], "standard output"


def test_environment_and_file_give_settings(serve: Serve, tmp_path: Path) -> None:
    application(tmp_path)
    (tmp_path / "smqrt.toml").write_text('host = "127.0.0.2"\n')
    served = serve(cwd=tmp_path)
    served.wait_for(r"^listening on http://127\.0\.0\.2:\d+$")
    served = serve(cwd=tmp_path, env={"SMQRT_HOST": "127.0.0.3"})
    served.wait_for(r"^listening on http://127\.0\.0\.3:\d+$")
    served = serve("--host", "::1", cwd=tmp_path, env={"SMQRT_HOST": "127.0.0.3"})
    port = served.wait_for(r"^listening on http://\[::1\]:(\d+)$")[1]
    assert requests.get(f"http://[::1]:{port}").ok


def test_python_applications_find_the_standard_library_patched(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app")
    (app / ".preload.py").write_text(
        "from gevent import monkey\n"
        "for name in ('socket', 'ssl', 'threading', 'time'):\n"
        "    assert monkey.is_module_patched(name), name\n"
    )
    serve(app).wait_for("^app app at /: ok$")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unloads_closes_and_exits_0(serve: Serve, tmp_path: Path, number: int) -> None:
    served = serve(application(tmp_path / "app", HUB, smq=SMQ_PAGE))
    client = smq_client(served.port)
    assert served.stop(number) == 0
    assert client.recv(1) == b"", "no Disconnect: that would tell the device not to come back"
    assert "onunload ran" in served.output
    assert "Traceback" not in served.output
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", served.port), 1)


def test_the_text_of_an_onunload_reaches_the_clients(serve: Serve, tmp_path: Path) -> None:
    preload = HUB + "function onunload() smq:shutdown('back at noon') end"
    served = serve(application(tmp_path / "app", preload, smq=SMQ_PAGE))
    client = smq_client(served.port)
    assert served.stop() == 0
    assert packet(client) == b"\x0bback at noon"
    assert client.recv(1) == b""


def test_a_signal_while_a_preload_blocks_stops_too(serve: Serve, tmp_path: Path) -> None:
    served = serve(application(tmp_path / "app", "trace'asleep' ba.sleep(60000)"))
    served.wait_for("asleep")
    assert served.stop() == 0


def test_a_second_signal_stops_at_once(serve: Serve, tmp_path: Path) -> None:
    served = serve(application(tmp_path / "app", "function onunload() trace'asleep' ba.sleep(60000) end"))
    assert served.port
    served.process.terminate()
    served.wait_for("asleep")
    assert served.stop() == 1


def test_an_application_may_end_the_server(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", "function onunload() trace'bye' end", index="<?lsp mako.exit(3) ?>")
    served = serve(app)
    requests.get(served.url)
    assert served.wait() == 3
    assert "bye" in served.output


def test_a_request_under_way_is_answered_before_the_end(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", index="<?lsp trace'asleep' ba.sleep(500) print'late' ?>")
    served = serve(app)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(requests.get, served.url)
        served.wait_for("asleep")
        assert served.stop() == 0
        assert answer.result(5).text.strip() == "late"


def test_the_process_suits_many_connections(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app")
    (app / ".preload.py").write_text(
        "import gc, gevent, resource\n"
        "def tell():\n"
        "    print('frozen', gc.get_freeze_count() > 10000)\n"
        "    print('files', len(set(resource.getrlimit(resource.RLIMIT_NOFILE))), flush=True)\n"
        "gevent.spawn_later(0.2, tell)\n"
    )
    served = serve(app)
    served.wait_for("^frozen True\nfiles 1$")


def test_an_error_in_onunload_does_not_hinder_the_end(serve: Serve, tmp_path: Path) -> None:
    served = serve(application(tmp_path / "app", "function onunload() error('stuck') end"))
    assert served.port
    assert served.stop() == 0
    served.wait_for(r"\.preload:1: stuck")


def test_reload_restarts_the_application_with_onunload_first(serve: Serve, tmp_path: Path) -> None:
    preload = "name = 'first'\nfunction onunload() trace('bye', name) end"
    app = application(tmp_path / "app", preload, index="<?lsp= app.name ?>")
    served = serve(app, "--reload")
    assert requests.get(served.url).text == "first"
    (app / ".preload").write_text("trace'hello'; name = 'second'")
    served.wait_for(r"bye\s+first[\s\S]*hello[\s\S]*^app app at /: ok$")
    assert requests.get(served.url).text == "second"


def test_reload_keeps_the_old_application_on_syntax_errors(serve: Serve, tmp_path: Path) -> None:
    app = application(tmp_path / "app", "name = 'first'", index="<?lsp= app.name ?>")
    served = serve(app, "--reload")
    assert requests.get(served.url).text == "first"
    (app / ".preload").write_text("name = = 'second'")
    served.wait_for(r"^app app at /: not restarted: app/\.preload:1: unexpected symbol near '='$")
    assert requests.get(served.url).text == "first"
    (app / ".preload").write_text("name = 'third'")
    served.wait_for(r"^app app at /: not restarted[\s\S]*^app app at /: ok$")
    assert requests.get(served.url).text == "third"


def test_a_port_in_use_gets_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refused(application(tmp_path / "app"), "--port", str(port))
        assert sentence.startswith(f"cannot listen on 127.0.0.1:{port}: the port is in use;")
        assert refused(tmp_path / "app", "--tls-port", str(port)).startswith(f"cannot listen on 127.0.0.1:{port}")


def test_wrong_applications_get_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04 but no ZIP file")
    assert "nowhere does not exist" in refused(tmp_path / "nowhere")
    assert "broken.zip is neither a folder nor a readable ZIP file" in refused(tmp_path / "broken.zip")
    (tmp_path / "empty").mkdir()
    assert "no application in" in refused(cwd=tmp_path / "empty")


def test_wrong_certificates_get_one_sentence(tmp_path: Path) -> None:
    app, wrong = application(tmp_path / "app"), tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    tls = (app, "--tls-port", "0")
    assert "wrong.pem" in refused(*tls, "--cert", wrong, "--key", wrong)
    assert "missing.pem" in refused(*tls, "--cert", tmp_path / "missing.pem", "--key", wrong)
    assert refused(*tls, "--cert", wrong).startswith("--cert needs --key too")


def test_wrong_settings_get_one_sentence(tmp_path: Path) -> None:
    application(tmp_path)
    (tmp_path / "smqrt.toml").write_text("prot = 1")
    assert "smqrt.toml, line 1: prot is not a setting; did you mean port?" in refused(cwd=tmp_path)
    assert "missing.toml can't be read" in refused("--config", "missing.toml", cwd=tmp_path)


def test_an_unknown_host_gets_one_sentence(tmp_path: Path) -> None:
    assert "--host" in refused(application(tmp_path / "app"), "--host", "192.0.2.1")


def test_help_shows_the_twenty_common_options() -> None:
    from smqrt.cli import cli

    text = CliRunner().invoke(cli, ["serve", "--help"]).output
    shown = re.findall(r"^  (?:-\w, )?(--?[\w-]+)", text, re.MULTILINE)
    for option in ("-l", "--host", "--port", "--tls-port", "--cert", "--key", "--reload", "--help-all", "--help"):
        assert option in shown
    assert len(shown) == len(COMMON_OPTIONS) + 2 == 22
    assert "9357" in text
    assert "Examples:" in text


def test_help_all_shows_every_option_once_in_groups() -> None:
    from smqrt.cli import cli

    text = CliRunner().invoke(cli, ["serve", "--help-all"]).output
    expected = [flag(setting.path) for setting in table()]
    shown = re.findall(r"^  (?:-\w, )?(--?[\w-]+)", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert "[APP]..." not in text.partition("\nOptions:\n")[2]
    assert [option for option in expected if option not in shown] == []
    _, _, limits = text.partition("\nlimits: Limits on what clients may use; see limits:\n")
    assert limits.startswith("  --limits-connections-per-user INTEGER\n")


def test_a_closed_output_ends_the_server_quietly(tmp_path: Path) -> None:
    """`smqrt serve | head -1`; what applications print meets the same end."""
    application(tmp_path / "one", 'print"loaded" ba.timer(function() print"later" return true end):set(50)')
    command = f"'{sys.executable}' -m smqrt serve --port 0 one | head -1; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert (ended.stdout, ended.stderr) == ("loaded\n0\n", "")
