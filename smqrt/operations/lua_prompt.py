"""Prompt in the environment of a running Lua application, for `smqrt lua`.

A Unix socket accepts connections of processes of this user and of root. Each connection belongs to one application.
Messages are those of `FdChannel`:

    command                              server
    open {app}                      ──▶
                                    ◀──  opened {app}, or failed {why}
    run {code}, or watch {topic, hub} ─▶
                                    ◀──  message {topic, text, …}, as often as needed, for `watch`
    stop                            ──▶
                                    ◀──  done {state, text}: "done", "more" (the code is incomplete) or "error"
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import gevent

from smqrt.apps.lua.applications import Application
from smqrt.apps.lua.bridge import LuaError, from_utf8
from smqrt.apps.lua.vm import Vm
from smqrt.errors import ArgumentError, ClosedError, StartError
from smqrt.operations.server import folder, make_folder
from smqrt.operations.topic_listener import LocalTopicListener
from smqrt.printable import printable
from smqrt.process.current_process import running_app
from smqrt.server.restart.control_socket import ControlSocket
from smqrt.smq.gevent_broker import GeventBroker, all_brokers
from smqrt.workers.worker_rpc import ChannelError, ChannelSilent, FdChannel, Message, worker_place

log = logging.getLogger("smqrt.admin")  # lines of prompts are warnings, which every log level shows

MAX_PROMPTS = 4
"""The limit of open prompts."""
MAX_CODE_BYTES = 256 << 10
IDLE_S = 3600.0
"""A prompt without input for this time is closed."""
_LOGGED_CHARS = 500
_POLL_S = 0.1
"""The interval in which `watch` sends messages; of each interval the first ones are sent, the others counted."""
SETTING = "admin.lua_prompt"


def socket_name(pid: int, worker: int) -> str:
    """Return the name of the socket of a worker of the server with this process ID."""
    return f"lua-{pid}-{worker}.sock"


def own_socket_name() -> str:
    """Return the name of the socket of this process."""
    place = worker_place()
    return socket_name(os.getppid() if place.count > 1 else os.getpid(), place.number)


class PromptLimits(NamedTuple):
    """Limits of a call at a prompt.

    Attributes:
        wait_s: seconds after which a call ends, if it waits.
        compute_s: seconds of CPU time after which Lua that does not wait gets an error.
    """

    wait_s: float
    compute_s: float


class LuaPrompt:
    """The socket and the connections of prompts of this process.

    Args:
        vm: the Lua runtime.
        applications: the applications of the server.
        limits: the limits of a call.
    """

    def __init__(self, vm: Vm, applications: Sequence[Application], limits: PromptLimits) -> None:
        self._vm, self._applications, self._limits = vm, applications, limits
        self._entries: dict[str, int] = {}
        self._next_number = count(1).__next__
        self._connections: set[gevent.Greenlet[..., None]] = set()
        self._socket: ControlSocket | None = None
        vm.namespace("ba.prompt", {"entry": self._entry})

    def _entry(self, name: bytes, ref: int) -> None:
        self._entries[name.decode("ascii")] = ref

    def start(self) -> None:
        """Listen at the socket of this process.

        Raises:
            StartError: the socket can't be created.
        """
        path = folder() / own_socket_name()
        try:
            is_private = make_folder()
        except OSError as error:
            raise StartError(f"{SETTING}: {path.parent} can't be created: {error.strerror}.") from None
        if not is_private:
            raise StartError(f"{SETTING}: other users have access to {path.parent}; set XDG_RUNTIME_DIR.")
        self._socket = ControlSocket(str(path), self._accept, SETTING)
        self._socket.open()
        log.warning("lua prompt: listening at %s", path)

    def close(self) -> None:
        """Stop listening and end all prompts. A second call does nothing."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
        gevent.killall(list(self._connections), block=False)

    def _accept(self, channel: FdChannel, hello: Message) -> None:
        greenlet = gevent.spawn(self._serve, channel, hello)
        self._connections.add(greenlet)
        greenlet.link(self._connections.discard)

    def _serve(self, channel: FdChannel, hello: Message) -> None:
        prompt = None
        try:
            application = self._application(hello)
            prompt = _Prompt(self._vm, self._entries, self._next_number(), application, channel, self._limits)
            channel.max_bytes = MAX_CODE_BYTES
            channel.send({"do": "opened", "app": application.uri})
            prompt.serve()
        except ArgumentError as error:
            with suppress(ChannelError):
                channel.send({"do": "failed", "why": str(error)})
        except ChannelError as error:
            log.info("lua prompt: closed: %s", error)
        finally:
            if prompt is not None:
                prompt.close()
            channel.close()

    def _application(self, hello: Message) -> Application:
        """Return the application of the first message. Raises ArgumentError when it has no prompt."""
        name = str(hello.get("app", "")).strip("/")
        if len(self._connections) > MAX_PROMPTS:
            raise ArgumentError(f"{MAX_PROMPTS} prompts are open, the limit; close one of them")
        found = [one for one in self._applications if one.name == ("" if name == "-" else name)]
        if not found:  # the lines of the start name an application at / by its folder
            found = [one for one in self._applications if not one.name and one.path.resolve().stem == name]
        if not found:
            known = ", ".join(one.name or "-" for one in self._applications)
            raise ArgumentError(f"there is no application {name!r}; the server has: {known} (- is the one at /)")
        application = found[0]
        if application.scope is None:
            raise ArgumentError(f"the application {application.uri} is not running: {application.error or 'stopped'}")
        if application.has_file(".preload.py") and not application.has_file(".preload"):
            raise ArgumentError(
                f"the application {application.uri} is in Python; the prompt is for Lua applications. Use the "
                "console, or smqrt sub and smqrt pub."
            )
        return application


