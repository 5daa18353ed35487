"""Users file: a line for each user, with password hash and groups.

name:$argon2id$v=19$m=65536,t=3,p=4$...:group,group
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from argon2 import Parameters, extract_parameters
from argon2.exceptions import InvalidHashError
from argon2.low_level import Type

from smqrt.auth.identity import MAX_GROUPS, name_fault
from smqrt.errors import ArgumentError

MAX_FILE_BYTES = 64 << 20
MAX_MEMORY_KIB = 1 << 20
MAX_ROUNDS = 64
MAX_LANES = 16


@dataclass(frozen=True, slots=True)
class User:
    """A line of the file.

    Attributes:
        name: of the user.
        password_hash: of argon2id, in the PHC string format.
        groups: of the user.
    """

    name: str
    password_hash: str
    groups: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The line of the user in the file."""
        return ":".join((self.name, self.password_hash, *([",".join(self.groups)] if self.groups else [])))


def parse(text: str, file: str) -> dict[str, User]:
    """Parse the text of a users file; empty lines and those that begin with # are ignored.

    Raises:
        ArgumentError: an invalid line; the message names file, line and remedy, and never the hash.
    """
    users: dict[str, User] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, rest = line.rstrip().partition(":")
        password_hash, _, groups = rest.partition(":")
        form = "a line is 'name:hash' or 'name:hash:group,group'; `smqrt passwd` writes it"
        try:
            if fault := name_fault(name) if colon else form:
                raise ArgumentError(fault)
            check_hash(name, password_hash)
            user = User(name, password_hash, groups_of(groups))
            if name in users:
                raise ArgumentError(f"the user {name} occurs twice")
        except ArgumentError as error:
            raise ArgumentError(f"{file}:{number}: {error}") from None
        users[name] = user
    return users


def groups_of(text: str) -> tuple[str, ...]:
    """Return the groups in a text with commas between.

    Raises:
        ArgumentError: an invalid group name, or too many groups.
    """
    groups = tuple(dict.fromkeys(group for group in text.split(",") if group))
    for group in groups:
        shown = f"the group name {group[:64]!r}" if "$" not in group else "a group name"  # it may be part of a hash
        if fault := name_fault(group, shown):
            raise ArgumentError(fault)
    if len(groups) > MAX_GROUPS:
        raise ArgumentError(f"a user may be in {MAX_GROUPS} groups, not {len(groups)}")
    return groups


def check_hash(name: str, password_hash: str) -> Parameters:
    """Return the parameters of a hash.

    Raises:
        ArgumentError: not of argon2id, or one that takes too much memory or time.
    """
    try:
        found = extract_parameters(password_hash)
    except (InvalidHashError, ValueError, IndexError):
        raise ArgumentError(f"the hash of {name} is not of argon2id; `smqrt passwd` makes one") from None
    if found.type is not Type.ID:
        raise ArgumentError(f"the hash of {name} is not of argon2id; `smqrt passwd` makes one")
    if found.memory_cost > MAX_MEMORY_KIB or found.time_cost > MAX_ROUNDS or found.parallelism > MAX_LANES:
        raise ArgumentError(
            f"the hash of {name} takes more than {MAX_MEMORY_KIB >> 10} MiB, {MAX_ROUNDS} rounds or {MAX_LANES} lanes; "
            "`smqrt passwd` makes another"
        )
    return found


# ---- the file


def load(path: Path) -> dict[str, User]:
    """Read a users file; blocks.

    Raises:
        ArgumentError: the file can't be read, is not private, or has an invalid line.
    """
    return parse(read_private(path), str(path))


def read_private(path: Path) -> str:
    """Return the text of a file that only its owner and group can read. Blocks.

    Raises:
        ArgumentError: the file can't be read, is not UTF-8, is too large, or other users may read or change it.
    """
    text = read_file(path)
    if os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ArgumentError(f"{path}: other users may read or change it; run: chmod 600 {path}")
    return text


def read_file(path: Path) -> str:
    """Return the text of a file. Blocks.

    Raises:
        ArgumentError: the file can't be read, is not UTF-8, or is too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ArgumentError(f"{path} can't be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ArgumentError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path} is not UTF-8 at byte {error.start}") from None


def write(path: Path, text: str) -> None:
    """Replace a file atomically. Blocks.

    A new file is private to its owner; an existing one keeps its owner, group and mode.

    Raises:
        ArgumentError: the file can't be written.
    """
    target = Path(os.path.realpath(path))  # a symbolic link is kept
    try:
        number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise ArgumentError(f"{path} can't be written: {error.strerror}") from None
    try:
        with os.fdopen(number, "wb") as file:
            file.write(text.encode("utf-8"))
            if target.exists():
                before = target.stat()
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(number, before.st_uid, before.st_gid)
                os.fchmod(number, stat.S_IMODE(before.st_mode) & ~(stat.S_IRWXO | stat.S_IWGRP))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise ArgumentError(f"{path} can't be written: {error.strerror}") from None


def changed(text: str, user: User | None, name: str) -> str:
    """Return the text of a users file with the line of `name` replaced or added, or removed when `user` is None.

    Other lines and comments are kept.
    """
    lines, is_done = [], user is None
    for line in text.splitlines():
        if line.partition(":")[0] != name or line.startswith("#"):
            lines.append(line)
        elif not is_done and user is not None:
            lines.append(user.line)
            is_done = True
    if not is_done and user is not None:
        lines.append(user.line)
    return "".join(f"{line}\n" for line in lines)


def with_groups(user: User, groups: Iterable[str]) -> User:
    """Return the user with other groups. Raises as `groups_of`."""
    return replace(user, groups=groups_of(",".join(groups)))


Users = Mapping[str, User]
