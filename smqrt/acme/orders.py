"""Certificate orders at an ACME authority, and automatic renewal.

directory → account → order → a challenge for each name: publish the answers, request verification
          → certificate signing request → certificate with its chain

All calls block: run them in a thread.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, Any

import gevent
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from gevent.event import Event

import smqrt
from smqrt.acme.files import (
    DNS_01,
    HTTP_01,
    MAX_STATE_BYTES,
    POLL_S,
    TLS_ALPN_01,
    AcmeFiles,
    Answer,
    ChallengeAnswers,
    Contexts,
    State,
    disk_threads,
    make_private_folder,
    new_key,
    write_private,
)
from smqrt.errors import AcmeError, StartError
from smqrt.loop.threads import DedicatedThreads
from smqrt.transport.server_tls import shown

if TYPE_CHECKING:
    from acme import messages
    from acme.client import ClientV2


MISSING = "needs the library acme: pip install 'smqrt[acme]'"
REQUEST_S = 30.0
"""Timeout of a request: for connecting, and between two pieces of the response."""
ORDER_S = 240.0
"""Timeout of a whole order."""
_POLL_S, _MAX_POLL_S = 0.2, 5.0  # first and longest interval of polling the authority

Publish = Callable[[Sequence[Answer]], object]
"""Publishes the answers and returns when all processes have them; an empty list removes the answers."""


def check_library() -> None:
    """Raise StartError when the library is missing. Does not load it: this takes time, and orders are rare."""
    if find_spec("acme") is None or find_spec("josepy") is None:
        raise StartError(f"tls.acme {MISSING}.")


@dataclass(frozen=True)
class Account:
    """An account at a certificate authority.

    Attributes:
        directory: URL of the authority's directory.
        folder: folder of `account.key` and `account.json`, which are created when they are missing.
        contact: mail address; empty for none.
        ca: file with the CA certificates for the directory's own certificate; empty for the system's.
        binding: key identifier and HMAC key (base64url) of external account binding (RFC 8555 §7.3.4); empty for none.
    """

    directory: str
    folder: Path
    contact: str = ""
    ca: str = ""
    binding: tuple[str, str] | tuple[()] = field(default=(), repr=False)


def order(account: Account, names: Sequence[str], kind: str, key: bytes, publish: Publish) -> bytes:
    """Order a certificate.

    Args:
        account: registered when it is new.
        names: host names.
        kind: the kind of the challenges: `HTTP_01`, `TLS_ALPN_01` or `DNS_01`.
        key: private key of the certificate, PEM.
        publish: see `Publish`.

    Returns:
        The certificate with its chain, PEM.

    Raises:
        AcmeError: the order failed, or took longer than `ORDER_S`; names the reason and the remedy.
    """
    try:
        import acme.client  # noqa: F401  # not at the top: it loads requests, and takes long
    except ImportError:
        raise AcmeError(f"ACME {MISSING}.") from None
    with _OrderClient(account) as client:
        return client.order(names, kind, key, publish)


class _OrderClient:
    """One order. As a context manager it raises every error as `AcmeError`."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._until = datetime.now() + timedelta(seconds=ORDER_S)
        self._retry_after_s = 0.0
        self._kind = ""

    def __enter__(self) -> _OrderClient:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, AcmeError):
            raise AcmeError(self._explain(error), self._retry_after_s) from error

    # ---- the account

    def _log_in(self) -> ClientV2:
        """Return a client with the account; register a new account."""
        from acme import client, messages
        from josepy.jwa import ES256
        from josepy.jwk import JWKEC

        key_path = self._account.folder / "account.key"
        if not key_path.exists():
            make_private_folder(self._account.folder)
            write_private(key_path, new_key())
        try:
            self._key = JWKEC(key=load_pem_private_key(key_path.read_bytes(), None))
        except ValueError:
            raise AcmeError(f"{key_path} is not a private key. Restore it, or remove it for a new account.") from None
        verify: Any = self._account.ca or True  # for `requests`; the library declares bool
        agent = f"smqrt/{smqrt.__version__}"
        net = client.ClientNetwork(self._key, alg=ES256, verify_ssl=verify, user_agent=agent, timeout=int(REQUEST_S))
        net.session.hooks["response"].append(self._note_retry_after)
        directory = client.ClientV2.get_directory(self._account.directory, net)
        acme_client = client.ClientV2(directory, net)
        path, known = self._account.folder / "account.json", dict[str, str]()
        with suppress(OSError, ValueError), path.open("rb") as file:
            known = dict(json.loads(file.read(MAX_STATE_BYTES)))
        if known.get("contact", "") == self._account.contact and known.get("uri"):
            net.account = messages.RegistrationResource(uri=known["uri"], body=messages.Registration())
        else:
            uri = self._register(acme_client)
            write_private(path, json.dumps({"uri": uri, "contact": self._account.contact}).encode())
        return acme_client

    def _note_retry_after(self, response: Any, **_: object) -> None:
        """Hook for responses: store the Retry-After of an error."""
        self._retry_after_s = 0.0
        if response.status_code >= 400:
            from acme.client import ClientV2

            until = ClientV2.retry_after(response, 0)
            self._retry_after_s = max(0.0, (until - datetime.now()).total_seconds())

    def _register(self, client: ClientV2) -> str:
        """Register the account, or update the contact of a registered one; return its URI."""
        from acme import errors, messages

        wanted: dict[str, Any] = {"email": self._account.contact} if self._account.contact else {}
        if self._account.binding:
            binding = messages.ExternalAccountBinding.from_data(
                self._key.public_key(), *self._account.binding, client.directory
            )
            wanted["external_account_binding"] = binding
        elif client.external_account_required():
            raise AcmeError(
                f"{self._account.directory} requires external account binding. Set tls.acme_eab_id and"
                " tls.acme_eab_key, or use another directory."
            )
        registration = messages.NewRegistration.from_data(terms_of_service_agreed=True, **wanted)
        try:
            return str(client.new_account(registration).uri)
        except errors.ConflictError as error:  # the key already has an account
            found = messages.RegistrationResource(uri=error.location, body=messages.Registration())
            client.net.account = found
            changed = messages.Registration.from_data(email=self._account.contact or None)
            client.update_registration(found, changed)
            return str(error.location)

    # ---- the order

    def order(self, names: Sequence[str], kind: str, key: bytes, publish: Publish) -> bytes:
        from acme import challenges, crypto_util, messages
        from josepy.b64 import b64encode

        self._kind = kind
        client = self._log_in()
        csr = crypto_util.make_csr(key, list(names))
        try:
            pending = client.new_order(csr)
        except messages.Error as error:
            if error.code != "accountDoesNotExist":
                raise
            # The authority has deleted the account: register a new one with the same key.
            (self._account.folder / "account.json").unlink(missing_ok=True)
            client = self._log_in()
            pending = client.new_order(csr)
        unverified = [one for one in pending.authorizations if one.body.status != messages.STATUS_VALID]
        chosen = [_challenge(one, kind) for one in unverified]
        thumbprint = b64encode(self._key.thumbprint(hash_function=SHA256)).decode()
        answers = [
            Answer(kind, one.body.identifier.value, token, f"{token}.{thumbprint}")
            for one, (_, token) in zip(unverified, chosen, strict=True)
        ]
        try:
            if answers:
                publish(answers)
            for challenge, _ in chosen:  # the JSON of the response is an empty object for all kinds
                client.answer_challenge(challenge, challenges.HTTP01Response(key_authorization=""))
            for one in unverified:
                self._wait_until_valid(client, one)
        finally:
            if answers:
                publish([])
        return str(client.finalize_order(pending, self._until).fullchain_pem).encode()

    def _wait_until_valid(self, client: ClientV2, authorization: messages.AuthorizationResource) -> None:
        """Poll an authorization until it is valid. Raises ValidationError and TimeoutError of the library."""
        from acme import errors, messages

        wait_s = _POLL_S
        while True:
            found, _ = client.poll(authorization)
            if found.body.status == messages.STATUS_VALID:
                return
            if found.body.status != messages.STATUS_PENDING:
                raise errors.ValidationError([found])
            if datetime.now() + timedelta(seconds=wait_s) > self._until:
                raise errors.TimeoutError
            sleep(wait_s)
            wait_s = min(wait_s * 1.5, _MAX_POLL_S)

    # ---- error messages

    def _explain(self, error: Exception) -> str:
        """Return the reason and the remedy of an error."""
        from acme import errors, messages
        from requests import RequestException

        directory = self._account.directory
        if isinstance(error, errors.ValidationError):
            failures = []
            for one in error.failed_authzrs:
                faults = [str(found.error.detail or found.error.typ) for found in one.body.challenges if found.error]
                failures.append(f"{one.body.identifier.value}: {_line('; '.join(faults) or 'no reason given')}")
            verdict = f"the authority could not verify {'; '.join(failures)} ({self._kind})"
            return f"{verdict}. {_REQUIREMENTS[self._kind]}."
        if isinstance(error, errors.IssuanceError):
            error = error.error
        if isinstance(error, messages.Error):
            main = ": ".join(str(one) for one in (error.code or error.typ, error.detail) if one)
            details = [f"{one.identifier.value}: {one.detail}" for one in error.subproblems or () if one.identifier]
            remedy = _REMEDIES.get(error.code or "", _CHECK_SETTINGS)
            return f"{directory} rejected the request: {_line('; '.join([main, *details]))}. {remedy}"
        if isinstance(error, errors.TimeoutError):
            return f"{directory} did not finish within {ORDER_S:g} s. {_RETRIED}"
        if isinstance(error, RequestException):
            return (
                f"cannot reach {directory}: {_line(error)}. Check tls.acme_directory, the network of this machine, and"
                " tls.acme_ca for a private authority."
            )
        if isinstance(error, OSError):
            return f"cannot store the files of the order: {_line(error)}. Check tls.acme_folder."
        # Some errors of the library have the HTTP response as their only argument.
        status = getattr(error.args[0] if error.args else None, "status_code", None)
        if status is not None:
            return f"{directory} responded with status {status}. {_RETRIED}"
        return f"{directory} violates RFC 8555: {type(error).__name__}: {_line(error)}. {_CHECK_SETTINGS}"


