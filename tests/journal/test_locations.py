"""URIs where folders are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from smqrt.errors import ArgumentError
from smqrt.journal import files
from smqrt.journal.files import HubAddress
from smqrt.journal.remote import open_journal


@pytest.mark.parametrize(
    ("place", "scheme"),
    [
        ("s3a://bucket/x", "s3a"),
        (Path("s3a://bucket/x"), "s3a"),  # which has lost a slash
        ("ABFSS://c@host/x", "abfss"),
        ("file:/x", "file"),
        ("C:/x", ""),
        ("/a/b:/c", ""),
        ("./s3a:/x", ""),
        ("x:y", ""),
        ("", ""),
    ],
)
def test_schemes(place: Path | str, scheme: str) -> None:
    assert files.scheme(place) == scheme
    assert files.is_elsewhere(place) == (scheme not in ("", "file"))


@pytest.mark.parametrize(
    "place", ["/mnt/a b", "file:///mnt/a b", "file:/mnt/a b", "file://localhost/mnt/a b", Path("file:///mnt/a b")]
)
def test_folders_of_this_machine(place: Path | str) -> None:
    assert files.local_folder(place, "it", "") == Path("/mnt/a b")


def test_nothing_is_unescaped() -> None:
    assert files.local_folder("file:///a%20b", "it", "") == Path("/a%20b")


@pytest.mark.parametrize("place", ["s3a://b/x", Path("s3a://b/x"), "file://other/x", "viewfs:///x"])
def test_other_folders(place: Path | str) -> None:
    with pytest.raises(ArgumentError) as caught:
        files.local_folder(place, "--state", "name one")
    assert str(caught.value) == f"--state {place} is not a folder of this machine: name one."


@pytest.mark.parametrize("use", [open_journal, HubAddress.of])
def test_a_journal_is_a_folder_or_on_a_hub(use: object) -> None:
    with pytest.raises(ArgumentError, match="s3a://b/j is not a folder of this machine: name its folder, or the http"):
        use("s3a://b/j")  # type: ignore[operator]
