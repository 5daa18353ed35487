"""ba.crypto.symmetric, PBKDF2, keys, signatures, certificates, and the module jwt."""

from __future__ import annotations

import base64
import hmac
import json
import os
import re
from collections.abc import Callable
from typing import Any

import gevent
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESCCM, AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC

from smqrt.apps.lua.bridge import LuaError
from smqrt.apps.lua.vm import Vm

Lua = Callable[..., Any]


@pytest.fixture
def lua(vm: Vm) -> Lua:
    """Evaluates an expression or statements with arguments: one value, or the tuple of several."""

    def run(source: str, *args: Any) -> Any:
        source = source if re.search(r"\breturn\b", source) else "return " + source
        values = vm.eval(source, "=test", *args)
        return values[0] if len(values) == 1 else values

    return run


KEY, IV12, IV16 = bytes(range(32)), bytes(range(12)), bytes(range(16))


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(("mode", "reference"), [("GCM", AESGCM), ("CCM", AESCCM)])
def test_authenticated_modes(lua: Lua, mode: str, reference: Any, size: int) -> None:
    source = """local mode, key, iv, text = ...
    local cipher = ba.crypto.symmetric(mode, key, iv)
    assert(type(cipher) == "userdata" and cipher:setauth "who" == true)
    local sealed, tag = cipher:encrypt(text)
    local again = ba.crypto.symmetric(mode, key, iv, "decrypt")
    again:setauth "who"
    assert(again:decrypt(sealed, tag) == text)
    again:setauth "whom"
    local plain, word = again:decrypt(sealed, tag)
    assert(plain == nil and word == "failed")
    again:setauth "who"
    assert(select(2, again:decrypt(sealed, "short")) == "failed")
    assert(select(2, again:decrypt(sealed .. "x", tag)) == "failed")
    local padded, tag2 = cipher:encrypt(text, "PKCS7")
    assert(#padded == 16 and again:decrypt(padded, tag2, "PKCS7") == text)
    return sealed, tag"""
    sealed, tag = lua(source, mode.encode(), KEY[:size], IV12, b"some text")
    assert sealed + tag == reference(KEY[:size]).encrypt(IV12, b"some text", b"who")


