"""What in an application's folder no client is shown, whatever it is called: code of pipelines, and journals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_PIPELINE = re.compile(r"pipelines/.*\.(?:py|sql)", re.IGNORECASE | re.DOTALL)
_JOURNAL = frozenset(("token", "hub.json", "manifest.json", "txn.json", "wal", "data", "readers"))


def private(folder: Path | None) -> Callable[[str], bool]:
    """Returns what tells whether a name in an application is private.

    Args:
        folder: the application's; None for one in a ZIP file, which holds no journals.
    """

    def is_private(name: str) -> bool:
        return _PIPELINE.fullmatch(name) is not None or (folder is not None and _in_journal(folder, name))

    return is_private


def _in_journal(folder: Path, name: str) -> bool:
    """Whether a name belongs to a journal: `journal.path` may be a folder that no dot hides."""
    for part in name.split("/"):
        if part in _JOURNAL and _is_journal(folder):
            return True
        folder /= part
    return False


def _is_journal(folder: Path) -> bool:
    try:
        return any((folder / "wal").glob("*/lock"))
    except OSError:
        return False
