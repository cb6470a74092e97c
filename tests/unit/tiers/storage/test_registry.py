from __future__ import annotations

from pathlib import Path

import pytest

from tiers.config.managers import STORAGE_GROUP, create_remote_storage_manager, installed_names
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.s3.storage import S3RemoteStorageManager


def install(folder: Path, package: str, entry_point: str) -> None:
    """The files that pip installs of a package with a storage manager."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tidegate.remote_storage_manager]\n{entry_point}\n")


def test_our_own_are_installed() -> None:
    assert {"local", "s3"} <= set(installed_names(STORAGE_GROUP))
    local = create_remote_storage_manager("local", {"path": "/", "cluster.id": "c"})
    s3 = create_remote_storage_manager("s3", {"bucket": "b", "cluster.id": "c"})
    assert isinstance(local, LocalRemoteStorageManager)
    assert isinstance(s3, S3RemoteStorageManager)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'floppy'; installed are .*local.*s3"):
        create_remote_storage_manager("floppy", {})


def test_one_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "broken", "broken = no_such_module:Manager")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="cannot be imported: No module named 'no_such_module'"):
        create_remote_storage_manager("broken", {})


def test_two_of_one_name_are_not_guessed_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "impostor", "local = impostor:Manager")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="several packages"):
        create_remote_storage_manager("local", {"path": "/", "cluster.id": "c"})
