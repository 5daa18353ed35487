"""The settings `tls.acme...`: what is taken, what is refused with which words, and where files are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smqrt.acme import orders
from smqrt.errors import ArgumentError, StartError
from smqrt.server.configuration import acme_files, check_startable
from smqrt.settings.server_settings import ListenerSettings, Settings, TlsSettings

DIRECTORY = "https://ca.example:14000/acme/directory"


def settings(folder: Path | None = None, *, tls_port: int | None = 0, cert: str | None = None, **tls: Any) -> Settings:
    about: dict[str, Any] = {"acme": ("example.com",), "acme_directory": DIRECTORY, **tls}
    if folder is not None:
        about["acme_folder"] = str(folder)
    return Settings(tls_port=tls_port, cert=cert, key=cert, tls=TlsSettings(**about))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("Example.COM., www.example.com", ("example.com", "www.example.com")),
        (["bücher.example", "example.com", "example.com"], ("xn--bcher-kva.example", "example.com")),
        ([], ()),
    ],
)
def test_names(given: object, read: tuple[str, ...]) -> None:
    assert TlsSettings.__dataclass_fields__["acme"].metadata["rule"].check("tls.acme", given) == read


@pytest.mark.parametrize(
    "name",
    ["*.example.com", "192.0.2.7", "::1", "a b", "-a.example", "a..b", "x" * 64, "../etc", "a/b", f"{'a.' * 127}b"],
)
def test_names_that_can_be_in_no_certificate(name: str) -> None:
    with pytest.raises(ArgumentError, match="tls.acme must be host names such as example.com, without"):
        TlsSettings.__dataclass_fields__["acme"].metadata["rule"].check("tls.acme", [name])


@pytest.mark.parametrize("url", ["example.com", "ftp://example.com/", "https://", "https://a b/", "https://a/?x"])
def test_what_is_no_directory(url: str) -> None:
    with pytest.raises(StartError, match="tls.acme_directory must be the URL of an ACME directory"):
        settings(acme_directory=url)


def test_where_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    place = "ca.example_14000_acme_directory/example.com/cert.pem"
    for folder, expected in ((tmp_path, tmp_path), (None, Path("/state/smqrt/acme"))):
        found = acme_files(settings(folder))
        assert found is not None
        assert found.cert == expected / place
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/smqrt:/var/lib/other")
    found = acme_files(settings())
    assert found is not None
    assert found.cert == Path("/var/lib/smqrt/acme") / place
    assert acme_files(Settings()) is None


def test_acme_with_a_certificate_file(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="tls.acme would order a second certificate; remove tls.acme, or cert and key"):
        check_startable(settings(tmp_path, cert="site.pem"))


def test_settings_without_a_tls_port_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no port with TLS needs one; set tls_port"):
        check_startable(settings(tmp_path, tls_port=None))


def test_a_tls_port_in_a_table_counts(tmp_path: Path) -> None:
    tables = {"main": ListenerSettings(port=0, tls=True)}
    tls = TlsSettings(acme=("example.com",), acme_folder=str(tmp_path))
    check_startable(Settings(listener=tables, tls=tls))


def test_half_an_account(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="tls.acme_eab_id and tls.acme_eab_key belong together"):
        check_startable(settings(tmp_path, acme_eab_id="me"))


def test_the_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"^tls.acme needs the library acme: pip install 'smqrt\[acme\]'.$"):
        check_startable(settings(tmp_path))


def test_it_is_checked_without_making_anything(tmp_path: Path) -> None:
    check_startable(settings(tmp_path / "state"))
    assert not (tmp_path / "state").exists()
