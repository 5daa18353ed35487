"""The folder and the command with which this process was started, for processes that replace it.

`FOLDER` and `COMMAND` are read when this module is imported, before applications can change the working folder or the
environment.
"""

from __future__ import annotations

import os
import sys


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
