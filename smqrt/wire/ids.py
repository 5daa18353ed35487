"""The ranges of 32-bit numbers: ETIDs with their node, the servers of nodes, and topics.

    0 nnnnnnnnnn lllllllllllllllllllll   ETID: 10 bits of the node, 21 bits that the node draws
    0 nnnnnnnnnn 000000000000000000001   the server of node n, as other nodes see it
    1 hhhhhhhhhhhhhhhhhhhhhhhhhhhhhhhh   topic

Node 0 is a hub that is in no cluster. A topic that an application or a file gives a number of its own may be anywhere.
"""

from __future__ import annotations

from hashlib import blake2b

LOCAL_BITS = 21
MAX_NODE = (1 << 31 - LOCAL_BITS) - 1
LOCAL_MASK = (1 << LOCAL_BITS) - 1
TOPIC_BIT = 1 << 31
SERVER_LOCAL = 1


def node_of(number: int) -> int:
    """The node of an ETID; 0 for a topic and for an ETID of a hub in no cluster."""
    return 0 if number & TOPIC_BIT else number >> LOCAL_BITS


def server_of(node: int) -> int:
    """The ETID of the server of `node`, as other nodes see it."""
    return node << LOCAL_BITS | SERVER_LOCAL


class NameNumbers:
    """Numbers that all nodes of a cluster make of the same name.

    They are keyed, so that nobody outside can find names with the same number, or guess the number of a name.

    Args:
        key: at most 64 bytes, the same at all nodes.
    """

    def __init__(self, key: bytes) -> None:
        self._topics = blake2b(key=key, digest_size=8, person=b"smqrt topic")
        self._subtopics = blake2b(key=key, digest_size=4, person=b"smqrt subtopic")

    def topic(self, name: bytes) -> tuple[int, int]:
        """The number of a topic (u32), and a second one (u32) that tells names apart which share the first."""
        digest = self._topics.copy()
        digest.update(name)
        both = int.from_bytes(digest.digest(), "big")
        return both >> 32 | TOPIC_BIT, both & 0xFFFFFFFF

    def topic_number(self, name: bytes) -> int:
        """The number of a topic."""
        return self.topic(name)[0]

    def subtopic_number(self, name: bytes) -> int:
        """The number of a sub-topic; never 0."""
        digest = self._subtopics.copy()
        digest.update(name)
        return int.from_bytes(digest.digest(), "big") or 1