def test_cbc(lua: Lua) -> None:
    source = """local key, iv, text = ...
    local cipher = ba.crypto.symmetric("CBC", key, iv)
    local sealed, tag = cipher:encrypt(text, "PKCS7")
    assert(tag == nil and cipher:decrypt(sealed, "PKCS7") == text)
    assert(cipher:encrypt(text, "PKCS7") == sealed) -- a padded message is a whole one
    local plain, word = cipher:decrypt(sealed:sub(1, 16), "PKCS7")
    assert(plain == nil and word == "failed")
    assert(select(2, cipher:decrypt("odd")) == "failed")
    local half = string.rep("x", 16)
    local stream = ba.crypto.symmetric("CBC", key, iv, "encrypt")
    return sealed, stream:encrypt(half) .. stream:encrypt(half)"""
    sealed, stream = lua(source, KEY, IV16, b"sixteen bytes ok and more")

    def reference(data: bytes) -> bytes:
        context = Cipher(AES(KEY), CBC(IV16)).encryptor()
        return context.update(data) + context.finalize()

    assert sealed == reference(b"sixteen bytes ok and more" + b"\x07" * 7)
    assert stream == reference(b"x" * 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('ba.crypto.symmetric("ECB", ("k"):rep(16), ("i"):rep(12))', "unknown mode 'ECB'"),
        ('ba.crypto.symmetric("GCM", "short", ("i"):rep(12))', "16 or 32 bytes, not 5"),
        ('ba.crypto.symmetric("GCM", ("k"):rep(16), ("i"):rep(16))', "IV of GCM must have 12 bytes, not 16"),
        ('ba.crypto.symmetric("CBC", ("k"):rep(16), ("i"):rep(12))', "IV of CBC must have 16"),
        ('ba.crypto.symmetric("GCM", ("k"):rep(16), ("i"):rep(12), "seal")', "unknown direction 'seal'"),
        ('ba.crypto.symmetric("GCM", ("k"):rep(16), ("i"):rep(12)):encrypt()', "bad argument #1 to 'encrypt'"),
        ('ba.crypto.symmetric("GCM", ("k"):rep(16), ("i"):rep(12)):encrypt("x", "PKCS1")', '"PKCS7" expected'),
        ('ba.crypto.symmetric("GCM", ("k"):rep(16), ("i"):rep(12)):decrypt("x")', "needs the tag"),
        (
            'ba.crypto.symmetric("GCM", ("k"):rep(16), ("i"):rep(12), "decrypt"):encrypt("x")',
            "object only decrypts",
        ),
        ('ba.crypto.symmetric("CBC", ("k"):rep(16), ("i"):rep(16)):encrypt("x")', "whole blocks"),
        ('ba.crypto.symmetric("CBC", ("k"):rep(16), ("i"):rep(16)):setauth("x")', "CBC does not authenticate"),
        ('ba.crypto.symmetric("GCM")', "bad argument #2 to 'symmetric'"),
        ('ba.crypto.PBKDF2("sha3", "p", "s", 1, 1)', "unknown hash algorithm 'sha3'"),
        ('ba.crypto.PBKDF2("sha256", "p", "s", 0, 1)', "bad argument #4 to 'PBKDF2'"),
        ('ba.crypto.PBKDF2("sha256", "p", "s", 1 << 30, 32)', "are too many"),
        ('ba.crypto.PBKDF2("sha256", "p", "s", 1 << 20, 1 << 62)', "are too many"),
        ('ba.crypto.sign("x", {})', "bad argument #2 to 'sign'"),
        ('ba.crypto.sign("x", ba.create.key(), {hash = "crc"})', "unknown hash algorithm 'crc'"),
        ('ba.crypto.verify("x", "y", {x = "1"})', "{x, y} or {n, e} expected"),
        ("ba.create.key{key = 'dsa'}", "unknown kind 'dsa'"),
        ("ba.create.key{bits = 512}", "1024 to 8192"),
        ("ba.create.key{curve = 'P-1'}", "unknown curve 'P-1'"),
        ("ba.create.csr(ba.create.key(), {})", "no part"),
        ("ba.create.csr(ba.create.key(), {commonname = 'a', hat = 'b'})", "unknown part of a name 'hat'"),
        ("ba.create.csr(ba.create.key(), {commonname = 'a'}, {'héé'})", "not a host name"),
        ('require "jwt".sign({}, "s", {alg = "none"})', "unknown algorithm 'none'"),
        ('require "jwt".sign({}, "s", {alg = "RS256"})', "this key does not support RS256"),
        ('require "jwt".sign(1, "s")', "bad argument #1 to 'sign'"),
        ('require "jwt".verify({}, "s")', "bad argument #1 to 'verify'"),
    ],
)
def test_wrong_arguments_are_errors_of_lua(lua: Lua, call: str, message: str) -> None:
    with pytest.raises(LuaError, match=re.escape(message)) as caught:
        lua(f"local _ = {call} return _")
    assert re.match("test:1: ", caught.value.message)


def test_large_messages_do_not_hold_the_loop(vm: Vm) -> None:
    ticks = gevent.spawn(_count_turns)
    source = """local cipher = ba.crypto.symmetric("GCM", ("k"):rep(32), ("i"):rep(12))
    local text = ("x"):rep(12 << 20)
    return cipher:decrypt(cipher:encrypt(text)) == text"""
    assert vm.eval(source) == (True,)
    ticks.kill()
    assert ticks.value > 3


def _count_turns() -> int:
    turns = 0
    try:
        while True:
            gevent.sleep(0)
            turns += 1
    except gevent.GreenletExit:
        return turns


def test_pbkdf2(lua: Lua) -> None:
    expected = "55ac046e56e3089fec1691c22544b605f94185216dde0465e68b9d57c20dacbc"  # RFC 7914 §11
    assert lua('ba.crypto.PBKDF2("sha256", "passwd", "salt", 1, 32)').hex() == expected
    assert len(lua('ba.crypto.PBKDF2("sha1", "passwd", "salt", 100, 50)')) == 50


def test_pbkdf2_lets_others_run(vm: Vm) -> None:
    ticks = gevent.spawn(_count_turns)
    vm.eval('return ba.crypto.PBKDF2("sha512", "p", "s", 100000, 64)')
    ticks.kill()
    assert ticks.value > 10


