"""Certificates by ACME for Lua: `require "acme/engine"` (spec: bas-api §17.1). The other half is
lib/acme/engine.lua.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import gevent
from gevent.threadpool import ThreadPool

from smqrt.acme import orders
from smqrt.acme.files import HTTP_01, PREFIX, Answer, new_key, write_private
from smqrt.apps.lua.bridge import LuaResult, LuaValues, fail, from_utf8, methods, utf8
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.errors import AcmeError
from smqrt.workers.worker_identity import worker_place

GIVE_UP_S = orders.ORDER_S + 60.0


class AcmeBinding:
    """Certificate orders of applications, one at a time.

    Args:
        services: `http_server` answers the challenges.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._texts: dict[str, bytes] = {}
        self._pool: ThreadPool | None = None
        self._is_asked = False

    def order(
        self,
        name: bytes,
        directory: bytes,
        contact: bytes,
        ca: bytes,
        account_key: bytes | None,
        account_id: bytes | None,
        key: bytes | None,
    ) -> LuaResult:
        """Order a certificate for a host name; blocks.

        Returns key, certificate with its chain, key and URL of the account; nil and the reason when it failed.
        """
        if fault := self._answer_challenges():
            return fail(fault)
        account = from_utf8(directory), from_utf8(contact), from_utf8(ca), account_key, account_id
        pool = self._pool = self._pool or ThreadPool(1)  # not gevent's own: an order may take minutes
        try:
            outcome = pool.spawn(_outcome, from_utf8(name), account, key or new_key(), self._publish)
            return outcome.get(timeout=GIVE_UP_S)
        except gevent.Timeout:
            self._pool = None  # the thread can't be stopped; it ends with its order
            return fail(f"the order did not finish within {GIVE_UP_S:g} s")

    def _answer_challenges(self) -> str | None:
        """Make the server answer challenges; return why it can't, None when it does."""
        server = self._services.http_server
        if server is None:
            return "there is no HTTP server that could answer to the authority"
        if worker_place().count > 1:
            return "a server with workers orders its certificate by the setting tls.acme, not by acme/engine"
        if not self._is_asked:
            self._is_asked = True
            before = server.challenge_answer

            def answer(path: str) -> bytes | None:
                own = self._texts.get(path.removeprefix(PREFIX)) if path.startswith(PREFIX) else None
                return own or (before(path) if before else None)

            server.challenge_answer = answer
        return None

    def _publish(self, answers: Sequence[Answer]) -> None:
        self._texts = {one.token: one.key_authorization.encode() for one in answers}


_Account = tuple[str, str, str, bytes | None, bytes | None]


def _outcome(name: str, account: _Account, key: bytes, publish: Callable[[Sequence[Answer]], object]) -> LuaValues:
    """Order in this thread. Failures are return values: gevent prints exceptions of its threads to stderr."""
    try:
        with TemporaryDirectory(prefix="smqrt-acme") as folder:
            return _ordered(Path(folder), name, account, key, publish)
    except AcmeError as error:
        return fail(str(error))
    except (OSError, ValueError) as error:
        return fail(f"the order of {name} failed: {error}")


def _ordered(
    folder: Path, name: str, account: _Account, key: bytes, publish: Callable[[Sequence[Answer]], object]
) -> LuaValues:
    directory, contact, ca, account_key, account_id = account
    if account_key is not None:
        write_private(folder / "account.key", account_key)
        if account_id is not None:
            known = {"uri": from_utf8(account_id), "contact": contact}
            write_private(folder / "account.json", json.dumps(known).encode())
    chain = orders.order(orders.Account(directory, folder, contact, ca), [name], HTTP_01, key, publish)
    uri = json.loads((folder / "account.json").read_bytes())["uri"]
    return key, chain, (folder / "account.key").read_bytes(), utf8(uri)


def install_acme(vm: Vm, services: Services) -> None:
    """Give Lua the engine of ACME."""
    vm.namespace("ba.acme", {}, methods(AcmeBinding(services), "order"))
