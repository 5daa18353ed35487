"""Texts in opaque, URL-safe tokens that only the holder of a key can read or make (AES-GCM, NIST SP 800-38D)."""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from binascii import Error as Base64Error
from binascii import a2b_base64

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from smqrt.errors import ArgumentError

KEY_BYTES = (16, 32)
_NONCE_BYTES = 12
_TO_PLAIN = bytes.maketrans(b"-_", b"+/")


def new_key(size_bytes: int = 32) -> bytes:
    """A random key.

    Args:
        size_bytes: 16 or 32.

    Raises:
        ArgumentError: another size.
    """
    return secrets.token_bytes(_checked(size_bytes))


def seal(key: bytes, data: bytes) -> bytes:
    """The token of `data`: letters, digits, `-` and `_`; another one each time (spec: bas-api §7).

    Raises:
        ArgumentError: the key has another size than 16 or 32 bytes.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return urlsafe_b64encode(nonce + _cipher(key).encrypt(nonce, data, None)).rstrip(b"=")


def unseal(key: bytes, token: bytes) -> bytes | None:
    """The inverse of `seal`; None when the token was changed, or made with another key. Raises as `seal`."""
    cipher = _cipher(key)
    try:
        sealed = a2b_base64(token.translate(_TO_PLAIN) + b"=" * (-len(token) % 4), strict_mode=True)
    except Base64Error:
        return None
    if urlsafe_b64encode(sealed).rstrip(b"=") != token:  # the same bytes spelt in another way
        return None
    try:
        return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
    except (InvalidTag, ValueError):  # the latter for a nonce that is too short
        return None


def _cipher(key: bytes) -> AESGCM:
    _checked(len(key))
    return AESGCM(key)


def _checked(size_bytes: int) -> int:
    if size_bytes not in KEY_BYTES:
        raise ArgumentError(f"a key of AES has 16 or 32 bytes, not {size_bytes}; ba.aeskey makes one")
    return size_bytes
