"""AES ciphers, derived keys and encrypted tokens; the vectors are those of NIST and RFC 6070."""

from __future__ import annotations

import pytest

from smqrt.crypto import ciphers as module
from smqrt.crypto.ciphers import DIGESTS, MAX_ROUNDS, Symmetric, digest_named, new_key, pbkdf2, seal, unseal
from smqrt.errors import ArgumentError, CryptoError

KEY, IV, NONCE = bytes(range(16)), bytes(range(16)), bytes(12)
BLOCK = b"sixteen bytes..!"


# ---- AES


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("ECB", KEY, IV), "unknown mode 'ECB': use GCM, CCM or CBC"),
        (("CBC", KEY[1:], IV), "the key must have 16 or 32 bytes, not 15"),
        (("CBC", KEY + KEY[:8], IV), "the key must have 16 or 32 bytes, not 24"),
        (("GCM", KEY, IV), "the IV of GCM must have 12 bytes, not 16"),
        (("CBC", KEY, NONCE), "the IV of CBC must have 16 bytes, not 12"),
        (("CBC", KEY, IV, "both"), "unknown direction 'both'"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, bytes, bytes], fault: str) -> None:
    with pytest.raises(ArgumentError, match=fault):
        Symmetric(*arguments)


def test_vectors_of_nist() -> None:
    gcm = Symmetric("GCM", bytes(16), NONCE)
    assert gcm.encrypt(bytes(16)) == (
        bytes.fromhex("0388dace60b6a392f328c2b971b2fe78"),
        bytes.fromhex("ab6e47d42cec13bdf53a67b21257bddf"),
    )
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51")
    sealed = bytes.fromhex("7649abac8119b246cee98e9b12e9197d5086cb9b507219ee95db113a917678b2")
    assert Symmetric("CBC", key, IV).encrypt(plain) == (sealed, None)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", ["GCM", "CCM"])
def test_each_authenticated_message_begins_anew(mode: str, padded: bool) -> None:
    cipher = Symmetric(mode, KEY, NONCE)
    cipher.set_auth(b"header")
    first = cipher.encrypt(b"some text", padded)
    assert cipher.encrypt(b"some text", padded) == first
    for _ in range(2):
        assert cipher.decrypt(*first, padded) == b"some text"


@pytest.mark.parametrize("mode", ["GCM", "CCM"])
def test_what_was_changed_is_refused(mode: str) -> None:
    cipher = Symmetric(mode, KEY, NONCE)
    cipher.set_auth(b"header")
    data, tag = cipher.encrypt(b"some text")
    assert tag is not None
    for wrong in ((data[:-1] + b"x", tag), (data, tag[:-1] + b"x"), (data, tag[:-1]), (data + b"x", tag)):
        with pytest.raises(CryptoError):
            cipher.decrypt(*wrong)
    cipher.set_auth(b"another")
    with pytest.raises(CryptoError, match="the tag does not match"):
        cipher.decrypt(data, tag)
    with pytest.raises(ArgumentError, match=f"decrypt: {mode} needs the tag"):
        cipher.decrypt(data)


def test_cbc_chains_calls_in_each_direction() -> None:
    whole, _ = Symmetric("CBC", KEY, IV).encrypt(BLOCK * 3)
    cipher = Symmetric("CBC", KEY, IV)
    first, second = cipher.encrypt(BLOCK)[0], cipher.encrypt(BLOCK * 2)[0]
    assert first + second == whole
    assert cipher.decrypt(first) == BLOCK
    assert cipher.decrypt(second) == BLOCK * 2


def test_a_padded_message_ends_the_chain() -> None:
    cipher = Symmetric("CBC", KEY, IV)
    sealed, _ = cipher.encrypt(BLOCK + b"rest", padded=True)
    assert len(sealed) == 32
    assert cipher.encrypt(BLOCK)[0] == sealed[:16], "the next one begins with the IV"
    assert cipher.decrypt(sealed, padded=True) == BLOCK + b"rest"
    assert cipher.decrypt(sealed, padded=True) == BLOCK + b"rest"


@pytest.mark.parametrize("data", [b"x" * 15, b"x" * 17])
def test_cbc_takes_whole_blocks(data: bytes) -> None:
    cipher = Symmetric("CBC", KEY, IV)
    with pytest.raises(ArgumentError, match="CBC takes whole blocks of 16 bytes"):
        cipher.encrypt(data)
    with pytest.raises(CryptoError, match="not whole blocks of 16 bytes"):
        cipher.decrypt(data)
    with pytest.raises(ArgumentError, match="CBC does not authenticate"):
        cipher.set_auth(b"")