_RETRIED = "smqrt tries again automatically."
_CHECK_SETTINGS = "Check tls.acme, tls.acme_contact and tls.acme_directory."
_REMEDIES = {
    "rateLimited": "Wait, or use the authority's staging directory for tests.",
    "badNonce": _RETRIED,
    "serverInternal": _RETRIED,
    "caa": "Change the CAA record of the name, or use the authority that it names.",
    "rejectedIdentifier": "Check the names in tls.acme: the authority issues no certificate for some of them.",
    "invalidContact": "Check tls.acme_contact: a mail address.",
    "unsupportedContact": "Check tls.acme_contact: a mail address.",
    "externalAccountRequired": "Check tls.acme_eab_id and tls.acme_eab_key.",
}
_REQUIREMENTS = {
    HTTP_01: "Port 80 of the name must be forwarded to this server's port for HTTP",
    TLS_ALPN_01: "Port 443 of the name must be forwarded to this server's port for TLS; no proxy may terminate TLS",
    DNS_01: "The TXT record of _acme-challenge below the name must have reached all its name servers",
}


def _line(value: object) -> str:
    """Return the text of an authority as one line of limited length."""
    return " ".join(str(value).split())[:500].rstrip(".")


def _challenge(authorization: messages.AuthorizationResource, kind: str) -> tuple[messages.ChallengeBody, str]:
    """Return the challenge of a kind, and its token. Uses the JSON: the library has no class for TLS-ALPN-01."""
    name, offered = authorization.body.identifier.value, []
    for one in authorization.body.challenges:
        fields = one.chall.to_partial_json()
        if fields.get("type") == kind and fields.get("token"):
            return one, str(fields["token"])
        offered.append(str(fields.get("type")))
    raise AcmeError(
        f"the authority does not verify {name} by {kind}, only by: {', '.join(offered) or 'nothing'}. Change"
        " tls.acme_challenge."
    )


