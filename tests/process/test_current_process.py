"""The current application: its folder, and the objects that close with it, without a server."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path

import gevent
import pytest

from smqrt.process.current_process import AppScope, application_folder, base_folder, close_with_app, running_app


class Thing:
    """Something that an application makes."""

    def __init__(self, fails: bool = False) -> None:
        self.closed = 0
        self._fails = fails

    def close(self) -> None:
        """See `Closable.close`."""
        self.closed += 1
        if self._fails:
            raise RuntimeError("broken")


def test_relative_paths_begin_in_the_folder_of_the_application(tmp_path: Path) -> None:
    assert (base_folder(), application_folder()) == (Path.cwd(), None)
    with running_app(AppScope(tmp_path)):
        assert (base_folder(), application_folder()) == (tmp_path, tmp_path)
        assert gevent.spawn(application_folder).get() is None, "another greenlet runs nobody's code"
        with running_app(AppScope(None)):
            assert (base_folder(), application_folder()) == (Path.cwd(), None)
        assert base_folder() == tmp_path
    assert application_folder() is None


def test_objects_close_with_their_application(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app, outside, mine, broken = AppScope(tmp_path), Thing(), Thing(), Thing(fails=True)
    close_with_app(outside)
    with running_app(app):
        close_with_app(mine)
        close_with_app(broken)
    with caplog.at_level(logging.ERROR):
        app.close()
        app.close()
    assert (outside.closed, mine.closed, broken.closed) == (0, 1, 1)
    assert "closing" in caplog.text


def test_an_application_keeps_no_object_alive(tmp_path: Path) -> None:
    app, thing = AppScope(tmp_path), Thing()
    app.add(thing)
    reference = weakref.ref(thing)
    del thing
    gc.collect()
    assert reference() is None
