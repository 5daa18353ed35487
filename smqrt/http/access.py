"""Access rules of a server: the Host names it answers to, the pages whose requests it takes, who is shown errors
(help: security)."""

from __future__ import annotations

from ipaddress import ip_address
from typing import NoReturn, Protocol

from smqrt.http.cors import Cors, CorsRequest, is_preflight, wanted_method
from smqrt.http.status import HttpError
from smqrt.settings.limit_register import Limit
from smqrt.transport.origins import Hosts, Origins, host_name, is_loopback, same_origin

_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
_FORWARDED = frozenset(("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"))
_MAX_KNOWN = 1024
_SHOWN = 255  # characters; no name has more

ORIGINS = Limit("origins", "origins", "pages of other origins may not do this")
HOSTS = Limit("hosts", "hosts", "the server does not answer to that name")


class CheckedRequest(CorsRequest, Protocol):
    """What the rules look at: see `smqrt.http.message.Request`."""

    cors: Cors | None
    path: str
    host: str
    secure: bool

    @property
    def local(self) -> tuple[str, int]:
        """Address and port the client connected to."""

    def has_any(self, names: frozenset[str]) -> bool:
        """Whether a header field of these names is there."""


class Access:
    """What a server asks of every request.

    Args:
        origins: pages of other hosts that are welcome.
        hosts: the names it answers to; none are every name, on loopback the names of loopback only.
        loopback: whether it listens on loopback only: a page of the web that has its own name point to 127.0.0.1 (DNS
            rebinding) sends that name as Host.
        debug: whether clients see tracebacks; None for those of this machine, when it listens on loopback.
    """

    def __init__(
        self,
        origins: Origins | None = None,
        hosts: Hosts | None = None,
        loopback: bool = False,
        debug: bool | None = False,
    ) -> None:
        self._origins = origins or Origins()
        self._cors = Cors()
        self._hosts = hosts or Hosts()
        self._loopback = loopback
        self._debug = debug
        self._any_host = self._hosts.all or not (self._hosts or loopback)
        self._known: set[str] = set()  # Host headers that were found good

    def check(self, request: CheckedRequest) -> bool:
        """Refuses a request for another host, and one that changes something for a page of another host. Browsers are
        told which pages may read the answer.

        Returns:
            whether the request has been answered: it was a browser's, that asked what a page may send.

        Raises:
            HttpError: 403.
        """
        is_allowed = False
        if self._origins or request.cors is not None:
            is_allowed = self._rules(request).say(request, self._origins)
        if request.host not in self._known and not self._any_host:
            self._check_host(request)
        if request.method not in _SAFE:
            self.check_origin(request)
        return request.method == "OPTIONS" and is_preflight(request) and self._answers(request, is_allowed)

    def check_origin(self, request: CheckedRequest, more: Origins | None = None) -> None:
        """Refuses a request of a page of another host that is in no list; one without an Origin is not from a page.

        Args:
            request: the request.
            more: what is welcome beside the server's own list.

        Raises:
            HttpError: 403.
        """
        origin = request.get("origin")
        if origin is None or self._welcome(request, origin):
            return
        if more is not None and more.has(origin):
            self._cors.say(request, more)
            return
        what = f"of a page of {origin[:_SHOWN]!r} for {(request.get('host') or '')[:_SHOWN]!r}"
        setting, where = f"origins={origin}", "the setting is `origins`"
        if self._listed(request).has(origin):
            setting = f"methods={request.method}"
        if request.cors is not None:
            setting, where = f"{setting} in setcors of the application", "the application's `setcors` says who may"
        self._refuse(request, ORIGINS, what, setting, f"Pages of other origins may not do this; {where}.")

    def shows_errors(self, request: CheckedRequest) -> bool:
        """Tells whether the client may see what went wrong inside the server."""
        if self._debug is not None:
            return self._debug
        at_home = self._loopback and _is_local(request) and is_loopback(host_name(request.get("host") or ""))
        return at_home and not request.has_any(_FORWARDED)

    def _rules(self, request: CheckedRequest) -> Cors:
        return self._cors if request.cors is None else request.cors

    def _listed(self, request: CheckedRequest) -> Origins:
        own = self._rules(request).origins
        return self._origins if own is None else own

    def _welcome(self, request: CheckedRequest, origin: str) -> bool:
        if same_origin(origin, request.get("host") or "", request.secure):
            return True
        may_use = request.method in _SAFE or self._rules(request).takes(request.method)
        return may_use and self._listed(request).has(origin)

    def _answers(self, request: CheckedRequest, is_allowed: bool) -> bool:
        """Answer a preflight of a page that may send; refuse one of a page that may not, unless nobody may by our rules
        and only reads: then the application may have rules of its own."""
        if is_allowed:
            self._rules(request).answer_preflight(request)
        elif self._listed(request) or wanted_method(request) not in _SAFE:
            self.check_origin(request)
        return is_allowed

    def _check_host(self, request: CheckedRequest) -> None:
        host = request.get("host")
        name = host_name(host or "")
        if host is None or is_loopback(name) or self._hosts.has(name):
            if host is not None and len(host) <= _SHOWN and len(self._known) < _MAX_KNOWN:
                self._known.add(host)
        elif self._hosts or _is_local(request):
            what = f"for the host {host[:_SHOWN]!r}"
            self._refuse(
                request,
                HOSTS,
                what,
                f"hosts={name}",
                "This server does not answer to that name; the setting is `hosts`.",
            )

    def _refuse(self, request: CheckedRequest, limit: Limit, what: str, setting: str, sentence: str) -> NoReturn:
        asked = f"{request.method} {request.path[:_SHOWN]!r}"
        limit.refused(f"{asked} {what}", f"to allow it, set {ascii(setting[:_SHOWN])[1:-1]}")
        raise HttpError(403, sentence)


def _is_local(request: CheckedRequest) -> bool:
    """Whether it came to an address of loopback."""
    address = ip_address(request.local[0].partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