class _Prompt:
    """A connection: runs one job after the other, in a greenlet of its own, which `stop` ends."""

    def __init__(
        self,
        vm: Vm,
        entries: dict[str, int],
        number: int,
        application: Application,
        channel: FdChannel,
        limits: PromptLimits,
    ) -> None:
        self._vm, self._entries, self._number = vm, entries, number
        self._application, self._channel, self._limits = application, channel, limits
        self._job: gevent.Greenlet[..., None] | None = None
        pid, uid = channel.peer()
        self._who = f"process {pid} of user {uid}, application {application.uri}"
        if vm.run(entries["open"], number, application.number) != (True,):
            raise ArgumentError(f"the application {application.uri} is not running")
        vm.activities.limits[self] = limits.compute_s  # the watchdog measures often before a call needs it
        log.warning("lua prompt: opened by %s", self._who)

    def close(self) -> None:
        """End the job and forget the session."""
        if self._job is not None:
            self._job.kill()
        self._vm.activities.limits.pop(self, None)
        self._vm.run(self._entries["close"], self._number)
        log.warning("lua prompt: closed by %s", self._who)

    def serve(self) -> None:
        """Handle messages until the other side closes the connection. Raises ChannelError at the end."""
        while True:
            try:
                message, fds = self._channel.receive(IDLE_S)
            except ChannelSilent:
                if self._is_busy():
                    continue  # `watch` may run for days
                raise
            for fd in fds:
                os.close(fd)
            if message["do"] == "stop":
                if self._job is not None:
                    self._job.kill(block=False)
                continue
            if self._is_busy():
                raise ChannelError("a line was sent before the end of the last one")
            if message["do"] == "run" and isinstance(message.get("code"), bytes):
                self._job = gevent.spawn(self._answer, self._run, message["code"])
            elif message["do"] == "watch" and isinstance(message.get("topic"), str):
                self._job = gevent.spawn(self._answer, self._watch, message["topic"], message.get("hub"))
            else:
                raise ChannelError(f"unknown message {message['do']!r}")

    def _is_busy(self) -> bool:
        return self._job is not None and not self._job.dead

    def _answer(self, work: object, *arguments: object) -> None:
        assert callable(work)
        try:
            state, text = work(*arguments)
        except (ArgumentError, ClosedError) as error:
            state, text = "error", str(error)
        except gevent.GreenletExit:
            state, text = "error", "interrupted"
        except ChannelError:
            return  # `serve` gets it too
        with suppress(ChannelError):
            self._channel.send({"do": "done", "state": state, "text": text})

    def _run(self, code: bytes) -> tuple[str, str]:
        text = code.decode("utf-8", "replace")
        rest = f"... ({len(text)} characters)" if len(text) > _LOGGED_CHARS else ""
        log.warning("lua prompt: %s: %s%s", self._who, printable(text[:_LOGGED_CHARS]), rest)
        scope = self._application.scope
        if scope is None:
            raise ArgumentError(f"the application {self._application.uri} is not running")
        state, why = "error", ""
        try:
            with gevent.Timeout(self._limits.wait_s), running_app(scope):
                run = self._vm.activities.run_limited
                answer = run(self._limits.compute_s, self._entries["run"], self._number, code)[0]
                state = from_utf8(answer) if isinstance(answer, bytes) else state
        except gevent.Timeout:
            why = f"ended after {self._limits.wait_s:g} s, the limit admin.lua_prompt_s"
        except LuaError as error:
            why = str(error)
        except gevent.GreenletExit:
            why = "interrupted"
        output = self._vm.run(self._entries["take"], self._number)[0]
        text = output.decode("utf-8", "replace") if isinstance(output, bytes) else ""
        if why:
            text += f"\n{why}" if text and not text.endswith("\n") else why
        return state, printable(text, lines=True)

    def _watch(self, topic: str, hub: object) -> tuple[str, str]:
        log.warning("lua prompt: %s: watches %s", self._who, printable(topic[:_LOGGED_CHARS]))
        broker = self._broker(hub)
        listener = LocalTopicListener(broker, [topic])
        try:
            while broker in all_brokers():
                rows, missed = listener.take()
                for row in rows:
                    self._channel.send({"do": "message", **row})
                if missed:
                    self._channel.send({"do": "message", "missed": missed})
                gevent.sleep(_POLL_S)
        finally:
            listener.close()
        return "error", "the hub was closed"

    def _broker(self, hub: object) -> GeventBroker:
        """Return the hub with a number, or the only one of the application."""
        brokers = all_brokers()
        if hub is None:
            scope = self._application.scope
            brokers = [one for one in brokers if scope is not None and scope.folder and one.app == scope.folder.name]
            if len(brokers) > 1:
                numbers = ", ".join(str(one.number) for one in brokers)
                raise ArgumentError(f"the application has several hubs: {numbers}. Name one: :watch TOPIC HUB")
        else:
            brokers = [one for one in brokers if one.number == hub]
        if not brokers:
            raise ArgumentError(
                "this process has no hub with this number" if hub is not None else "the application has no hub"
            )
        return brokers[0]
