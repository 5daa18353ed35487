"""Digest authentication (RFC 7616): a password is proved without being sent."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from urllib.request import parse_http_list, parse_keqv_list

_HASHES = {"MD5": "md5", "SHA-256": "sha256", "SHA-512-256": "sha512_256"}


@dataclass(slots=True)
class Challenge:
    """What a server asked. Good for many requests to it.

    Attributes:
        fields: realm, nonce, and what else it said.
    """

    fields: dict[str, str]
    _count: int = field(default=0, init=False)

    @property
    def stale(self) -> bool:
        """Whether the credentials were right, and only the nonce was too old."""
        return self.fields.get("stale", "").lower() == "true"

    def answer(self, method: str, target: str, user: str, password: str, cnonce: str | None = None) -> str:
        """The value of the Authorization field for a request."""
        self._count += 1
        fields, count, cnonce = self.fields, f"{self._count:08x}", cnonce or os.urandom(16).hex()
        algorithm = fields.get("algorithm", "MD5")
        name = _HASHES[algorithm.upper().removesuffix("-SESS")]
        ha1 = _hash(name, f"{user}:{fields['realm']}:{password}")
        if algorithm.upper().endswith("-SESS"):
            ha1 = _hash(name, f"{ha1}:{fields['nonce']}:{cnonce}")
        with_qop = f"{count}:{cnonce}:auth:" if "qop" in fields else ""
        proof = _hash(name, f"{ha1}:{fields['nonce']}:{with_qop}{_hash(name, f'{method}:{target}')}")
        parts = {"username": user.encode().decode("latin-1"), "realm": fields["realm"], "nonce": fields["nonce"]}
        parts |= {"uri": target, "response": proof}
        parts |= {key: fields[key] for key in ("opaque",) if key in fields}
        text = ", ".join(f'{key}="{_quoted(value)}"' for key, value in parts.items()) + f", algorithm={algorithm}"
        return f"Digest {text}" + (f', qop=auth, nc={count}, cnonce="{cnonce}"' if with_qop else "")


def find(values: list[str]) -> Challenge | None:
    """The first challenge among the WWW-Authenticate fields that can be met, None when there is none."""
    for value in values:
        scheme, _, rest = value.strip().partition(" ")
        if scheme.lower() == "digest" and (challenge := _read(rest)):
            return challenge
    return None


def _read(text: str) -> Challenge | None:
    pairs = [part for part in parse_http_list(text) if part.partition("=")[2]]
    fields = {key.lower(): value for key, value in parse_keqv_list(pairs).items()}
    known = fields.get("algorithm", "MD5").upper().removesuffix("-SESS") in _HASHES
    protects = "auth" in fields.get("qop", "auth").replace(",", " ").lower().split()
    return Challenge(fields) if known and protects and {"realm", "nonce"} <= set(fields) else None


def _hash(name: str, text: str) -> str:
    return hashlib.new(name, text.encode()).hexdigest()


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
