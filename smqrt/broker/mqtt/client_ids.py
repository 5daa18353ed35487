"""Client ids of MQTT clients in the tables of a hub."""

from __future__ import annotations

from hashlib import blake2b

UID_PREFIX = b"mqtt:"
"""MQTT client ids have a name space of their own beside the uids of SMQ clients."""
MAX_UID_BYTES = 200
"""Longer uids are hashed: packets between nodes have one byte for the length."""


def uid_of(client_id: str) -> bytes:
    """Return the uid of an MQTT client in the tables of the hub."""
    raw = client_id.encode()
    if len(raw) > MAX_UID_BYTES:
        return UID_PREFIX + b"#" + blake2b(raw, digest_size=16).hexdigest().encode()
    return UID_PREFIX + raw
