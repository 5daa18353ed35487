"""The folder and the command with which this process was started, for processes that replace it.

`FOLDER` and `COMMAND` are read when this module is imported, before applications can change the working folder or the
environment.
"""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path


def start_folder() -> str:
    """Return $PWD when it names the working folder, else the working folder itself.

    Releases are often deployed behind a symbolic link, such as `current`. The kernel knows only the folder behind the
    link. $PWD has the path that was used, so a new process follows a link that was switched in between.
    """
    actual, used = os.getcwd(), os.environ.get("PWD", "")
    try:
        return used if os.path.isabs(used) and os.path.samefile(used, actual) else actual
    except OSError:
        return actual


def _through(folder: str, path: str) -> str:
    """Return `path` by way of `folder` when it lies in the working folder: Python resolves relative paths of itself."""
    actual = os.getcwd()
    return folder + path.removeprefix(actual) if path.startswith(f"{actual}/") else path


FOLDER = start_folder()
"""The working folder."""
COMMAND = [_through(FOLDER, sys.executable), *sys.orig_argv[1:]]
"""The program and its arguments."""


# ---- How many cores this process may use: those that it may run on, and no more than its control group is given.

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores(quota: Path = _QUOTA) -> int:
    """Returns the number of cores, at least 1; of a container with 1.5 cores it is 1.

    Args:
        quota: the file in which Linux says what the control group is given: microseconds of so many.
    """
    usable = len(os.sched_getaffinity(0))
    try:
        most, period = quota.read_text().split()
        usable = min(usable, int(most) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(usable, 1)


# ---- Folders of the user who runs the program (XDG Base Directory Specification).


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/smqrt`, else `~/.cache/smqrt`; raises FileNotFoundError as `home_folder`."""
    return _folder("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """Return `$XDG_CONFIG_HOME/smqrt`, else `~/.config/smqrt`; raises FileNotFoundError as `home_folder`."""
    return _folder("XDG_CONFIG_HOME", ".config")


def state_folder() -> Path:
    """Return `$XDG_STATE_HOME/smqrt`, else `~/.local/state/smqrt`; raises FileNotFoundError as `home_folder`."""
    return _folder("XDG_STATE_HOME", ".local/state")


def _folder(variable: str, default: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else home_folder() / default) / "smqrt"


def home_folder() -> Path:
    """Return the user's home folder: `$HOME`, else what the system has for the user.

    Raises:
        FileNotFoundError: there is neither, as in containers that run with the number of a user without a name.
    """
    if home := os.environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        raise FileNotFoundError(
            2, f"user {os.geteuid()} has no home folder, and HOME is not set; set HOME to a folder of this user"
        ) from None
