"""`smqrt passwd` and `smqrt acl`: users files and access control lists."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from smqrt.auth import identity as lists
from smqrt.auth import users
from smqrt.auth.identity import ANONYMOUS, Action, Identity, explanation, name_fault
from smqrt.auth.users import MAX_PASSWORD_BYTES, MEMORY_KIB, new_hash, verify_now
from smqrt.errors import ArgumentError
from smqrt.settings.server_settings import FILE_NAME
from smqrt.settings.sources import Sources, settings_file

# Exit codes.
WRONG = 1
DENIED = 3
_FILE = click.Path(dir_okay=False, path_type=Path)


# ---- passwd


@click.command()
@click.argument("file", type=_FILE)
@click.argument("user")
@click.option("--groups", metavar="GROUP,...", help="Groups of the user; an empty text for none.")
@click.option("--stdin", "from_stdin", is_flag=True, help="Read the password from standard input: its first line.")
@click.option("--delete", is_flag=True, help="Remove the user.")
@click.option("--verify", is_flag=True, help="Only check the password; the file does not change.")
@click.option(
    "--memory-mib",
    type=click.IntRange(1, users.MAX_MEMORY_KIB >> 10),
    default=MEMORY_KIB >> 10,
    show_default=True,
    help="Memory to compute a hash, in MiB. Reduce it only for long random passwords, such as those of devices.",
)
def passwd(
    file: Path, user: str, groups: str | None, from_stdin: bool, delete: bool, verify: bool, memory_mib: int
) -> None:
    """Add, change or remove a user of the users file FILE.

    The command prompts for the password and creates FILE when it does not exist. An existing user keeps its groups.
    With --groups and without --stdin, an existing user keeps its password. There is no option for the password, since
    other users of the machine can see the arguments of processes.

    \b
    Examples:
      smqrt passwd users.txt ann
      smqrt passwd users.txt ann --groups operators,night
      head -c 24 /dev/urandom | base64 | tee secret | smqrt passwd users.txt lamp-1 --stdin
    """
    if fault := name_fault(user):
        raise click.UsageError(fault)
    if verify:
        existing = users.parse(users.read_file(file), str(file)).get(user)
        password = _read_password(from_stdin, confirm=False)
        is_correct = existing is not None and verify_now(existing.password_hash, password)
        click.echo("the password is correct" if is_correct else "wrong user name or password")
        sys.exit(0 if is_correct else WRONG)
    password_hash = ""
    # Before the lock: the prompt and the hash take seconds.
    if not delete and (groups is None or from_stdin or user not in _read(file)[1]):
        password_hash = new_hash(_read_password(from_stdin, confirm=True), memory_mib << 10)
    with _locked(file):
        text, known = _read(file)
        before = known.get(user)
        changed = None
        if delete and before is None:
            raise ArgumentError(f"{file} has no user {user}")
        if not delete:
            if not password_hash and before is None:
                raise ArgumentError(f"another process has removed {user} meanwhile; run the command again")
            kept = before.groups if before else ()
            changed = users.User(
                user,
                password_hash or (before.password_hash if before else ""),
                kept if groups is None else users.groups_of(groups),
            )
        users.write(file, users.with_user(text, changed, user))
    click.echo(f"{file}: {user} {'removed' if delete else 'changed' if before else 'added'}")


def _read(file: Path) -> tuple[str, users.Users]:
    if not file.exists():
        return "", {}
    text = users.read_file(file)
    return text, users.parse(text, str(file))


def _read_password(from_stdin: bool, confirm: bool) -> bytes:
    if from_stdin:
        # Two more bytes: a line end, and one to detect a password over the limit.
        password = sys.stdin.buffer.read(MAX_PASSWORD_BYTES + 2).partition(b"\n")[0].removesuffix(b"\r")
    elif sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=confirm).encode("utf-8")
    else:
        raise click.UsageError("no terminal to prompt for the password; pass --stdin")
    if not 1 <= len(password) <= MAX_PASSWORD_BYTES:
        raise click.UsageError(f"a password must have 1 to {MAX_PASSWORD_BYTES} bytes")
    return password


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock the folder of a users file, so that no change of a concurrent command is lost."""
    try:
        fd = os.open(file.resolve().parent, os.O_RDONLY | os.O_DIRECTORY)  # the file itself is replaced by a new one
    except OSError as error:
        raise ArgumentError(f"Cannot write {file}: {error.strerror}") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


# ---- acl


@click.group()
def acl() -> None:
    """Check the permissions of a user.

    `smqrt help identity` is the page of the manual.
    """


@acl.command()
@click.argument("user")
@click.argument("topic")
@click.option(
    "--action",
    "actions",
    type=click.Choice([one.value for one in Action]),
    multiple=True,
    help="Action to check; repeatable.  [default: read, write, observe, create]",
)
@click.option("--group", "groups", multiple=True, help="Group of the user; repeatable.  [default: from the users file]")
@click.option("--client-id", default="", help="Client ID of the user, for `%c` in patterns.")
@click.option("--acl", "acl_file", type=_FILE, help="Access control list.  [default: the setting auth.acl]")
@click.option("--users", "users_file", type=_FILE, help="Users file.  [default: the setting auth.users]")
@click.option("--config", type=_FILE, help=f"Settings file.  [default: {FILE_NAME} if it exists]")
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
    """Print which actions USER may perform on TOPIC, and the line of the list that decides.

    USER is a user name, or `anonymous`. For --action onetoone, TOPIC is the user of the receiver, or `$server`. Exit
    code 3 when an action given with --action is denied.
    """
    settings = Sources({}, os.environ, settings_file(config)).read().settings.auth
    file = acl_file or (Path(settings.acl) if settings.acl else None)
    if file is None:
        raise click.UsageError("no access control list: pass --acl, or set auth.acl")
    found = lists.parse(users.read_file(file), str(file))
    identity = _identity(user, groups, users_file or (Path(settings.users) if settings.users else None))
    identity.client_id = client_id.encode("utf-8", "surrogateescape")
    denied = False
    for action in [Action(one) for one in actions] or [Action.READ, Action.WRITE, Action.OBSERVE, Action.CREATE]:
        decision = found.decide(identity, action, topic.encode("utf-8", "surrogateescape"))
        denied = denied or not decision.allowed
        if decision.line is None and action is Action.CREATE:
            # The rule for lists without create lines; `explanation` would only report that no line matches.
            reason = "no line about create: users who may read, write or observe the topic may create it"
        else:
            reason = explanation(decision, file) + (f": {decision.line}" if decision.line else "")
        click.echo(f"{'allowed' if decision.allowed else 'denied '} {action.value:8} {reason}")
    sys.exit(DENIED if actions and denied else 0)


def _identity(user: str, groups: tuple[str, ...], users_file: Path | None) -> Identity:
    if user == ANONYMOUS:
        return Identity("")
    if fault := name_fault(user):
        raise click.UsageError(fault)
    if groups or users_file is None:  # --group replaces the groups of the users file
        return Identity(user, groups)
    known = users.parse(users.read_file(users_file), str(users_file)).get(user)
    if known is None:
        click.echo(f"{users_file} has no user {user}: checked as a user without groups", err=True)
    return Identity(user, known.groups if known else ())
