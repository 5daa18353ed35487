"""Commands for the code of Lua applications."""

from __future__ import annotations

import os
import readline
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from smqrt.apps.lua import signatures
from smqrt.errors import StartError
from smqrt.printable import printable

# ---- `smqrt lua-stubs`

STUBS_FOLDER = ".luals"
"""The folder of the annotations in an application. Names that begin with a dot are not served."""
LUARC = ".luarc.json"


@click.command("lua-stubs")
@click.argument("folder", type=click.Path(path_type=Path))
def lua_stubs(folder: Path) -> None:
    """Write annotation files of the Lua API into FOLDER.

    Editors with LuaLS, the Lua language server, complete and check calls with them. FOLDER is created when it does
    not exist; files of an earlier release are overwritten. An application around FOLDER gets the file .luarc.json
    when it has none.

    \b
    Example:
      smqrt lua-stubs shop/.luals
    """
    try:
        count = write_stubs(folder)
        click.echo(f"Wrote {count} annotation files to {folder}.")
        application = folder.parent
        is_application = (application / ".preload").exists() or any(application.glob("*.lsp"))
        if is_application and not (application / LUARC).exists():
            write_luarc(application, folder.name)
            click.echo(f"Wrote {application / LUARC}.")
    except OSError as error:
        raise StartError(f"Cannot write {error.filename}: {error.strerror}.") from None


def write_stubs(folder: Path) -> int:
    """Write the annotation files into a folder and return their number. Raises OSError."""
    files = signatures.stubs()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return len(files)


def write_luarc(application: Path, stubs_folder: str = STUBS_FOLDER) -> None:
    """Write the settings of LuaLS into the folder of an application. Raises OSError."""
    (application / LUARC).write_text(signatures.luarc(stubs_folder), "utf-8")


# ---- `smqrt lua`

_ANSWER_S = 3700.0
"""The time limit of a call, above that of the server."""
_HISTORY_LINES = 1000
_HELP = """\
A line is Lua: an expression prints its values, and global variables are those of the application.
  :watch TOPIC [HUB]  print the messages of a topic until Ctrl-C
  :help               this text
  :quit               leave, as Ctrl-D
Ctrl-C ends a call that waits, and drops an incomplete input."""


class PromptClient:
    """A connection to the Lua prompt of a server.

    Args:
        path: the socket.
        app: the name of the application; "-" for the one at /.

    Raises:
        StartError: no server listens there, or the application has no prompt.
    """

    def __init__(self, path: Path, app: str) -> None:
        from smqrt.workers.worker_rpc import ChannelError, FdChannel  # slow to import

        self._errors = ChannelError
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise StartError(
                f"{path}: no connection to a Lua prompt: {error.strerror}. See smqrt help lua-api."
            ) from None
        self._channel = FdChannel(sock)
        message = self._exchange({"do": "open", "app": app})
        if message["do"] == "failed":
            raise StartError(f"{message['why']}.")
        self.app = str(message["app"])

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._channel.send(message)
            return self._channel.receive(_ANSWER_S)[0]
        except self._errors as error:
            raise StartError(f"the prompt has ended: {error}.") from None

    def run(self, code: str) -> tuple[str, str]:
        """Run code; return "done", "more" (the code is incomplete) or "error", and the output. Ctrl-C ends the code."""
        return self._finish({"do": "run", "code": code.encode("utf-8", "surrogateescape")})

    def watch(self, topic: str, hub: int | None) -> tuple[str, str]:
        """Print the messages of a topic until Ctrl-C; return the state and the text at the end."""
        return self._finish({"do": "watch", "topic": topic, "hub": hub})

    def _finish(self, message: dict[str, Any]) -> tuple[str, str]:
        try:
            answer = self._exchange(message)
            while answer["do"] == "message":
                click.echo(_message_line(answer))
                answer = self._channel.receive(None)[0]
        except KeyboardInterrupt:
            answer = self._exchange({"do": "stop"})
            while answer["do"] == "message":  # sent before the server has read "stop"
                answer = self._channel.receive(_ANSWER_S)[0]
        except self._errors as error:
            raise StartError(f"the prompt has ended: {error}.") from None
        return str(answer["state"]), str(answer["text"])

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def _message_line(message: dict[str, Any]) -> str:
    if "missed" in message:
        return f"... {message['missed']} more messages"
    subtopic = f" ({message['subtopic']})" if message["subtopic"] else ""
    return printable(f"{message['topic']}{subtopic} from {message['from']}: {message['text']}", lines=True)


