"""The self-signed pair: usable, private, kept, and made again when it no longer fits."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

from smqrt.transport.tls_contexts import self_signed_pair


def test_the_pair_loads_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    cert, key = self_signed_pair("127.0.0.1", tmp_path / "cache")
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    assert [stat.S_IMODE(Path(path).stat().st_mode) for path in (cert, key)] == [0o600, 0o600]
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_the_pair_is_kept(tmp_path: Path) -> None:
    first = [Path(path).read_bytes() for path in self_signed_pair("127.0.0.1", tmp_path)]
    assert [Path(path).read_bytes() for path in self_signed_pair("0.0.0.0", tmp_path)] == first


def test_another_host_or_broken_file_makes_new_pairs(tmp_path: Path) -> None:
    cert, _ = map(Path, self_signed_pair("127.0.0.1", tmp_path))
    first = cert.read_bytes()
    self_signed_pair("192.0.2.7", tmp_path)
    second = cert.read_bytes()
    assert second != first
    cert.write_bytes(b"broken")
    self_signed_pair("192.0.2.7", tmp_path)
    assert cert.read_bytes() not in (second, b"broken")
