"""The tests put their temporary files in memory only if the machine has enough of it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.temporary_folder import NEEDED_BYTES, use_memory


@pytest.fixture(autouse=True)
def own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


@pytest.fixture
def roomy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Usage(NEEDED_BYTES))
    return tmp_path


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def _meminfo(folder: Path, available_bytes: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal:       99999999 kB\nMemAvailable:   {available_bytes >> 10} kB\n")
    return path


def test_enough_memory_is_used(roomy: Path) -> None:
    environ: dict[str, str] = {}

    assert use_memory(environ, roomy, _meminfo(roomy, NEEDED_BYTES))

    assert environ == {"TMPDIR": str(roomy)}
    assert tempfile.tempdir is None


def test_the_folder_of_the_user_is_kept(roomy: Path) -> None:
    environ = {"TMPDIR": "/srv/tmp"}

    assert not use_memory(environ, roomy, _meminfo(roomy, NEEDED_BYTES))

    assert environ == {"TMPDIR": "/srv/tmp"}


def test_a_machine_with_little_memory_uses_its_disk(roomy: Path) -> None:
    environ: dict[str, str] = {}

    assert not use_memory(environ, roomy, _meminfo(roomy, NEEDED_BYTES - 1024))

    assert environ == {}


def test_a_small_folder_in_memory_is_not_used(roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: _Usage(64 << 20))

    assert not use_memory({}, roomy, _meminfo(roomy, NEEDED_BYTES))


def test_a_system_without_such_a_folder_uses_its_disk(tmp_path: Path) -> None:
    assert not use_memory({}, tmp_path / "missing", tmp_path / "meminfo")
