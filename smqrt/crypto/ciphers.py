"""AES ciphers, PBKDF2, and encrypted URL-safe tokens (spec: bas-api §7)."""

from __future__ import annotations

import hashlib
import secrets
from base64 import urlsafe_b64encode
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.aead import AESCCM, AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC, GCM
from cryptography.hazmat.primitives.padding import PKCS7

from smqrt.errors import ArgumentError, CryptoError

IV_BYTES = {"GCM": 12, "CCM": 12, "CBC": 16}
KEY_BYTES = (16, 32)
BLOCK_BYTES, TAG_BYTES = 16, 16
MAX_CCM_BYTES = (1 << 24) - 1  # the length field of CCM with a nonce of 12 bytes (RFC 3610)
PIECE_BYTES = 1 << 20  # 1 to 2 ms of work
_TAMPERED = "the tag does not match: another key, IV or data, or a damaged message"

DIGESTS = ("md5", "sha1", "sha256", "sha384", "sha512")
MAX_ROUNDS = 20_000_000
"""Maximum of PBKDF2 iterations times blocks of the key: about ten seconds of CPU time."""

YieldIfDue = Callable[[], object]
"""Called between pieces of work, so that other greenlets run."""


def _no_yield() -> None: ...


class Symmetric:
    """An AES key with its IV.

    In CBC without padding, each call continues the chain of the previous call, separately for each direction. A padded
    message ends the chain. The next message then begins with the IV again, as all messages in GCM and CCM do.

    Args:
        mode: "GCM", "CCM" or "CBC".
        key: 16 or 32 bytes.
        iv: 12 bytes for GCM and CCM, 16 for CBC.
        direction: "encrypt" or "decrypt" to allow only one direction; None for both.

    Raises:
        ArgumentError: an argument is invalid.
    """

    def __init__(self, mode: str, key: bytes, iv: bytes, direction: str | None = None) -> None:
        if mode not in IV_BYTES:
            raise ArgumentError(f"symmetric: unknown mode '{mode}': use GCM, CCM or CBC")
        if len(key) not in KEY_BYTES:
            raise ArgumentError(f"symmetric: the key must have 16 or 32 bytes, not {len(key)}")
        if len(iv) != IV_BYTES[mode]:
            raise ArgumentError(f"symmetric: the IV of {mode} must have {IV_BYTES[mode]} bytes, not {len(iv)}")
        if direction not in (None, "encrypt", "decrypt"):
            raise ArgumentError(f"symmetric: unknown direction '{direction}': use encrypt or decrypt")
        self._mode, self._key, self._iv, self._direction = mode, key, iv, direction
        self._aad = b""
        self._chains: dict[str, CipherContext] = {}

    def set_auth(self, data: bytes) -> None:
        """Authenticate `data` with every later message, without encrypting it. Raises ArgumentError for CBC."""
        if self._mode == "CBC":
            raise ArgumentError("setauth: CBC does not authenticate; use GCM or CCM")
        self._aad = data

    def encrypt(
        self, data: bytes, padded: bool = False, yield_if_due: YieldIfDue = _no_yield
    ) -> tuple[bytes, bytes | None]:
        """Encrypt a message. Return the ciphertext, and the tag of 16 bytes (None for CBC).

        Args:
            data: the message; whole blocks of 16 bytes for CBC without padding.
            padded: pad to whole blocks (PKCS #7).
            yield_if_due: called after each MiB.

        Raises:
            ArgumentError: not whole blocks, too long for CCM, or the object only decrypts.
        """
        self._check("encrypt", data, padded)
        if padded:
            padder = PKCS7(BLOCK_BYTES * 8).padder()
            data = padder.update(data) + padder.finalize()
        if self._mode == "CCM":
            sealed = AESCCM(self._key, TAG_BYTES).encrypt(self._iv, data, self._aad)
            return sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if self._mode == "CBC":
            return self._chained("encrypt", data, padded, yield_if_due), None
        context = Cipher(AES(self._key), GCM(self._iv)).encryptor()
        context.authenticate_additional_data(self._aad)
        sealed = _update_in_pieces(context, data, yield_if_due) + context.finalize()
        return sealed, context.tag

    def decrypt(
        self, data: bytes, tag: bytes | None = None, padded: bool = False, yield_if_due: YieldIfDue = _no_yield
    ) -> bytes:
        """Decrypt a message.

        Args:
            data: the ciphertext.
            tag: the tag that `encrypt` returned; None for CBC.
            padded: remove the padding (PKCS #7).
            yield_if_due: called after each MiB.

        Raises:
            ArgumentError: no tag, or the object only encrypts.
            CryptoError: "failed": the tag or the padding is wrong.
        """
        self._check("decrypt", b"", False)
        if self._mode == "CBC":
            if len(data) % BLOCK_BYTES:
                raise CryptoError("failed", "not whole blocks of 16 bytes")
            plain = self._chained("decrypt", data, padded, yield_if_due)
        elif tag is None:
            raise ArgumentError(f"decrypt: {self._mode} needs the tag")
        elif len(tag) != TAG_BYTES:
            raise CryptoError("failed", f"the tag has {len(tag)} bytes, not {TAG_BYTES}")
        else:
            try:
                if self._mode == "CCM":
                    plain = AESCCM(self._key, TAG_BYTES).decrypt(self._iv, data + tag, self._aad)
                else:
                    context = Cipher(AES(self._key), GCM(self._iv, tag)).decryptor()
                    context.authenticate_additional_data(self._aad)
                    plain = _update_in_pieces(context, data, yield_if_due) + context.finalize()
            except (InvalidTag, ValueError):  # ValueError: too long for CCM
                raise CryptoError("failed", _TAMPERED) from None
        if not padded:
            return plain
        unpadder = PKCS7(BLOCK_BYTES * 8).unpadder()
        try:
            return unpadder.update(plain) + unpadder.finalize()
        except ValueError:
            raise CryptoError("failed", "the padding is wrong") from None

    def _chained(self, direction: str, data: bytes, ends: bool, yield_if_due: YieldIfDue) -> bytes:
        """Encrypt or decrypt in CBC, continuing the chain of this direction; `ends` ends the chain."""
        context = self._chains.pop(direction, None)  # put back only on success, so that an error ends the chain
        if context is None:
            cipher = Cipher(AES(self._key), CBC(self._iv))
            context = cipher.encryptor() if direction == "encrypt" else cipher.decryptor()
        result = _update_in_pieces(context, data, yield_if_due)
        if not ends:
            self._chains[direction] = context
        return result

    def _check(self, direction: str, data: bytes, padded: bool) -> None:
        if self._direction not in (None, direction):
            raise ArgumentError(f"{direction}: this object only {self._direction}s")
        if self._mode == "CBC" and not padded and len(data) % BLOCK_BYTES:
            raise ArgumentError(f"{direction}: CBC takes whole blocks of 16 bytes; pass 'PKCS7' for padding")
        if self._mode == "CCM" and len(data) > MAX_CCM_BYTES - BLOCK_BYTES:
            raise ArgumentError(f"{direction}: CCM takes at most 16 MiB at a time; use GCM")