KINDS = ["{}", "{curve = 'SECP384R1'}", "{curve = 'SECP521R1'}", "{key = 'rsa', bits = 2048}"]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_signatures(lua: Lua, kind: str) -> None:
    source = """local key = ba.create.key(KIND)
    local a, b = ba.crypto.keyparams(key)
    local raw = KIND.bits and {n = a, e = b} or {x = a, y = b}
    local digest = ba.crypto.hash "sha256" "text" (true)
    local signature = ba.crypto.sign("text", key)
    for _, public in ipairs {key, raw} do
      for _, text in ipairs {"text", digest} do
        assert(ba.crypto.verify(text, signature, public) == true)
        assert(ba.crypto.verify(signature, text, public) == true)
        assert(ba.crypto.verify(text, public, signature) == true)
      end
      assert(ba.crypto.verify("another", signature, public) == false)
      assert(ba.crypto.verify("text", "", public) == false)
      assert(ba.crypto.verify("text", signature .. "x", public) == false)
    end
    assert(ba.crypto.verify("text", ba.crypto.sign("text", key, {hash = "sha512"}), raw, {hash = "sha512"}))
    assert(ba.crypto.keyparams(raw) == a)
    local r, s = ba.crypto.sigparams(signature)
    if not KIND.bits then
      assert(ba.crypto.verify("text", r .. s, raw))
      assert(ba.crypto.verify("text", signature, {x = "\\0" .. a, y = "\\0" .. b}))
    end
    return key, signature, ba.crypto.keysize(key), a, b"""
    pem, signature, size, *_ = lua(source.replace("KIND", f"({kind})"))
    key: Any = serialization.load_pem_private_key(pem, None)
    assert size == (key.key_size + 7) // 8
    if isinstance(key, rsa.RSAPrivateKey):
        key.public_key().verify(signature, b"text", padding.PKCS1v15(), hashes.SHA256())
    else:
        key.public_key().verify(signature, b"text", ec.ECDSA(hashes.SHA256()))


def test_rsa_encrypts(lua: Lua) -> None:
    source = """local key = ba.create.key{key = "rsa"}
    for _, padding in ipairs{"pkcs1", "oaep"} do
      local sealed = ba.crypto.encrypt("secret", key, {padding = padding})
      assert(ba.crypto.decrypt(sealed, key, {padding = padding}) == "secret")
    end
    local nothing, word = ba.crypto.encrypt(("x"):rep(300), key)
    assert(nothing == nil and word == "sslcryptoerr")
    assert(ba.crypto.verify("x", ba.crypto.sign("x", key, {padding = "pss"}), key, {padding = "pss"}))
    assert(not ba.crypto.verify("x", ba.crypto.sign("x", key, {padding = "pss"}), key))
    assert(select(2, ba.crypto.decrypt("junk", key, {padding = "oaep"})) == "failed")
    return select(2, ba.crypto.encrypt("x", ba.create.key()))"""
    assert lua(source)[0] == b"sslcryptoerr"


def test_invalid_keys(lua: Lua) -> None:
    for call in (
        'sign("x", "no key")',
        "keysize('-----BEGIN PRIVATE KEY-----\\nAAAA\\n-----END PRIVATE KEY-----')",
        "keyparams(('x'):rep(100000))",
        "keyparams{x = ('x'):rep(32), y = ('y'):rep(32)}",
        "keyparams{x = ('x'):rep(99), y = ('y'):rep(32)}",
        "verify('x', 'y', {n = '', e = 3})",
        "sigparams('junk')",
        "sigparams('')",
    ):
        assert lua("ba.crypto." + call)[:2] == (None, b"sslcryptoerr"), call


