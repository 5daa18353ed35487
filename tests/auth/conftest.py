"""Hubs with users and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from smqrt import hub
from smqrt.auth import service as identity_service
from smqrt.auth.service import IdentityService
from smqrt.auth.throttle import Throttle
from smqrt.auth.users import new_hash
from smqrt.http.client.client import fetch
from smqrt.http.logins.registry import ADDRESS_LIMIT, ANYWHERE_LIMIT, NAME_LIMIT
from smqrt.settings.server_settings import AuthSettings
from smqrt.smq import gevent_broker
from tests.support.device import Site
from tests.support.pki import Authority
from tests.support.sites import authority

__all__ = ["authority"]


@lru_cache
def quick_hash(password: str) -> str:
    """A hash that takes a millisecond."""
    return new_hash(password.encode(), 64)


def user_line(name: str, password: str, *groups: str) -> str:
    return ":".join((name, quick_hash(password), *([",".join(groups)] if groups else []))) + "\n"


class Guarded:
    """A site whose clients need users; `change` writes other files and has them read."""

    def __init__(
        self,
        folder: Path,
        authority: Authority,
        users: str,
        acl: str | None,
        options: dict[str, Any],
        lists: tuple[str, ...] = (),
        **auth: Any,
    ) -> None:
        self.users, self.acl = folder / "users.txt", folder / "acl.txt"
        self.users.write_text(users)
        self.users.chmod(0o600)
        if acl is not None:
            self.acl.write_text(acl)
        settings = AuthSettings(users=str(self.users), acl=None if acl is None else str(self.acl), **auth)
        throttle = Throttle(monotonic, NAME_LIMIT, ADDRESS_LIMIT, ANYWHERE_LIMIT)
        self.service = IdentityService(settings, throttle, fetch, lists)
        identity_service.set_server_identity_service(self.service)
        gevent_broker.follow(self.service)
        self.service.start()
        self.site = Site(hub.create(**options), authority)

    def change(self, users: str | None = None, acl: str | None = None) -> str | None:
        if users is not None:
            self.users.write_text(users)
        if acl is not None:
            self.acl.write_text(acl)
        return self.service.reload()

    def close(self) -> None:
        identity_service.set_server_identity_service(None)
        self.site.close()
        self.service.close()


USERS = user_line("ann", "secret", "operators") + user_line("bob", "hunter2") + user_line("eve", "evil")


@pytest.fixture
def guard(tmp_path: Path, authority: Authority) -> Iterator[Callable[..., Guarded]]:
    """A factory: `guard(acl, users, auth={...}, onpublish=f)` gives a guarded site; without a list all is allowed."""
    made: list[Guarded] = []

    def make(
        acl: str | None = None,
        users: str = USERS,
        auth: dict[str, Any] | None = None,
        hub_auth: bool = True,
        **options: Any,
    ) -> Guarded:
        options["auth"] = hub_auth
        made.append(Guarded(tmp_path, authority, users, acl, options, **(auth or {})))
        return made[-1]

    yield make
    for one in made:
        one.close()
