"""The applications that a command line means."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from smqrt.cli.serve import AppSpec, discover
from smqrt.errors import StartError


def make(folder: Path, *files: str) -> Path:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return folder


def zipped(path: Path, *files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in files:
            archive.writestr(name, "")
    return path


def mounts(specs: list[AppSpec]) -> list[tuple[str, str]]:
    return [(spec.name, spec.path.name) for spec in specs]


@pytest.mark.parametrize("mark", [".preload", ".preload.py", "index.html", "index.lsp", "smq.lsp"])
def test_a_folder_with_a_mark_is_the_root_application(tmp_path: Path, mark: str) -> None:
    make(tmp_path, mark, "pictures/a.png")
    assert discover([], [], tmp_path) == [AppSpec("", tmp_path)]


def test_without_argument_app_preload_comes_first(tmp_path: Path) -> None:
    make(
        tmp_path,
        "index.html",
        "app_preload/b/.preload",
        "app_preload/a/index.html",
        "app_preload/.git/x",
        "app_preload/x.txt",
    )
    assert mounts(discover([], [], tmp_path)) == [("a", "a"), ("b", "b")]


def test_without_argument_the_current_folder_holds_applications(tmp_path: Path) -> None:
    make(tmp_path, "plain/readme.txt", "chat/.preload")
    assert mounts(discover([], [], tmp_path)) == [("chat", "chat"), ("plain", "plain")]


def test_one_argument_is_the_root_even_without_a_mark(tmp_path: Path) -> None:
    make(tmp_path, "site/page.html", "site/img/a.png")
    assert mounts(discover(["site"], [], tmp_path)) == [("", "site")]


def test_one_argument_may_hold_applications(tmp_path: Path) -> None:
    make(tmp_path, "apps/chat/.preload", "apps/led/index.lsp")
    assert mounts(discover(["apps"], [], tmp_path)) == [("chat", "chat"), ("led", "led")]


def test_several_arguments_are_mounted_under_their_names(tmp_path: Path) -> None:
    make(tmp_path, "one/.preload")
    zipped(tmp_path / "two.zip", ".preload")
    assert mounts(discover(["one", "two.zip"], [], tmp_path)) == [("one", "one"), ("two", "two.zip")]


def test_a_zip_file_works_like_a_folder(tmp_path: Path) -> None:
    app = zipped(tmp_path / "app.zip", ".preload", "index.lsp")
    assert discover([str(app)], [], tmp_path) == [AppSpec("", app)]
    several = zipped(tmp_path / "apps.zip", "chat/.preload", "led/index.lsp", "readme.txt")
    expected = [AppSpec("chat", several, inner="chat"), AppSpec("led", several, inner="led")]
    assert discover([str(several)], [], tmp_path) == expected


def test_names_in_a_zip_file_as_packers_write_them(tmp_path: Path) -> None:
    app = zipped(tmp_path / "app.zip", "./.preload", "./index.lsp")
    assert discover([str(app)], [], tmp_path) == [AppSpec("", app)]
    several = zipped(tmp_path / "apps.zip", "chat\\.preload", "led\\index.lsp", "readme.txt")
    expected = [AppSpec("chat", several, inner="chat"), AppSpec("led", several, inner="led")]
    assert discover([str(several)], [], tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "name", "priority"),
    [("chat:5:app", "chat", 5), ("::app", "", 0), (":-127:app", "", -127), ("chat::app", "chat", 0)],
)
def test_mako_mounts(tmp_path: Path, text: str, name: str, priority: int) -> None:
    make(tmp_path, "app/readme.txt")
    assert discover([], [text], tmp_path) == [AppSpec(name, tmp_path / "app", priority)]


def test_mounts_come_in_their_order_and_before_arguments(tmp_path: Path) -> None:
    make(tmp_path, "b/.preload", "a/.preload", "root/.preload")
    assert [spec.name for spec in discover(["root"], ["b::b", "a::a"], tmp_path)] == ["b", "a", ""]


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        (["nowhere"], [], "nowhere does not exist. An application is a folder or a ZIP file."),
        (["broken.zip"], [], "broken.zip is neither a folder nor a readable ZIP file"),
        (["outside.zip"], [], "entry '../x'"),
        ([], ["chat"], "-l chat: not NAME:PRIORITY:PATH"),
        ([], ["chat:1:"], "not NAME:PRIORITY:PATH"),
        ([], ["chat:high:app"], "priority 'high' is not a number from -127 to 127"),
        ([], ["chat:128:app"], "priority '128'"),
        ([], ["a/b:1:app"], "A name is one path segment"),
        ([], ["::nowhere"], "nowhere does not exist"),
        (["app", "other/app"], [], "have the same path /app/"),
        (["app"], ["::app"], "have the same path /."),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path: Path, arguments: list[str], options: list[str], sentence: str) -> None:
    make(tmp_path, "app/.preload", "other/app/.preload", "broken.zip")
    zipped(tmp_path / "outside.zip", "../x")
    with pytest.raises(StartError) as caught:
        discover(arguments, options, tmp_path)
    assert sentence in str(caught.value)


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no application in .*\. Add a .preload"):
        discover([], [], tmp_path)


def test_a_folder_that_cannot_be_read_gets_one_sentence(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(StartError, match="Cannot read .*loop: Too many levels of symbolic links."):
        discover(["loop"], [], tmp_path)
