"""Messages between the old process and the new one, in this order:

    new                                  old
    hello {version, pid}            ──▶
                                    ◀──  welcome {version, pid, listeners, hubs, nodes, failed} and listening sockets
    (loads the applications)
    ready {hubs, relays, succeeds},
    or failed {why}                 ──▶
                                    ◀──  relay and a socket, when the new one says `relays`; see staying.py
                                         (while all are served on:)
                                    ◀──  ahead {key, clients} and their sockets, as often as needed
                                         (accepts no more; for each hub:)
                                    ◀──  hub {key, record, unchanged, staying, node, others}; of the unchanged nothing
                                         more is sent; with `node`, when the new one says `succeeds`, the other nodes
                                         keep what is for the hub with this number, see cluster/migration.py;
                                         `others` are their numbers
                                    ◀──  values {values, sources}, as often as needed: last values that no file has
                                    ◀──  changed {clients}, as often as needed: others that were sent ahead
                                    ◀──  clients {clients} and their sockets, as often as needed: all the rest
                                    ◀──  end
    have, or failed {why}           ──▶
                                    ◀──  go: from here on the hub is the new one's
                                         (and in the end:)
                                    ◀──  http {connections} and their sockets
                                    ◀──  done
    serving                         ──▶
                                    ◀──  left: it is in no cluster any more by a number that is fixed
                                    ◀──  late {key, frames, names}, until the old process ends

`abort {why}` of the old one ends it all. Silence and a connection that ends mean that the other process is gone.
"""

from __future__ import annotations

import os

from smqrt.errors import StartError
from smqrt.workers.fd_channel import ChannelError, FdChannel, Message

VERSION = 1
HELLO_S = 5.0
STEP_S = 5.0
"""What each step of the move may take the other process; the longest of them opens a journal."""
ENVIRONMENT = "_SMQRT_TAKE_OVER"
"""The number of the descriptor that a new process inherits."""
FDS_AT_ONCE = 200
BYTES_AT_ONCE = 4 << 20
MAX_PATH_BYTES = 107
"""Of a Unix socket, on Linux. While it is made, it has the number of the process behind its name."""
_NUMBER_BYTES = 8


def check_socket_path(what: str, path: str) -> None:
    """Raise StartError when `path` is too long for a Unix socket that is replaced by renaming; `what` names it."""
    most = MAX_PATH_BYTES - _NUMBER_BYTES
    if len(os.fsencode(path)) > most:
        raise StartError(f"{what}: {path} is longer than {most} bytes, which a Unix socket has at most; shorten it.")


class Refused(ChannelError):
    """The other process says why it does not go on."""


def expect(channel: FdChannel, kind: str, timeout_s: float) -> Message:
    """Wait for a message of `kind`.

    Raises:
        Refused: the other process does not go on.
        ChannelError: it is gone, silent, or says something else.
    """
    message, fds = channel.receive(timeout_s)
    for fd in fds:
        os.close(fd)
    if message["do"] in ("failed", "abort"):
        raise Refused(str(message.get("why", "no reason was given"))[:1000])
    if message["do"] != kind:
        raise ChannelError(f"{message['do']!r} came instead of {kind!r}")
    return message
