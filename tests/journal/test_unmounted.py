"""A volume that is unmounted under a hub, as a network disk may be: an empty folder is in its place."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smqrt.errors import JournalError
from smqrt.journal import commit
from smqrt.journal.commit import stage
from smqrt.journal.files import HubAddress
from tests.journal.failing_disk import FailingDisk, failing, shim
from tests.journal.test_failing_disk import Subscriber

__all__ = ["failing", "shim"]

pytestmark = pytest.mark.servers
AWAY = "was moved, removed or unmounted|can't be written|can't be used"


class Volume:
    """A disk of its own at a folder. Who may not mount (a container without that right) has another folder instead,
    which comes and goes by name: the hub sees the same, an empty folder in the place of the one that it has open.
    """

    def __init__(self, at: Path, real: Path) -> None:
        self.at, self._real = at, real
        real.mkdir()
        at.mkdir()
        self._mounts = _done("mount", "-t", "tmpfs", "-o", "size=64m", "smqrt", real)
        self.attach()

    def attach(self) -> None:
        if self._mounts:
            assert _done("mount", "--bind", self._real, self.at)
        else:
            self.at.rmdir()
            self._real.rename(self.at)

    def detach(self) -> None:
        if self._mounts:
            assert _done("umount", "-l", self.at)
        else:
            self.at.rename(self._real)
            self.at.mkdir()

    def end(self) -> None:
        for place in (self.at, self._real) if self._mounts else ():
            _done("umount", "-l", place)


def _done(*words: str | Path) -> bool:
    return bool(shutil.which(str(words[0]))) and subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = Volume(tmp_path / "journal", tmp_path / "volume")
    yield volume
    volume.end()


def test_a_volume_that_is_unmounted(volume: Volume, failing: Callable[..., FailingDisk]) -> None:
    disk = failing(flush_ms=1)
    clients = Subscriber(disk)
    hub = disk.address().find()
    remote = HubAddress.of(hub.url, hub.token)
    commit.report_progress(remote, "q", "q", {"n1": 0})
    volume.detach()
    disk.until(lambda stats: stats["alarm"])
    disk.served.wait_for(r"its folder was moved, removed or unmounted\); publishers wait and nothing is lost")
    clients.publish(1, 2000)
    disk.until(lambda stats: stats["stalls"])
    rows = [(b"out", None, b"00000000")]
    for folder_or_hub in (remote, HubAddress.of(volume.at)):
        with pytest.raises(JournalError, match=AWAY):
            commit.report_progress(folder_or_hub, "q", "q", {"n1": 9}, retry_s=0)
    with pytest.raises(JournalError, match=AWAY):
        stage(remote, "q", 1, rows, retry_s=0)
    with pytest.raises(JournalError, match=AWAY):
        commit.commit(remote, "q", 1, rows, retry_s=0)
    disk.stats()
    assert list(volume.at.iterdir()) == [], "nothing begins anew"
    volume.attach()
    clients.expect(2000)
    disk.until(lambda stats: stats["rows"] == 2000 and not stats["alarm"])
    assert disk.numbers() == list(range(2000))
    assert "Traceback" not in disk.served.output
    commit.report_progress(remote, "q", "q", {"n1": 9})
