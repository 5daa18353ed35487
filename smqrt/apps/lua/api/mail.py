"""`socket.mail` (spec: bas-api §12): what Lua describes becomes a mail and goes to its server. The Lua half is
lib/socket/mail.lua."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smqrt.apps.lua import bridge
from smqrt.apps.lua.bridge import LuaResult, Table, from_utf8, with_words
from smqrt.apps.lua.services import Services
from smqrt.apps.lua.vm import Vm
from smqrt.mail.message import MAX_MAIL_BYTES, Attachment, Mail
from smqrt.mail.smtp import TIMEOUT_S, MailServer
from smqrt.transport.tls_contexts import ClientTls


class MailBinding:
    """Sends mails through servers that Lua names.

    Args:
        services: its TLS clients are used.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    def send(self, server: bytes, mail: bytes) -> LuaResult:
        """Send a mail: true, and whom the server refused; raises StreamError. Both are packed tables; blocks."""
        op, fields = bridge.load(server), bridge.load(mail)
        timeout_s = op[b"timeout_ms"] / 1000 if b"timeout_ms" in op else TIMEOUT_S
        refused = self._server_of(op).send(_mail_of(fields), timeout_s)
        return (True, "; ".join(refused).encode()) if refused else True

    def _server_of(self, op: Table) -> MailServer:
        tls = self._services.tls[op[b"tls"]] if b"tls" in op else None
        assert tls is None or isinstance(tls, ClientTls)
        return MailServer(
            host=from_utf8(op[b"host"]),
            port=op.get(b"port"),
            user=from_utf8(op.get(b"user", b"")),
            password=from_utf8(op.get(b"password", b"")),
            tls=tls,
            starttls=op.get(b"starttls", False),
        )


def _mail_of(fields: Table) -> Mail:
    charset = _text(fields, b"charset") or "utf-8"
    return Mail(
        sender=_text(fields, b"from"),
        to=_texts(fields, b"to"),
        cc=_texts(fields, b"cc"),
        bcc=_texts(fields, b"bcc"),
        reply_to=_text(fields, b"replyto"),
        subject=_text(fields, b"subject"),
        text=_body(fields, b"text", charset),
        html=_body(fields, b"html", charset),
        charset=charset,
        encoding=_text(fields, b"encoding").lower(),
        images=[_attachment(one) for one in fields[b"images"].values()],
        attachments=[_attachment(one) for one in fields[b"files"].values()],
    )


def _attachment(fields: Table) -> Attachment:
    return Attachment(
        name=_text(fields, b"name"),
        data=fields[b"data"],
        content_type=_text(fields, b"type"),
        description=_text(fields, b"description"),
        cid=_text(fields, b"id"),
    )


def _text(fields: Table, name: bytes) -> str:
    value: Any = fields.get(name, b"")
    return str(value, "utf-8", "replace")


def _texts(fields: Table, name: bytes) -> list[str]:
    return [str(value, "utf-8", "replace") for _, value in sorted(fields[name].items())]


def _body(fields: Table, name: bytes, charset: str) -> str | None:
    """A text, whose bytes are in the charset that is named; what is not is read as UTF-8."""
    data = fields.get(name)
    if data is None:
        return None
    try:
        return str(data, charset, "replace")
    except (LookupError, UnicodeError):  # an unknown one: `Mail` says so
        return str(data, "utf-8", "replace")


def install_log(vm: Vm) -> Callable[[], None]:
    """Give Lua `mako.log` and `require "log"`; return what sends what is in that log, for the end of the server. It
    blocks for some seconds at most."""
    refs: list[int] = []
    vm.namespace("ba.maillog", {"attach": refs.append})

    def send() -> None:
        vm.run(refs[0])

    return send


def install(vm: Vm, services: Services) -> None:
    """Give Lua `socket.mail`."""
    binding = MailBinding(services)
    vm.namespace("socket.mail", {"max_bytes": lambda: MAX_MAIL_BYTES}, {"send": with_words(binding.send)})
