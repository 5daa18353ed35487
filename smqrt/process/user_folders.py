"""Folders of the user who runs the program (XDG Base Directory Specification)."""

from __future__ import annotations

import os
import pwd
from pathlib import Path


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
