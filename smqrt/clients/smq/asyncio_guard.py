"""Detection of programs that use the gevent client in asyncio code."""

from __future__ import annotations

import sys
from types import FrameType

_LOOPS = ("asyncio.", "uvloop.")


def called_by_asyncio() -> bool:
    """Return whether a running asyncio loop has called this function.

    A loop that runs in another greenlet of the thread does not count, as that of Playwright's synchronous interface.
    """
    events = sys.modules.get("asyncio.events")
    if events is None or events._get_running_loop() is None:
        return False
    frame: FrameType | None = sys._getframe()  # the frames of a greenlet end where it was started
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_LOOPS):
            return True
        frame = frame.f_back
    return False