# ---- Background service for orders and renewals
#
# One process of the server orders, in a thread. All processes serve challenge answers and reload the new files.

log = logging.getLogger("smqrt")

FIRST_RETRY_S, MAX_RETRY_S = 120.0, 12 * 3600.0
"""First and longest delay after failures. Let's Encrypt allows five failures per account, name and hour."""
MAX_RETRY_AFTER_S = 8 * 86400.0
"""Maximum of a Retry-After of an authority; Let's Encrypt has limits of orders per week."""
OTHER_ORDERS_S = 5.0
"""Delay while another process orders."""
MIN_INTERVAL_S = 300.0
"""Minimum interval between two successful orders, for certificates of any lifetime."""
MAX_SLEEP_S = 600.0
"""Interval of reading the clock, so that renewal is in time after a suspend or a clock change."""
READ_S = 10.0
"""Maximum time to wait until the other processes of the server have read the answers."""
# Processes of older releases do not record the version that they have read. In a hot restart such a process has polled
# after this time.
_MIN_PUBLISH_S = 2 * POLL_S
MAX_ORDER_S = ORDER_S + 60.0
"""Time after which a thread that orders is abandoned."""


@dataclass(frozen=True)
class AcmePlan:
    """A certificate to order.

    Attributes:
        files: its files, names and authority.
        account: the account at that authority.
        challenge: the kind of the challenges. Empty: `HTTP_01` when a port without TLS is open, otherwise
            `TLS_ALPN_01`. With such a port, the two kinds alternate after failures.
    """

    files: AcmeFiles
    account: Account
    challenge: str = ""

    @property
    def label(self) -> str:
        """The certificate, for log lines."""
        return f"certificate of {', '.join(self.files.names)}"


