from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import install_example
from tests.support.fakes.copies import segment_to_copy
from tiers.config.managers import create_remote_storage_manager, create_storage
from tiers.config.settings import StorageConfig


def install(folder: Path, package: str, entry_point: str) -> None:
    """The files that pip installs of a package with a storage manager."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tidegate.remote_storage_manager]\n{entry_point}\n")


@pytest.mark.parametrize(
    ("entry_point", "named"),
    [
        ("broken = no_such_module:Manager", "cannot be imported: No module named 'no_such_module'"),
        ("local = impostor:Manager", "several packages"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(
    entry_point: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "other", entry_point)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=named):
        create_remote_storage_manager(entry_point.partition(" ")[0], {"path": "/", "cluster.id": "c"})


async def test_a_package_of_a_third_party_is_found_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_example("tape-store", tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    (tmp_path / "tapes").mkdir()
    config = {"implementation": "tape", "folder": str(tmp_path / "tapes")}
    storage = create_storage(StorageConfig.model_validate(config), "c")
    await storage.open()
    await storage.check()
    metadata, data = segment_to_copy(tmp_path)
    await storage.copy_log_segment_data(metadata, data)
    assert await storage.delete_log_segment_data(metadata)
    assert [stored async for stored in storage.list_objects("")] == []
    await storage.close()
    with pytest.raises(ValueError, match="did you mean folder"):
        create_storage(StorageConfig.model_validate({"implementation": "tape", "foldr": "/"}), "c")
