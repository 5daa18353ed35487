"""`smqrt passwd` and `smqrt acl`: the users file, and what the access control list says."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from smqrt.auth import acl as lists
from smqrt.auth import users
from smqrt.auth.acl import why
from smqrt.auth.identity import ANONYMOUS, Action, Identity, name_fault
from smqrt.auth.passwords import MAX_PASSWORD_BYTES, MEMORY_KIB, new_hash, verify_now
from smqrt.errors import ArgumentError
from smqrt.settings.settings import FILE_NAME, AuthSettings
from smqrt.settings.sources import Sources

WRONG = 1
DENIED = 3
_FILE = click.Path(dir_okay=False, path_type=Path)


# ---- passwd


@click.command()
@click.argument("file", type=_FILE)
@click.argument("user")
@click.option("--groups", metavar="GROUP,...", help="Put the user into these groups; an empty text for none.")
@click.option("--stdin", "from_stdin", is_flag=True, help="Read the password from the standard input, to the line end.")
@click.option("--delete", is_flag=True, help="Take the user out.")
@click.option("--verify", is_flag=True, help="Only tell whether the password is right.")
@click.option(
    "--memory-mib",
    type=click.IntRange(1, users.MAX_MEMORY_KIB >> 10),
    default=MEMORY_KIB >> 10,
    show_default=True,
    help="What a hash takes. Less only for long random passwords of many devices.",
)
def passwd(
    file: Path, user: str, groups: str | None, from_stdin: bool, delete: bool, verify: bool, memory_mib: int
) -> None:
    """Set the password of USER in the users file FILE, which is made when it is not there.

    It asks for the password; a password is no argument, since everybody on the machine sees arguments. A user that is
    there keeps its groups. With --groups and without --stdin, only the groups of a user that is there are changed.

    \b
      smqrt passwd users.txt ann
      smqrt passwd users.txt ann --groups operators,night
      head -c 24 /dev/urandom | base64 | tee secret | smqrt passwd users.txt lamp-1 --stdin
    """
    if fault := name_fault(user):
        raise click.UsageError(fault)
    if verify:
        sys.exit(_verify(file, user, _asked(from_stdin, confirm=False)))
    password = None
    if not delete and (groups is None or from_stdin or user not in _read(file)[1]):
        password = _asked(from_stdin, confirm=True)
    password_hash = None if password is None else new_hash(password, memory_mib << 10)
    with _locked(file):
        text, known = _read(file)
        if delete and user not in known:
            raise ArgumentError(f"{file} has no user {user}")
        users.write(file, users.changed(text, None if delete else _line(known, user, password_hash, groups), user))
    click.echo(f"{file}: {user} {'removed' if delete else 'changed' if user in known else 'added'}")


def _line(known: users.Users, name: str, password_hash: str | None, groups: str | None) -> users.User:
    before = known.get(name)
    if password_hash is None and before is None:
        raise ArgumentError(f"{name} went away meanwhile; say it again")
    kept = before.groups if before else ()
    return users.User(
        name,
        password_hash or (before.password_hash if before else ""),
        kept if groups is None else users.groups_of(groups),
    )


def _read(file: Path) -> tuple[str, users.Users]:
    if not file.exists():
        return "", {}
    text = users.read_file(file)
    return text, users.parse(text, str(file))


def _verify(file: Path, user: str, password: bytes) -> int:
    found = users.parse(users.read_file(file), str(file)).get(user)
    is_right = found is not None and verify_now(found.password_hash, password)
    click.echo("right" if is_right else "wrong user name or password")
    return 0 if is_right else WRONG


def _asked(from_stdin: bool, confirm: bool) -> bytes:
    if from_stdin:
        password = sys.stdin.buffer.read(MAX_PASSWORD_BYTES + 2).partition(b"\n")[0].removesuffix(b"\r")
    elif sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=confirm).encode("utf-8")
    else:
        raise click.UsageError("there is no terminal to ask for the password at; say --stdin")
    if not 1 <= len(password) <= MAX_PASSWORD_BYTES:
        raise click.UsageError(f"a password has 1 to {MAX_PASSWORD_BYTES} bytes")
    return password


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Nobody else changes a file of this folder meanwhile: two at once must not lose a user."""
    try:
        number = os.open(file.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ArgumentError(f"{file} can't be written: {error.strerror}") from None
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


# ---- acl


@click.group()
def acl() -> None:
    """The access control list of hubs. `smqrt help identity` is the page of the manual."""


@acl.command()
@click.argument("user")
@click.argument("topic")
@click.option("--action", "actions", type=click.Choice([one.value for one in Action]), multiple=True)
@click.option("--group", "groups", multiple=True, help="The user is in this group.  [default: as the users file says]")
@click.option("--client-id", default="", help="What the client calls itself, for `%c` in patterns.")
@click.option("--acl", "acl_file", type=_FILE, help="The list.  [default: the setting auth.acl]")
@click.option("--users", "users_file", type=_FILE, help="The users file.  [default: the setting auth.users]")
@click.option("--config", type=_FILE, help=f"Read settings from this file.  [default: {FILE_NAME} if there is one]")
def check(
    user: str,
    topic: str,
    actions: tuple[str, ...],
    groups: tuple[str, ...],
    client_id: str,
    acl_file: Path | None,
    users_file: Path | None,
    config: Path | None,
) -> None:
    """Tell what USER may do to TOPIC, and which line says so. USER is a name, or `anonymous`.

    For --action onetoone, TOPIC is the user of the receiver, or `$server`. The exit code is 3 when something that was
    asked for with --action is denied.
    """
    settings = _settings(config)
    file = acl_file or (Path(settings.acl) if settings.acl else None)
    if file is None:
        raise click.UsageError("there is no list: name it with --acl, or in the setting auth.acl")
    found = lists.parse(users.read_file(file), str(file))
    identity = _identity(user, groups, users_file or (Path(settings.users) if settings.users else None))
    identity.client_id = client_id.encode("utf-8", "surrogateescape")
    denied = False
    for action in [Action(one) for one in actions] or [Action.READ, Action.WRITE, Action.OBSERVE, Action.CREATE]:
        decision = found.decide(identity, action, topic.encode("utf-8", "surrogateescape"))
        denied = denied or not decision.allowed
        click.echo(f"{'allowed' if decision.allowed else 'denied '} {action.value:8} {_reason(decision, file, action)}")
    sys.exit(DENIED if actions and denied else 0)


def _reason(decision: lists.Decision, file: Path, action: Action) -> str:
    if decision.line is None and action is Action.CREATE:
        return "no line is about create: who may read, write or observe it may bring it in"
    said = why(decision, file)
    return f"{said}: {decision.line}" if decision.line else said


def _identity(user: str, groups: tuple[str, ...], users_file: Path | None) -> Identity:
    if user == ANONYMOUS:
        return Identity("")
    if fault := name_fault(user):
        raise click.UsageError(fault)
    if groups or users_file is None:
        return Identity(user, groups)
    known = users.parse(users.read_file(users_file), str(users_file)).get(user)
    if known is None:
        click.echo(f"{users_file} has no user {user}: looked at as one without groups", err=True)
    return Identity(user, known.groups if known else ())


def _settings(config: Path | None) -> AuthSettings:
    file = config or (Path(FILE_NAME) if Path(FILE_NAME).is_file() else None)
    return Sources({}, os.environ, file).read().settings.auth
