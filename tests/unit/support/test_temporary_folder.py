"""The tests put their temporary files in memory only if the machine has enough of it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.temporary_folder import NEEDED_BYTES, use_memory


@pytest.fixture(autouse=True)
def own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)


@pytest.mark.parametrize(
    ("memory_bytes", "folder_bytes", "chosen", "is_used"),
    [
        (NEEDED_BYTES, NEEDED_BYTES, None, True),
        (NEEDED_BYTES, NEEDED_BYTES, "/srv/tmp", False),
        (NEEDED_BYTES - 1024, NEEDED_BYTES, None, False),
        (NEEDED_BYTES, 64 << 20, None, False),
    ],
    ids=["enough memory", "a folder of the user", "little memory", "a small folder in memory"],
)
def test_memory_is_used_if_there_is_enough(
    memory_bytes: int,
    folder_bytes: int,
    chosen: str | None,
    is_used: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=folder_bytes))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:       99999999 kB\nMemAvailable:   {memory_bytes >> 10} kB\n")
    environ = {} if chosen is None else {"TMPDIR": chosen}
    assert use_memory(environ, tmp_path, meminfo) is is_used
    assert environ.get("TMPDIR") == (str(tmp_path) if is_used else chosen)
    assert not use_memory({}, tmp_path / "missing", meminfo)
