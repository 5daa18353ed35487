"""Orders of certificates at a certificate authority, by the library `acme` of certbot. All of it blocks: for a thread.

directory → account → order → a challenge for each name: publish the answers, let the authority verify them
          → certificate signing request → certificate with its chain
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

import smqrt
from smqrt.acme.files import (
    DNS_01,
    HTTP_01,
    MAX_STATE_BYTES,
    TLS_ALPN_01,
    Answer,
    new_key,
    private_folder,
    write_private,
)
from smqrt.errors import AcmeError, StartError

if TYPE_CHECKING:
    from acme import messages
    from acme.client import ClientV2


MISSING = "needs the library acme: pip install 'smqrt[acme]'"
REQUEST_S = 30.0
"""What one request to the authority may take to connect, and between two pieces of its answer."""
ORDER_S = 240.0
_POLL_S, _MAX_POLL_S = 0.2, 5.0

Publish = Callable[[Sequence[Answer]], object]
"""Lets the server give these answers, and returns when it does; an empty list: no more."""


def check_library() -> None:
    """Raise StartError when the library is missing; it is not loaded for that."""
    if find_spec("acme") is None or find_spec("josepy") is None:
        raise StartError(f"tls.acme {MISSING}.")


@dataclass(frozen=True)
class Account:
    """An account at a certificate authority.

    Attributes:
        directory: URL of the authority's directory.
        folder: where `account.key` and `account.json` are, made when they are missing.
        contact: mail address; empty for none.
        ca: file with the authorities that the directory's own certificate is checked against; empty for those of
            this machine.
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
        account: is made when it is new.
        names: host names.
        kind: of the challenges: `HTTP_01`, `TLS_ALPN_01` or `DNS_01`.
        key: private key of the certificate, PEM.
        publish: see `Publish`.

    Returns:
        the certificate with its chain, PEM.

    Raises:
        AcmeError: it failed, or took longer than `ORDER_S`; one sentence with the remedy.
    """
    try:
        import acme.client  # noqa: F401  # here: it loads requests, which nobody else needs
    except ImportError:
        raise AcmeError(f"ACME {MISSING}.") from None
    with _Conversation(account) as conversation:
        return conversation.order(names, kind, key, publish)


class _Conversation:
    def __init__(self, account: Account) -> None:
        self._account = account
        self._until = datetime.now() + timedelta(seconds=ORDER_S)
        self._retry_after_s = 0.0
        self._asked_for = ""

    def __enter__(self) -> _Conversation:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, AcmeError):
            raise AcmeError(self._explained(error), self._retry_after_s) from error

    # ---- the account

    def _client(self) -> ClientV2:
        from acme import client
        from josepy.jwa import ES256
        from josepy.jwk import JWKEC

        key_path = self._account.folder / "account.key"
        if not key_path.exists():
            private_folder(self._account.folder)
            write_private(key_path, new_key())
        try:
            self._key = JWKEC(key=load_pem_private_key(key_path.read_bytes(), None))
        except ValueError:
            raise AcmeError(f"{key_path} is no private key. Restore it, or remove it for a new account.") from None
        verify: Any = self._account.ca or True  # for requests; the library says bool
        agent = f"smqrt/{smqrt.__version__}"
        net = client.ClientNetwork(self._key, alg=ES256, verify_ssl=verify, user_agent=agent, timeout=int(REQUEST_S))
        net.session.hooks["response"].append(self._note)
        directory = client.ClientV2.get_directory(self._account.directory, net)
        made = client.ClientV2(directory, net)
        self._log_in(made)
        return made

    def _note(self, response: Any, **_: object) -> None:
        """Remember how long an authority that refuses wants to be left alone."""
        self._retry_after_s = 0.0
        if response.status_code >= 400:
            from acme.client import ClientV2

            until = ClientV2.retry_after(response, 0)
            self._retry_after_s = max(0.0, (until - datetime.now()).total_seconds())

    def _log_in(self, client: ClientV2) -> None:
        from acme import messages

        path, known = self._account.folder / "account.json", dict[str, str]()
        with suppress(OSError, ValueError), path.open("rb") as file:
            known = dict(json.loads(file.read(MAX_STATE_BYTES)))
        if known.get("contact", "") == self._account.contact and known.get("uri"):
            client.net.account = messages.RegistrationResource(uri=known["uri"], body=messages.Registration())
            return
        uri = self._register(client)
        write_private(path, json.dumps({"uri": uri, "contact": self._account.contact}).encode())

    def _register(self, client: ClientV2) -> str:
        from acme import errors, messages

        wanted: dict[str, Any] = {"email": self._account.contact} if self._account.contact else {}
        if self._account.binding:
            binding = messages.ExternalAccountBinding.from_data(
                self._key.public_key(), *self._account.binding, client.directory
            )
            wanted["external_account_binding"] = binding
        elif client.external_account_required():
            raise AcmeError(
                f"{self._account.directory} wants to know your account there (external account binding). Give"
                " tls.acme_eab_id and tls.acme_eab_key, or use another directory."
            )
        registration = messages.NewRegistration.from_data(terms_of_service_agreed=True, **wanted)
        try:
            return str(client.new_account(registration).uri)
        except errors.ConflictError as error:  # the key has an account
            found = messages.RegistrationResource(uri=error.location, body=messages.Registration())
            client.net.account = found
            changed = messages.Registration.from_data(email=self._account.contact or None)
            client.update_registration(found, changed)
            return str(error.location)

    # ---- the order

    def order(self, names: Sequence[str], kind: str, key: bytes, publish: Publish) -> bytes:
        from acme import challenges, crypto_util, messages
        from josepy.b64 import b64encode

        self._asked_for = kind
        client = self._client()
        try:
            made = client.new_order(crypto_util.make_csr(key, list(names)))
        except messages.Error as error:
            if error.code != "accountDoesNotExist":
                raise
            self._forget_account()
            client = self._client()
            made = client.new_order(crypto_util.make_csr(key, list(names)))
        asked = [one for one in made.authorizations if one.body.status != messages.STATUS_VALID]
        chosen = [_challenge(one, kind) for one in asked]
        thumbprint = b64encode(self._key.thumbprint(hash_function=SHA256)).decode()
        answers = [
            Answer(kind, one.body.identifier.value, token, f"{token}.{thumbprint}")
            for one, (_, token) in zip(asked, chosen, strict=True)
        ]
        try:
            if answers:
                publish(answers)
            for challenge, _ in chosen:  # the response of every kind is an empty object
                client.answer_challenge(challenge, challenges.HTTP01Response(key_authorization=""))
            for one in asked:
                self._await_valid(client, one)
        finally:
            if answers:
                publish([])
        done = client.finalize_order(made, self._until)
        return str(done.fullchain_pem).encode()

    def _forget_account(self) -> None:
        """The authority does not know it any more: the next conversation makes a new one with the same key."""
        (self._account.folder / "account.json").unlink(missing_ok=True)

    def _await_valid(self, client: ClientV2, asked: messages.AuthorizationResource) -> None:
        from acme import errors, messages

        wait_s = _POLL_S
        while True:
            found, _ = client.poll(asked)
            if found.body.status == messages.STATUS_VALID:
                return
            if found.body.status != messages.STATUS_PENDING:
                raise errors.ValidationError([found])
            if datetime.now() + timedelta(seconds=wait_s) > self._until:
                raise errors.TimeoutError
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _MAX_POLL_S)

    # ---- what went wrong

    def _explained(self, error: Exception) -> str:
        from acme import errors, messages
        from requests import RequestException

        place = self._account.directory
        if isinstance(error, errors.ValidationError):
            return _why_not_valid(error, self._asked_for)
        if isinstance(error, errors.IssuanceError):
            error = error.error
        if isinstance(error, messages.Error):
            says = ": ".join(str(one) for one in (error.code or error.typ, error.detail) if one)
            more = [f"{one.identifier.value}: {one.detail}" for one in error.subproblems or () if one.identifier]
            return f"{place} refuses: {_line('; '.join([says, *more]))}. {_REMEDIES.get(error.code or '', _OTHERWISE)}"
        if isinstance(error, errors.TimeoutError):
            return f"{place} was not done within {ORDER_S:g} s. The next attempt comes by itself."
        if isinstance(error, RequestException):
            return (
                f"cannot reach {place}: {_line(error)}. Check tls.acme_directory, the network of this machine, and"
                " tls.acme_ca when the authority is your own."
            )
        if isinstance(error, OSError):
            return f"cannot keep what the authority gave: {_line(error)}. Check tls.acme_folder."
        status = getattr(error.args[0] if error.args else None, "status_code", None)
        if status is not None:
            return f"{place} answers with status {status}. The next attempt comes by itself."
        return f"{place} does not answer as RFC 8555 asks: {type(error).__name__}: {_line(error)}. {_OTHERWISE}"


_OTHERWISE = "Check tls.acme, tls.acme_contact and tls.acme_directory."
_REMEDIES = {
    "rateLimited": "Wait, or use the authority's staging directory for trying things out.",
    "badNonce": "The next attempt comes by itself.",
    "serverInternal": "The next attempt comes by itself.",
    "caa": "Change the CAA record of the name, or use the authority that it names.",
    "rejectedIdentifier": "Check the names in tls.acme: the authority gives none for some of them.",
    "invalidContact": "Check tls.acme_contact: a mail address.",
    "unsupportedContact": "Check tls.acme_contact: a mail address.",
    "externalAccountRequired": "Check tls.acme_eab_id and tls.acme_eab_key.",
}
_CHECKS = {
    HTTP_01: "Port 80 of the name must lead to this server's port for HTTP",
    TLS_ALPN_01: "Port 443 of the name must lead to this server's port for TLS, and no proxy may end TLS before it",
    DNS_01: "The TXT record of _acme-challenge below the name must have reached all its name servers",
}


def _why_not_valid(error: Any, kind: str) -> str:
    told = []
    for one in error.failed_authzrs:
        faults = [str(found.error.detail or found.error.typ) for found in one.body.challenges if found.error]
        told.append(f"{one.body.identifier.value}: {_line('; '.join(faults) or 'no reason given')}")
    return f"the authority could not verify {'; '.join(told)} ({kind}). {_CHECKS[kind]}."


def _line(value: object) -> str:
    return " ".join(str(value).split())[:500].rstrip(".")


def _challenge(asked: messages.AuthorizationResource, kind: str) -> tuple[messages.ChallengeBody, str]:
    """The challenge of that kind, and its token; of TLS-ALPN-01 the library knows no more than its JSON."""
    name, offered = asked.body.identifier.value, []
    for one in asked.body.challenges:
        says = one.chall.to_partial_json()
        if says.get("type") == kind and says.get("token"):
            return one, str(says["token"])
        offered.append(str(says.get("type")))
    raise AcmeError(
        f"the authority verifies {name} not by {kind}, only by: {', '.join(offered) or 'nothing'}. Change"
        " tls.acme_challenge."
    )
