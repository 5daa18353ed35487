"""Links to other nodes: `from smqrt.hub import mtl; links = mtl.create("password")` (specification: smq.md §6)."""

from __future__ import annotations

from collections.abc import Callable

from smqrt import app_folder
from smqrt.backplane import mtl
from smqrt.hub import binding
from smqrt.net.stream import Stream

OnStatus = Callable[[str, bool, str], object]
"""`f(address, up, why)`."""


class Mtl:
    """Links that the hubs of this process share; see `create`."""

    def __init__(self, links: mtl.Mtl) -> None:
        self.links = links
        app_folder.close_with_app(self)

    def commence(self, sock: Stream, status: OnStatus | None = None) -> bool:
        """Make a link of a connection to another node.

        Args:
            sock: the connection; it is the link's from now on.
            status: told when the link is up, and when it ends.

        Returns:
            False when that can't be: this was shut down.
        """
        host, port = sock.peername()
        transport, data = sock.release()
        return self.links.commence(transport, data, True, f"{host}:{port}", status or mtl.nobody)

    def isopen(self, name: str) -> bool:
        """Whether a hub is in the cluster `name`."""
        return self.links.isopen(name)

    def hascon(self, host: str) -> bool:
        """Whether there is a link to a node at that address."""
        return self.links.hascon(host)

    def shutdown(self) -> None:
        """Leave all clusters and end all links. A second call does nothing."""
        self.links.shutdown()

    def close(self) -> None:
        """As `shutdown`."""
        self.shutdown()

    def __enter__(self) -> Mtl:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def create(
    password: str | bytes,
    *,
    onstatus: OnStatus | None = None,
    ping_s: float = 1.0,
    silence_s: float = 5.0,
    node: int = 0,
) -> Mtl:
    """Links to other nodes with the same password.

    Args:
        password: takes 50 ms to make a key of.
        onstatus: told of every link.
        ping_s: how often other nodes are asked whether they are there.
        silence_s: after so long without a word one is lost.
        node: a fixed number of this node, 1 to 1023; 0 draws one.

    Raises:
        ArgumentError: the password is empty, or the number is none.
    """
    options = mtl.MtlOptions(ping_s, silence_s, node, onstatus or mtl.nobody)
    return Mtl(mtl.Mtl(binding.text("password", password), options))
