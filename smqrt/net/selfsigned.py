"""A self-signed certificate for trying TLS out, made on first use and kept for the user."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID_DAYS = 397  # what browsers accept at most


def cache_folder() -> Path:
    """Returns the user's cache folder for smqrt (`$XDG_CACHE_HOME/smqrt`, else `~/.cache/smqrt`)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "smqrt"


def self_signed_pair(host: str, folder: Path | None = None) -> tuple[str, str]:
    """Returns the paths of a certificate and its key, made when there is none that is valid for `host`.

    Args:
        host: the address the server listens on; the certificate also names localhost and this machine.
        folder: where the pair is kept; the user's cache folder by default.

    Raises:
        OSError: the folder can't be written.
    """
    folder = folder or cache_folder()
    cert, key = folder / "certificate.pem", folder / "key.pem"
    if not (key.is_file() and _is_good(cert, host)):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        cert_pem, key_pem = _make(host)
        _write_private(key, key_pem)
        _write_private(cert, cert_pem)
    return str(cert), str(key)


def _names(host: str) -> list[x509.GeneralName]:
    names: dict[str, None] = dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname()])
    if host not in ("0.0.0.0", "::", ""):
        names[host] = None
    return [x509.IPAddress(address) if (address := _address(name)) else x509.DNSName(name) for name in names]


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _is_good(cert: Path, host: str) -> bool:
    try:
        loaded = x509.load_pem_x509_certificate(cert.read_bytes())
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    return loaded.not_valid_after_utc > tomorrow and set(_names(host)) <= set(names)


def _make(host: str) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "smqrt self-signed")])
    now = datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return cert.public_bytes(serialization.Encoding.PEM), key_pem


def _write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner can read, and that is never half there."""
    fresh = path.with_suffix(f".{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    fresh.replace(path)