class AcmeService:
    """Orders certificates and serves challenge answers.

    Args:
        plan: what to order.
        on_contexts: see `ChallengeAnswers`.
        reload: reloads the certificates of the listeners and returns the fault, if any; blocks its greenlet.
        report: prints a line on the terminal.
        has_http: whether a port without TLS is open.
        orders: whether this process orders; only one of several workers does.

    Attributes:
        ordered, failed: number of orders of this process that succeeded and failed.
    """

    def __init__(
        self,
        plan: AcmePlan,
        on_contexts: Callable[[Contexts], object],
        reload: Callable[[], str | None],
        report: Callable[[str], None],
        has_http: bool,
        orders: bool,
    ) -> None:
        self.plan = plan
        self.answers = ChallengeAnswers(plan.files, on_contexts)
        self._reload, self._report, self._has_http, self._orders = reload, report, has_http, orders
        self.ordered = self.failed = 0
        self._state = plan.files.state()
        self._due_s = plan.files.due_s()
        self._retry_now = Event()
        self._pool: DedicatedThreads | None = None
        self._worker: gevent.Greenlet[..., None] | None = None

    def start(self) -> None:
        """Start to serve challenge answers, and to order when the certificate is due."""
        self.answers.start()
        if self._orders:
            self._worker = gevent.spawn(self._run)

    def stop(self) -> None:
        """Stop ordering and polling."""
        self.answers.stop()
        if self._worker is not None:
            self._worker.kill(block=False)

    def try_now(self) -> None:
        """Order again at once if the last order failed."""
        if self._state.failures:
            self._retry_now.set()

    def snapshot(self) -> dict[str, object]:
        """Return the state for the operations API, as JSON values; times in Unix seconds."""
        return {
            "names": list(self.plan.files.names),
            "directory": self.plan.files.directory,
            "ordered": self.ordered,
            "failed": self.failed,
            "fault": self._state.fault or None,
            "next_s": self._next_s(),
        }

    def _next_s(self) -> float:
        return max(self._due_s, self._state.next_s)

    def _run(self) -> None:
        with suppress(OSError):  # the first order reports a fault of the folder
            disk_threads.call(self.plan.files.forget_answers)
        while True:
            wait_s = self._next_s() - time()
            if wait_s > 0 and not self._retry_now.wait(min(wait_s, MAX_SLEEP_S)):
                continue
            self._retry_now.clear()
            try:
                self._order()
            except Exception:
                log.exception("ordering the %s failed", self.plan.label)
                self._failed(AcmeError("internal error; the log has its traceback."))

    def _order(self) -> None:
        kind = self.plan.challenge
        if not kind:  # alternate after failures: one of the two ports may be unreachable
            first, other = (HTTP_01, TLS_ALPN_01) if self._has_http else (TLS_ALPN_01, HTTP_01)
            kind = other if self._has_http and self._state.failures % 2 else first
        pool = self._pool = self._pool or DedicatedThreads()  # not gevent's own: an order may take minutes
        try:
            outcome = pool.submit(_order_in_thread, self.plan, kind).get(timeout=MAX_ORDER_S)
            if isinstance(outcome, Exception):
                raise outcome
        except gevent.Timeout:
            self._pool = None  # a new thread for the next order; the abandoned one may still be blocked
            self._failed(AcmeError(f"no result within {MAX_ORDER_S:g} s. smqrt tries again automatically."), kind)
        except AcmeError as error:
            self._failed(error, kind)
        except OSError as error:
            self._failed(AcmeError(f"{error.filename}: {error.strerror}. Check tls.acme_folder."), kind)
        else:
            self._succeeded(outcome, kind)

    def _succeeded(self, is_new: bool | None, kind: str) -> None:
        """Process the result of `_order_in_thread`: store the state, and reload the certificate."""
        if is_new is None:  # another process is ordering
            self._state = State(self._state.failures, time() + OTHER_ORDERS_S, self._state.fault, self._state.kind)
            return
        self._due_s = disk_threads.call(self.plan.files.due_s)
        self._state = State(next_s=time() + MIN_INTERVAL_S, kind=kind)
        self._store_state()
        if fault := self._reload():
            log.error("%s: ordered by ACME, but not usable: %s", self.plan.label, fault)
        if is_new:
            self.ordered += 1
            due = shown(datetime.fromtimestamp(self._next_s(), UTC))
            self._report(f"{self.plan.label}: ordered by ACME ({kind}); renewal due at {due}")

    def _failed(self, error: AcmeError, kind: str = "") -> None:
        failures = self._state.failures + 1
        # The exponent has a limit against overflow; the random part spreads the orders of many servers.
        wait_s = min(FIRST_RETRY_S * 2 ** min(failures - 1, 20), MAX_RETRY_S) * random.uniform(1, 1.25)
        wait_s = max(wait_s, min(error.retry_after_s, MAX_RETRY_AFTER_S))
        self._state = State(failures, time() + wait_s, str(error), kind)
        self._store_state()
        self.failed += 1
        next_attempt = shown(datetime.fromtimestamp(self._state.next_s, UTC))
        log.error("%s: ACME order failed: %s Next attempt: %s, or on SIGHUP.", self.plan.label, error, next_attempt)

    def _store_state(self) -> None:
        try:
            disk_threads.call(self.plan.files.store_state, self._state)
        except OSError as error:
            log.error("cannot store the ACME state: %s", error)


def _order_in_thread(plan: AcmePlan, kind: str) -> bool | Exception | None:
    """Order in this thread. Return False when another process has ordered, None while another process orders.

    Exceptions are returned, because gevent prints the exceptions of its threads.
    """
    files = plan.files
    try:
        with files.locked() as has_lock:
            if not has_lock:
                return None
            if files.due_s() > time():
                return False
            key = new_key()
            chain = order(plan.account, files.names, kind, key, lambda answers: _publish(files, answers))
            files.store(chain, key)
            return True
    except Exception as error:
        return error


def _publish(files: AcmeFiles, answers: Sequence[Answer]) -> None:
    """Publish answers, and wait until all processes of the server have them: the authority may connect to any."""
    files.publish(answers)
    if not answers:
        return
    version, began_s = files.version(), monotonic()
    sleep(_MIN_PUBLISH_S)
    while not files.all_have_read(version) and monotonic() - began_s < READ_S:
        sleep(0.02)
