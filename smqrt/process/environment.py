"""Start folder, command line, CPU count and user folders of this process.

`FOLDER` and `COMMAND` are read when this module is imported, before applications can change the working folder or the
environment. Processes that replace this one start with them.
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


def _start_executable(folder: str) -> str:
    """Return the path of Python below `folder`: Python itself resolves a relative path, and with it the link."""
    actual, path = os.getcwd(), sys.executable
    return folder + path.removeprefix(actual) if path.startswith(f"{actual}/") else path


FOLDER = start_folder()
"""The working folder."""
COMMAND = [_start_executable(FOLDER), *sys.orig_argv[1:]]
"""The program and its arguments."""


# ---- CPU cores

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def cores(quota: Path = _CGROUP_CPU_MAX) -> int:
    """Return the number of cores that this process may use, at least 1; in a container with 1.5 cores it is 1.

    Args:
        quota: the file with the quota of the control group: "<microseconds> <period in microseconds>", or "max …".
    """
    usable = len(os.sched_getaffinity(0))
    try:
        quota_us, period_us = quota.read_text().split()
        usable = min(usable, int(quota_us) // int(period_us))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return max(usable, 1)


# ---- Folders of the user who runs the program (XDG Base Directory Specification)


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/smqrt`, else `~/.cache/smqrt`. Raises FileNotFoundError as `home_folder`."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def config_folder() -> Path:
    """Return `$XDG_CONFIG_HOME/smqrt`, else `~/.config/smqrt`. Raises FileNotFoundError as `home_folder`."""
    return _user_folder("XDG_CONFIG_HOME", ".config")


def state_folder() -> Path:
    """Return `$XDG_STATE_HOME/smqrt`, else `~/.local/state/smqrt`. Raises FileNotFoundError as `home_folder`."""
    return _user_folder("XDG_STATE_HOME", ".local/state")


def _user_folder(variable: str, default: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else home_folder() / default) / "smqrt"


def home_folder() -> Path:
    """Return the user's home folder: `$HOME`, else the entry in the system's user database.

    Raises:
        FileNotFoundError: neither exists, as in a container that runs under a user id without a name.
    """
    if home := os.environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir)
    except KeyError:
        raise FileNotFoundError(
            2, f"user {os.geteuid()} has no home folder, and HOME is not set; set HOME to a folder of this user"
        ) from None
