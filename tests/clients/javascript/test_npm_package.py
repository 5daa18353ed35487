"""The npm package of the client: installed from its archive, in Node.js, TypeScript, Vite and Chromium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import smqrt
from smqrt.server.javascript_client import classic_script, client_scripts
from tests.conftest import REPOSITORY, Served, free_port, made_once
from tests.support import npm

pytestmark = pytest.mark.servers  # they need npm
HERE = Path(__file__).parent
APP = REPOSITORY / "tests/browser/smqjs/app"
MANUAL = (REPOSITORY / "smqrt/help/javascript.md").read_text("utf-8")
BLOCK = re.compile(r"^```tsx?\n// web/src/(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIG = {
    "compilerOptions": {
        "strict": True,
        "noUncheckedIndexedAccess": True,
        "exactOptionalPropertyTypes": True,
        "noEmit": True,
        "target": "es2022",
        "module": "esnext",
        "moduleResolution": "bundler",
        "jsx": "react-jsx",
        "lib": ["es2022", "dom"],
        "allowImportingTsExtensions": True,
        "types": [],
    },
    "include": ["*.ts", "*.tsx"],
}
MAIN = """
import {StrictMode} from "react";
import {createRoot} from "react-dom/client";
import App from "./App.tsx";

createRoot(document.getElementById("root")!).render(<StrictMode><App /></StrictMode>);
"""  # as the template of Vite has it
PAGE = (
    '<!doctype html><link rel="icon" href="data:,"><div id="root"></div><script type="module" src="main.tsx"></script>'
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in its node_modules."""
    return made_once("npm", npm.install_client, tmp_path_factory)


# ---- what is in it