def find_socket(pid: int | None, worker: int) -> Path:
    """Return the socket of the only server of this user with a Lua prompt, or of the one with a process ID.

    Raises:
        StartError: there is no such server, or more than one.
    """
    from smqrt.operations.lua_prompt import SETTING, socket_name
    from smqrt.operations.server import folder

    found = {int(path.name.split("-")[1]): path for path in folder().glob(socket_name(0, worker).replace("0", "*", 1))}
    running = {number: path for number, path in found.items() if Path(f"/proc/{number}").exists()}
    if pid is not None and pid in running:
        return running[pid]
    if pid is None and len(running) == 1:
        return next(iter(running.values()))
    if pid is None and running:
        numbers = ", ".join(map(str, sorted(running)))
        raise StartError(f"several servers have a Lua prompt: processes {numbers}. Name one with --pid.")
    which = f"process {pid}" if pid is not None else "no running server of this user"
    raise StartError(f"{which} has a Lua prompt (worker {worker}): set {SETTING} = true, and restart the server.")


@click.command("lua")
@click.argument("app")
@click.option("-e", "--execute", "code", help="Run this code, print its values, and exit; 1 after an error.")
@click.option(
    "--worker", type=click.IntRange(0), default=0, show_default=True, help="The worker whose Lua state to use."
)
@click.option("--pid", type=int, help="Process ID of the server, when this user runs several.")
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    help="Path of the socket, for servers of other users.  [default: from the running servers]",
)
def lua(app: str, code: str | None, worker: int, pid: int | None, path: Path | None) -> None:
    """Open a Lua prompt in the running application APP.

    APP is the name of an application, "-" for the one at /. The server needs the setting admin.lua_prompt = true. Only
    its own user and root may connect, and each line is logged.

    \b
    Examples:
      smqrt lua shop
      smqrt lua shop -e 'ba.version()'
    """
    import gevent

    gevent.get_hub().NOT_ERROR += (KeyboardInterrupt,)  # otherwise gevent prints a traceback for it
    client = PromptClient(path or find_socket(pid, worker), app)
    try:
        if code is not None:
            state, text = client.run(code)
            _print(text, is_error=state != "done")
            if state == "more":
                raise StartError("the code is incomplete.")
            sys.exit(0 if state == "done" else 1)
        with _history():
            _loop(client)
    finally:
        client.close()


def _loop(client: PromptClient) -> None:
    """Read and run lines until the end of the input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        click.echo(f"Lua in the application {client.app}. :help lists the commands, Ctrl-D ends.")
    lines: list[str] = []
    while True:
        try:
            lines.append(input(("... " if lines else f"{client.app}> ") if is_terminal else ""))
        except EOFError:
            break
        except KeyboardInterrupt:
            click.echo()
            lines = []
            continue
        words = lines[0].split()
        if words[:1] == [":quit"]:
            break
        if words[:1] == [":help"]:
            click.echo(_HELP)
        elif words[:1] == [":watch"] and len(words) in (2, 3) and (len(words) == 2 or words[2].isdecimal()):
            state, text = client.watch(words[1], int(words[2]) if len(words) == 3 else None)
            _print(text, is_error=True)
        elif words and words[0].startswith(":") and not words[0].startswith("::"):
            _print("no such command, or wrong arguments; :help lists the commands", is_error=True)
        elif "".join(lines).strip():
            state, text = client.run("\n".join(lines))
            if state == "more":
                continue
            _print(text, is_error=state != "done")
        lines = []
    if lines:
        _print("the input ends within a statement", is_error=True)


def _print(text: str, is_error: bool) -> None:
    if text:
        click.echo(text, nl=not text.endswith("\n"), err=is_error)


@contextmanager
def _history() -> Iterator[None]:
    """Keep the lines of a terminal in a file that only this user can read."""
    state = os.environ.get("XDG_STATE_HOME")
    path = (Path(state) if state else Path.home() / ".local/state") / "smqrt" / "lua_history"
    if not sys.stdin.isatty():
        yield
        return
    readline.set_history_length(_HISTORY_LINES)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            readline.write_history_file(path)