def test_rsa_keys_with_inconsistent_numbers(lua: Lua) -> None:
    key: Any = serialization.load_pem_private_key(lua("ba.create.key{key = 'rsa', bits = 1024}"), None)
    pem = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    numbers = key.private_numbers()
    for number in (numbers.p, numbers.q, numbers.d, numbers.dmp1, numbers.dmq1, numbers.iqmp):
        text = number.to_bytes((number.bit_length() + 7) // 8)
        wrong = base64.encodebytes(pem.replace(text, text[:-1] + bytes([text[-1] ^ 4])))
        text = b"-----BEGIN RSA PRIVATE KEY-----\n" + wrong + b"-----END RSA PRIVATE KEY-----\n"
        assert lua("return ba.crypto.sign(...)", b"x", text)[:2] == (None, b"sslcryptoerr")


def test_certificates_take_date_tables(lua: Lua) -> None:
    """As `os.date "*t"` gives them: the dates that the original takes."""
    source = """local key = ba.create.key()
    local csr = ba.create.csr(key, {commonname = "a.example"})
    local from, to = os.date("*t", 1700000000), {year = 2033, month = 13, day = 1, hour = 0}
    local self_signed = ba.parsecert(ba.create.certificate(csr, key, from, to, 77))
    assert(ba.parsecerttime(self_signed.tzfrom) == 1700000000 and self_signed.serial == "4D")
    assert(ba.parsecerttime(self_signed.tzto) == os.time{year = 2034, month = 1, day = 1, hour = 0})
    local other = ba.create.key()
    local root = ba.create.certificate(csr, key)
    local issued = ba.parsecert(ba.create.certificate(ba.create.csr(other, {CN = "b"}), root, key, from, to))
    assert(ba.parsecerttime(issued.tzfrom) == 1700000000)
    local mixed = ba.parsecert(ba.create.certificate(csr, key, 1600000000, to))
    assert(ba.parsecerttime(mixed.tzfrom) == 1600000000)
    local text = {}
    for _, wrong in ipairs{{}, {year = 2033}, {year = "x", month = 1, day = 1}, {year = 2033, month = 1.5, day = 1}} do
      local ok, message = pcall(ba.create.certificate, csr, key, from, wrong)
      assert(not ok)
      text[#text + 1] = message
    end
    return table.unpack(text)"""
    for message in lua(source):
        assert b"bad argument #4 to 'certificate' (field '" in message, message


def test_times_of_certificates(lua: Lua) -> None:
    times = {
        b"231114221320Z": 1700000000,
        b"20231114221320Z": 1700000000,
        b"2023-11-14T22:13:20Z": 1700000000,
        b"500101000000Z": -631152000,
        b"491231235959Z": 2524607999,
        b"99991231235959Z": 253402300799,
        b"19691231235959Z": -1,
    }
    for text, seconds in times.items():
        assert lua("return ba.parsecerttime(...)", text) == seconds, text
    for text in (
        b"",
        b"now",
        b"231114221320",
        b"2311142213Z",
        b"231314221320Z",
        b"231114226020Z",
        b"x" * 1000,
        b"9" * 99,
    ):
        assert lua("return ba.parsecerttime(...)", text) is None, text
    assert b"parsecerttime" in lua("return select(2, pcall(ba.parsecerttime))")


def test_certificates(lua: Lua) -> None:
    source = """local key = ba.create.key()
    local csr = ba.create.csr(key, {commonname = "Root", organization = "Ours"}, {"SSL_CA"}, {"KEY_CERT_SIGN"})
    local root = ba.create.certificate(csr, key)
    local own = ba.create.key{key = "rsa"}
    local asked = ba.create.csr(own, {CN = "a.example", O = "Theirs", c = "SE"},
      {"SSL_SERVER", "SSL_CLIENT"}, {"DIGITAL_SIGNATURE"},
      "a.example;DNS:b.example,10.0.0.1")
    local certificate = ba.create.certificate(asked, root, key, 1700000000, "2033-01-01T00:00:00Z", 77)
    local described = ba.parsecert(certificate)
    assert(described.issuer.commonname == "Root" and described.subject.commonname == "a.example")
    assert(described.subject.organization == "Theirs" and described.subject.country == "SE")
    assert(table.concat(described.subjectaltnames, " ") == "a.example b.example 10.0.0.1")
    assert(ba.crypto.keyparams(certificate) == ba.crypto.keyparams(own))
    assert(select(2, ba.create.certificate(asked, key)) == "sslcryptoerr")   -- not the key of the request
    assert(select(2, ba.create.certificate(asked, root, own)) == "sslcryptoerr")
    assert(select(2, ba.create.certificate("junk", key)) == "sslcryptoerr")
    assert(not pcall(ba.create.certificate, asked, root, key, 1700000000, 1600000000))
    return root, certificate"""
    root, certificate = map(x509.load_pem_x509_certificate, lua(source))
    certificate.verify_directly_issued_by(root)
    assert certificate.serial_number == 77
    assert certificate.not_valid_before_utc.timestamp() == 1700000000
    assert root.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {use.dotted_string[-1] for use in usage} == {"1", "2"}


def parts(token: bytes) -> list[bytes]:
    return [base64.urlsafe_b64decode(part + b"==") for part in token.split(b".")]


def b64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def forged(header: dict[str, str], secret: bytes) -> bytes:
    text = b64(json.dumps(header).encode()) + b"." + b64(b'{"sub":"admin"}')
    return text + b"." + b64(hmac.digest(secret, text, "sha256"))


def test_tokens_with_a_shared_secret(lua: Lua) -> None:
    source = """local jwt = require "jwt"
    for _, alg in ipairs {"HS256", "HS384", "HS512"} do
      local token = assert(jwt.sign({sub = "me", n = 1}, "secret", {alg = alg}))
      local header, payload = jwt.verify(token, "secret")
      assert(header.alg == alg and payload.sub == "me" and payload.n == 1 and header.sub == "me")
      assert(select(2, jwt.verify(token, "other")) == "failed")
      assert(select(2, jwt.verify(token .. "x", "secret")) == "failed")
    end
    local now = os.time()
    assert(select(2, jwt.verify(jwt.sign({exp = now - 100}, "s"), "s")) == "expired")
    assert(select(2, jwt.verify(jwt.sign({exp = "soon"}, "s"), "s")) == "expired")
    assert(select(2, jwt.verify(jwt.sign({nbf = now + 100}, "s"), "s")) == "notyetvalid")
    assert(jwt.verify(jwt.sign({exp = now + 100, nbf = now - 100}, "s"), "s"))
    assert(jwt.verify(jwt.sign({}, "s"), {kty = "oct", k = ba.b64urlencode "s"}))
    local named = jwt.sign({}, "two", {kid = "second"})
    assert(jwt.verify(named, {first = "one", second = "two"}, true).kid == "second")
    assert(select(2, jwt.verify(named, {first = "one"}, true)) == "notfound")
    assert(select(2, jwt.verify(jwt.sign({}, "one"), {first = "one"}, true)) == "notfound")
    for _, junk in ipairs {"", "a.b.c", "....", ("x"):rep(70000)} do
      assert(select(2, jwt.verify(junk, "s")) == "failed")
      assert(select(2, jwt.verify(junk, {}, true)) == "failed")
    end
    return jwt.sign({sub = "me"}, "secret")"""
    header, payload, _ = parts(lua(source))
    assert json.loads(header) == {"alg": "HS256", "typ": "JWT"}
    assert json.loads(payload) == {"sub": "me"}


def test_public_keys_and_none_do_not_verify_tokens(lua: Lua) -> None:
    key = lua("ba.create.key()")
    public = (
        serialization.load_pem_private_key(key, None)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    nothing = forged({"alg": "none"}, b"").rpartition(b".")[0] + b"."
    for token in (forged({"alg": "HS256"}, public), forged({"alg": "HS256"}, key), nothing):
        for secret in (public, key, b"secret"):
            assert lua('return require "jwt".verify(...)', token, secret)[:2] == (None, b"failed")


@pytest.mark.parametrize(("kind", "alg"), list(zip(KINDS, ["ES256", "ES384", "ES512", "RS384"], strict=True)))
def test_tokens_with_a_key(lua: Lua, kind: str, alg: str) -> None:
    source = """local jwt, key = require "jwt", ba.create.key(KIND)
    local a, b = ba.crypto.keyparams(key)
    local first, second = table.unpack(KIND.bits and {"n", "e"} or {"x", "y"})
    local encoded = {kty = "any", [first] = ba.b64urlencode(a), [second] = ba.b64urlencode(b)}
    local certificate = ba.create.certificate(ba.create.csr(key, {commonname = "x"}), key)
    local token = assert(jwt.sign({sub = "me"}, key, {alg = ALG, kid = "1"}))
    for _, public in ipairs {key, certificate, encoded} do
      assert(jwt.verify(token, public).alg == ALG)
      assert(jwt.verify(token, {["1"] = public}, true).alg == ALG)
    end
    encoded.kid = "1"
    assert(jwt.verify(token, {keys = {{kid = "2"}, encoded}}, true).alg == ALG)
    assert(select(2, jwt.verify(token, {keys = {{kid = "2"}}}, true)) == "notfound")
    local wrong, word = jwt.verify(token, ba.create.key(KIND))
    assert(wrong == nil and word == "failed")
    local nothing, reason = jwt.sign({}, encoded)
    assert(nothing == nil and reason == "sslcryptoerr")
    return true"""
    assert lua(source.replace("KIND", f"({kind})").replace("ALG", f'"{alg}"')) is True


def test_random_bytes_do_no_harm(lua: Lua) -> None:
    for _ in range(200):
        junk = os.urandom(64)
        lua(
            """local junk = ...
            local cipher = ba.crypto.symmetric("CBC", ("k"):rep(16), ("i"):rep(16))
            cipher:decrypt(junk, "PKCS7")
            ba.crypto.sigparams(junk)
            ba.crypto.keyparams("-----BEGIN PUBLIC KEY-----\\n" .. ba.b64encode(junk) .. "\\n-----END PUBLIC KEY-----")
            require "jwt".verify(ba.b64urlencode(junk) .. ".." .. ba.b64urlencode(junk), "s")
            return true""",
            junk,
        )
