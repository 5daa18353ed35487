"""Key file: secrets and private keys that `ba.tpm` uses in place of a TPM (spec: bas-api §7).

It is a JSON file in the user's configuration folder. Only its owner can read it, and the HTTP server never serves a
file of this name. Processes share it: writers lock it and replace it atomically.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from smqrt.errors import ArgumentError, CryptoError
from smqrt.process.current_process import config_folder

SECRET_BYTES = 32
MAX_DERIVED_BYTES = 255 * 32  # the limit of HKDF with SHA-256 (RFC 5869)
MAX_KEYS, MAX_NAME_BYTES = 1000, 255


def default_path() -> Path:
    """Return the key file of this user: `$XDG_CONFIG_HOME/smqrt/tpm.key`, else `~/.config/smqrt/tpm.key`.

    Raises:
        CryptoError: "ioerror" when the user has no home folder.
    """
    try:
        return config_folder() / "tpm.key"
    except FileNotFoundError:
        raise CryptoError("ioerror", "this user has no home folder; set tpm_key_file") from None


@dataclass
class _Content:
    unique: bytes  # the secret of this machine
    shared: bytes  # the secret "global", which machines may share
    keys: dict[str, str] = field(default_factory=dict)


class KeyFile:
    """Secrets and named private keys, in a file that is created at first use.

    `load` and `add` block on the disk: call them in a thread.

    Args:
        path: the file; the default is `default_path()`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()
        self._content: _Content | None = None

    @property
    def loaded(self) -> bool:
        """Whether the file was read."""
        return self._content is not None

    def load(self) -> None:
        """Read the file, or create it. Blocks on the disk.

        Raises:
            CryptoError: "ioerror": it cannot be read or is damaged; "noaccess": other users may read it.
        """
        try:
            with self._locked():
                if not self.path.exists():
                    self._write(_Content(secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES)))
                self._content = self._read()
        except OSError as error:
            raise CryptoError("ioerror", f"the key file {self.path}: {error.strerror}") from None

    def derive(self, name: bytes, size_bytes: int, unique: bool = True) -> bytes:
        """Derive a key. The same name and length always give the same key.

        Args:
            name: any bytes.
            size_bytes: 1 to 8160.
            unique: derive it from the machine's own secret; otherwise from the secret "global", which machines may
                share.

        Raises:
            ArgumentError: an invalid length.
        """
        if not 1 <= size_bytes <= MAX_DERIVED_BYTES:
            raise ArgumentError(f"a derived key must have 1 to {MAX_DERIVED_BYTES} bytes, not {size_bytes}")
        content = self._loaded()
        # HKDF needs no salt here: the secret is uniformly random (RFC 5869 §3.1).
        secret = content.unique if unique else content.shared
        return HKDF(SHA256(), size_bytes, None, b"smqrt derived key " + name).derive(secret)

    def has(self, name: str) -> bool:
        """Return whether there is a private key of that name."""
        return name in self._loaded().keys

    def pem(self, name: str) -> bytes:
        """Return a private key as PEM text. Raises CryptoError "notfound" when there is none."""
        found = self._loaded().keys.get(name)
        if found is None:
            raise CryptoError("notfound", f"no key '{name}'; create it with createkey")
        return found.encode()

    def add(self, name: str, pem: bytes) -> None:
        """Store a new private key. Blocks on the disk.

        Raises:
            ArgumentError: the name is empty or too long.
            CryptoError: "exist": the name is in use; "nospace": `MAX_KEYS` is reached; "ioerror".
        """
        if not 0 < len(name.encode("utf-8", "surrogateescape")) <= MAX_NAME_BYTES:
            raise ArgumentError(f"the name of a key must have 1 to {MAX_NAME_BYTES} bytes")
        try:
            with self._locked():
                content = self._read()
                if name in content.keys:
                    raise CryptoError("exist", f"the key '{name}' exists already")
                if len(content.keys) >= MAX_KEYS:
                    raise CryptoError("nospace", f"limit reached: {MAX_KEYS} keys")
                content.keys[name] = pem.decode("ascii")
                self._write(content)
                self._content = content
        except OSError as error:
            raise CryptoError("ioerror", f"the key file {self.path}: {error.strerror}") from None

    def _loaded(self) -> _Content:
        if self._content is None:
            self.load()
        assert self._content is not None
        return self._content

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold a lock on a second file, because the key file itself is replaced."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _read(self) -> _Content:
        if self.path.stat().st_mode & 0o077:
            raise CryptoError("noaccess", f"other users may read the key file {self.path}; run: chmod 600 {self.path}")
        try:
            found = json.loads(self.path.read_bytes())
            unique, shared = (b64decode(found[name], validate=True) for name in ("unique", "global"))
            content = _Content(unique, shared, dict(found["keys"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CryptoError("ioerror", f"the key file {self.path} is damaged; restore or remove it") from None
        if min(len(content.unique), len(content.shared)) < SECRET_BYTES:
            raise CryptoError("ioerror", f"a secret in the key file {self.path} has fewer than {SECRET_BYTES} bytes")
        return content

    def _write(self, content: _Content) -> None:
        unique, shared = b64encode(content.unique).decode(), b64encode(content.shared).decode()
        text = json.dumps({"unique": unique, "global": shared, "keys": content.keys}, indent=1)
        fresh = self.path.with_name(f".{self.path.name}.new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o600)  # a file of an interrupted write may have another mode
            file.write(text)
            file.flush()
            os.fsync(fd)
        fresh.replace(self.path)