def _update_in_pieces(context: CipherContext, data: bytes, yield_if_due: YieldIfDue) -> bytes:
    if len(data) <= PIECE_BYTES:
        return context.update(data)
    view, pieces = memoryview(data), []
    for at in range(0, len(data), PIECE_BYTES):
        pieces.append(context.update(view[at : at + PIECE_BYTES]))
        yield_if_due()
    return b"".join(pieces)


def digest_named(name: str) -> str:
    """Return the name for hashlib: md5, sha1, sha256, sha384 or sha512. Ignores letter case and dashes.

    Raises:
        ArgumentError: an unknown name.
    """
    plain = name.lower().replace("-", "")
    if plain not in DIGESTS:
        raise ArgumentError(f"unknown hash algorithm '{name}': use one of {', '.join(DIGESTS)}")
    return plain


def pbkdf2(algorithm: str, password: bytes, salt: bytes, iterations: int, size_bytes: int) -> bytes:
    """Derive a key from a password (RFC 8018). Slow: call it in a thread.

    Args:
        algorithm: the hash of the HMAC, see `digest_named`.
        password, salt: any bytes.
        iterations: 1 or more.
        size_bytes: size of the key, 1 or more.

    Raises:
        ArgumentError: an unknown algorithm, or more work than `MAX_ROUNDS`.
    """
    name = digest_named(algorithm)
    if iterations < 1 or size_bytes < 1:
        raise ArgumentError("PBKDF2: iterations and length must be above 0")
    blocks = -(-size_bytes // hashlib.new(name).digest_size)
    if iterations * blocks > MAX_ROUNDS:
        raise ArgumentError(
            f"PBKDF2: {iterations} iterations for {size_bytes} bytes are too many; iterations times hash blocks must "
            f"be at most {MAX_ROUNDS:,}"
        )
    return hashlib.pbkdf2_hmac(name, password, salt, iterations, size_bytes)


# ---- Encrypted URL-safe tokens (AES-GCM, NIST SP 800-38D).

_NONCE_BYTES = 12
_TO_STANDARD_BASE64 = bytes.maketrans(b"-_", b"+/")


def new_key(size_bytes: int = 32) -> bytes:
    """Return a random key.

    Args:
        size_bytes: 16 or 32.

    Raises:
        ArgumentError: another size.
    """
    return secrets.token_bytes(_checked_key_size(size_bytes))


def seal(key: bytes, data: bytes) -> bytes:
    """Encrypt `data` into a token of letters, digits, `-` and `_`, different at each call (spec: bas-api §7).

    Raises:
        ArgumentError: the key does not have 16 or 32 bytes.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return urlsafe_b64encode(nonce + _cipher(key).encrypt(nonce, data, None)).rstrip(b"=")


def unseal(key: bytes, token: bytes) -> bytes | None:
    """Decrypt a token; return None when it was modified or made with another key. Raises as `seal`."""
    cipher = _cipher(key)
    try:
        padding = b"=" * (-len(token) % 4)  # `seal` removes it
        sealed = a2b_base64(token.translate(_TO_STANDARD_BASE64) + padding, strict_mode=True)
    except Base64Error:
        return None
    if urlsafe_b64encode(sealed).rstrip(b"=") != token:  # not the canonical encoding of these bytes
        return None
    try:
        return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
    except (InvalidTag, ValueError):  # ValueError: the nonce is too short
        return None


def _cipher(key: bytes) -> AESGCM:
    _checked_key_size(len(key))
    return AESGCM(key)


def _checked_key_size(size_bytes: int) -> int:
    if size_bytes not in KEY_BYTES:
        raise ArgumentError(f"an AES key must have 16 or 32 bytes, not {size_bytes}; ba.aeskey creates one")
    return size_bytes