def test_wrong_padding_is_refused() -> None:
    cipher = Symmetric("CBC", KEY, IV)
    with pytest.raises(CryptoError, match="the padding is wrong"):
        cipher.decrypt(cipher.encrypt(bytes(16))[0], padded=True)


@pytest.mark.parametrize(("direction", "other"), [("encrypt", "decrypt"), ("decrypt", "encrypt")])
def test_an_object_for_one_direction_refuses_the_other(direction: str, other: str) -> None:
    cipher = Symmetric("CBC", KEY, IV, direction)
    getattr(cipher, direction)(BLOCK)
    with pytest.raises(ArgumentError, match=f"{other}: this object only {direction}s"):
        getattr(cipher, other)(BLOCK)


@pytest.mark.parametrize("mode", ["GCM", "CBC"])
def test_large_messages_are_done_in_pieces(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cipher = Symmetric(mode, KEY, NONCE if mode == "GCM" else IV)
    whole = cipher.encrypt(BLOCK * 10, padded=True)
    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    pauses: list[None] = []
    assert cipher.encrypt(BLOCK * 10, True, lambda: pauses.append(None)) == whole
    assert len(pauses) == 3
    assert cipher.decrypt(*whole, True, lambda: pauses.append(None)) == BLOCK * 10
    assert len(pauses) == 6


def test_ccm_has_a_largest_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CCM_BYTES", 100)
    cipher = Symmetric("CCM", KEY, NONCE)
    cipher.encrypt(bytes(84))
    with pytest.raises(ArgumentError, match="CCM takes at most 16 MiB at a time; use GCM"):
        cipher.encrypt(bytes(85))


# ---- derived keys


def test_digests_have_names_in_many_spellings() -> None:
    assert [digest_named(name) for name in ("SHA-256", "sha256", "Md5")] == ["sha256", "sha256", "md5"]
    with pytest.raises(ArgumentError, match=f"unknown hash algorithm 'sha3': use one of {', '.join(DIGESTS)}"):
        digest_named("sha3")


def test_derived_keys_are_those_of_rfc_6070() -> None:
    assert pbkdf2("SHA-1", b"password", b"salt", 2, 20).hex() == "ea6c014dc72d6f8ccd1ed92ace1d41f0d8de8957"


@pytest.mark.parametrize(
    ("iterations", "size_bytes", "fault"),
    [
        (0, 1, "must be above 0"),
        (1, 0, "must be above 0"),
        (MAX_ROUNDS + 1, 32, "are too many"),
        (MAX_ROUNDS // 2 + 1, 33, "are too many"),
        (1, 32 * MAX_ROUNDS + 1, "are too many"),
    ],
)
def test_work_on_a_key_is_limited(iterations: int, size_bytes: int, fault: str) -> None:
    with pytest.raises(ArgumentError, match=fault):
        pbkdf2("sha256", b"", b"", iterations, size_bytes)


# ---- tokens


@pytest.mark.parametrize("size", [16, 32])
def test_a_token_is_opened_by_its_key_alone(size: int) -> None:
    key = new_key(size)
    tokens = {seal(key, b"secret \xff") for _ in range(2)}
    assert len(tokens) == 2, "different at each call"
    for token in tokens:
        assert token.replace(b"-", b"").replace(b"_", b"").isalnum()
        assert unseal(key, token) == b"secret \xff"
        assert unseal(new_key(size), token) is None


def test_each_token_has_one_spelling() -> None:
    key = new_key()
    token = seal(key, b"data")
    assert len(token) % 4, "its last letter has unused bits"
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    assert [letter for letter in letters if unseal(key, token[:-1] + bytes((letter,))) is not None] == [token[-1]]
    for other in (token + b"=", token + b"A", token[1:], b"", b"A" * 15, b"AAAA+/", b" " + token, b"\xff"):
        assert unseal(key, other) is None


@pytest.mark.parametrize("size", [0, 15, 24, 33])
def test_keys_of_tokens_have_two_sizes(size: int) -> None:
    for call in (lambda: new_key(size), lambda: seal(bytes(size), b""), lambda: unseal(bytes(size), b"")):
        with pytest.raises(ArgumentError, match=f"an AES key must have 16 or 32 bytes, not {size}"):
            call()
