"""A client of Digest that says what a test wants said (RFC 7616)."""

from __future__ import annotations

import re
from hashlib import md5, sha256

HASHES = {"MD5": md5, "SHA-256": sha256}


def challenges(fields: list[str]) -> dict[str, dict[str, str]]:
    """The challenges of Digest in WWW-Authenticate fields, by algorithm."""
    found = [dict(re.findall(r'(\w+)="?([^",]*)"?', field.partition(" ")[2])) for field in fields if "Digest" in field]
    return {challenge["algorithm"]: challenge for challenge in found}


def authorization(
    challenge: dict[str, str],
    user: str,
    password: str,
    target: str,
    *,
    method: str = "GET",
    count: int = 1,
    ha1: str | None = None,
    **other: str,
) -> str:
    """The value of Authorization; `ha1` in place of the password's; `other` fields replace what is right."""

    def hashed(text: str) -> str:
        return HASHES[challenge["algorithm"]](text.encode()).hexdigest()

    nc, cnonce = f"{count:08x}", "0a4f113b"
    secret = ha1 or hashed(f"{user}:{challenge['realm']}:{password}")
    answer = hashed(f"{secret}:{challenge['nonce']}:{nc}:{cnonce}:auth:{hashed(f'{method}:{target}')}")
    fields = {
        "username": user,
        "realm": challenge["realm"],
        "nonce": challenge["nonce"],
        "uri": target,
        "algorithm": challenge["algorithm"],
        "cnonce": cnonce,
        "response": answer,
        **other,
    }
    quoted = ", ".join(f'{name}="{value}"' for name, value in fields.items())
    return f"Digest {quoted}, qop=auth, nc={nc}"