def test_the_package_is_of_this_version(installed: Path) -> None:
    package = json.loads((installed / "node_modules/@smqrt/client/package.json").read_text("utf-8"))
    assert package["version"] == smqrt.__version__.replace("rc", "-rc.")
    assert (npm.PACKAGE / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()
    files = {path.name for path in (installed / "node_modules/@smqrt/client").iterdir()}
    assert files == {"LICENSE", "README.md", "package.json", "smq.d.ts", "smq.mjs"}


def test_the_module_is_what_servers_have(installed: Path) -> None:
    module = (installed / "node_modules/@smqrt/client/smq.mjs").read_bytes()
    assert client_scripts().read("smq.mjs") == module
    assert client_scripts().read("smq.js") == classic_script(module)


# ---- Node.js


def test_in_node(installed: Path, serve: Callable[..., Served]) -> None:
    shutil.copy(HERE / "scenario.mjs", installed)
    printed = npm.run("node", "scenario.mjs", f"{serve(APP).url}/smq.lsp", cwd=installed).stdout.splitlines()
    assert printed == [
        '"connecting" true 1',
        '"online" true',
        '{"sum":42}',
        '"timeout"',
        "23",  # the code of a TimeoutError
        '65520 "ü€😀"',
        '["offline","connecting","online"]',
        '"again"',
        '"the loop has ended"',
        '{"done":true} "offline" "disconnected"',
        '"closed" true',
        '"closed" "cannot connect"',  # Node.js reports a refused WebSocket as an error only
    ]


WRONG_ADDRESS = """
import {SmqClient} from "@smqrt/client";

for (const callbacks of [{}, {onclose() {}}, {onstate() {}}]) {
    let attempts = 0, tried;
    const third = new Promise(resolve => { tried = resolve; });
    class Counting extends WebSocket {
        constructor(url) {
            super(url);
            if (++attempts === 3) tried();
        }
    }
    const smq = new SmqClient("http://127.0.0.1:1/smq.lsp", {reconnectDelay: 10, WebSocket: Counting, ...callbacks});
    await third;
    await smq.close();
}
"""


def test_a_wrong_address_is_reported_once(installed: Path) -> None:
    """By a client without callbacks, which would wait without a sign. The process ends when its clients are closed."""
    (installed / "wrong.mjs").write_text(WRONG_ADDRESS, "utf-8")
    assert npm.run("node", "wrong.mjs", cwd=installed).stdout == (
        "SMQ: ws://127.0.0.1:1/smq.lsp: cannot connect. The client tries again until it is closed.\n"
    )


def test_the_example_of_a_request_in_the_manual(installed: Path, serve: Callable[..., Served]) -> None:
    (example,) = (text for text in re.findall(r"^```js\n(.*?)^```$", MANUAL, re.M | re.S) if "adder" in text)
    head = f'import {{SmqClient}} from "@smqrt/client";\nconst url = "{serve(APP).url}/smq.lsp";\n'
    (installed / "request.mjs").write_text(head + example + "await Promise.all([adder.close(), caller.close()]);\n")
    assert npm.run("node", "request.mjs", cwd=installed).stdout == "42\n"


@pytest.mark.parametrize("number", range(len(re.findall(r"^```js$", MANUAL, re.M))))
def test_examples_of_the_manual_have_no_errors(number: int, tmp_path: Path) -> None:
    (tmp_path / "example.mjs").write_text(re.findall(r"^```js\n(.*?)^```$", MANUAL, re.M | re.S)[number], "utf-8")
    npm.run("node", "--check", "example.mjs", cwd=tmp_path)


# ---- TypeScript, Vite and React


def make_project(folder: Path, installed: Path) -> None:
    """The examples of the manual as a project, with the installed package."""
    shutil.copytree(installed / "node_modules", folder / "node_modules")
    for name in ("react", "react-dom", "scheduler", "csstype", "@types"):
        (folder / "node_modules" / name).symlink_to(npm.MODULES / name)
    for name, text in BLOCK.findall(MANUAL):
        (folder / name).write_text(text, "utf-8")
    (folder / "main.tsx").write_text(MAIN, "utf-8")
    shutil.copy(HERE / "types.ts", folder)
    (folder / "tsconfig.json").write_text(json.dumps(CONFIG), "utf-8")
    (folder / "index.html").write_text(PAGE, "utf-8")


def test_types_and_a_bundle(
    installed: Path, tmp_path: Path, serve: Callable[..., Served], new_page: Callable[..., Any]
) -> None:
    """The examples compile in strict mode, and run in Chromium out of a bundle."""
    make_project(tmp_path, installed)
    assert {"readings.ts", "hooks.ts", "App.tsx"} <= {path.name for path in tmp_path.iterdir()}
    npm.run("node", npm.MODULES / "typescript/bin/tsc", "-p", ".", cwd=tmp_path)
    shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("index.html"))
    options = ("--base", "./", "--outDir", "app", "--emptyOutDir", "false")
    npm.run("node", npm.MODULES / "vite/bin/vite.js", "build", *options, cwd=tmp_path)
    page = new_page(f"{serve(tmp_path / 'app').url}/")
    page.get_by_text("online").wait_for()
    page.get_by_text("no reading yet").wait_for()
    page.evaluate(
        """async () => {
            const {SmqClient} = await import("/rtl/smq.mjs"), smq = new SmqClient("smq.lsp");
            smq.observe("temperature", count => count && smq.pubjson({celsius: 21.5}, "temperature"));
        }"""
    )
    page.get_by_text("21.5 °C").wait_for()


def test_vite_forwards_the_address_of_the_hub(
    installed: Path, tmp_path: Path, serve: Callable[..., Served], new_page: Callable[..., Any]
) -> None:
    """Its development server, with the configuration of the manual."""
    make_project(tmp_path, installed)
    (config,) = re.findall(r"^// web/vite.config.ts\n(.*?)^```$", MANUAL, re.MULTILINE | re.DOTALL)
    without_react = "".join(line for line in config.splitlines(keepends=True) if "react" not in line)
    hub = serve(APP).url
    assert "http://127.0.0.1:9357" in without_react
    (tmp_path / "vite.config.ts").write_text(without_react.replace("http://127.0.0.1:9357", hub), "utf-8")
    (tmp_path / "node_modules/vite").symlink_to(npm.MODULES / "vite")
    arguments = ("--host", "127.0.0.1", "--port", str(port := free_port()), "--strictPort")
    with npm.started("node", npm.MODULES / "vite/bin/vite.js", *arguments, cwd=tmp_path) as vite:
        assert any(f":{port}/" in line for line in vite.stdout)
        new_page(f"http://127.0.0.1:{port}/").get_by_text("online").wait_for()
