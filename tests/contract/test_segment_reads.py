"""The contract of `fetch_log_segment` over every wrapper of a store, and over the example of a third party's store.

`test_remote_storage_manager.py` has the same contract over the real stores."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.faulty_storage import FaultyStorage
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.config.managers import create_storage
from tiers.config.settings import StorageConfig
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.remote_storage_manager import RemoteStorageManager

TAPE_STORE = Path(__file__).parents[2] / "docs" / "examples" / "tape-store" / "tape_store.py"


def tape_store(folder: Path) -> RemoteStorageManager:
    spec = importlib.util.spec_from_file_location("tape_store", TAPE_STORE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    store: RemoteStorageManager = module.TapeRemoteStorageManager({"folder": str(folder), "cluster.id": "c"})
    return store


def located(folder: Path) -> RemoteStorageManager:
    (folder / "east").mkdir()
    east = {"name": "east", "path": str(folder / "east")}
    config = {"implementation": "local", "path": str(folder), "locations": [east]}
    return create_storage(StorageConfig.model_validate(config), "c")


def store_of(kind: str, folder: Path) -> RemoteStorageManager:
    local = LocalRemoteStorageManager({"path": str(folder), "cluster.id": "c"})
    match kind:
        case "tape":
            return tape_store(folder)
        case "located":
            return located(folder)
        case "faulty":
            return FaultyStorage(local)
    return local


@pytest.mark.parametrize("kind", ["tape", "located", "faulty"])
async def test_ranges_of_a_segment(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    store = store_of(kind, folder)
    await store.open()
    built = build_segment(tmp_path / "log", [batch_of(0, 5), batch_of(5, 3)])
    data = built.log_segment_data(metadata_of(built))
    metadata: RemoteLogSegmentMetadata = metadata_of(built)
    metadata = replace(metadata, custom_metadata=await store.copy_log_segment_data(metadata, data))
    log = data.log_segment.read_bytes()
    size = len(log)
    for start in (0, 1, size - 1, size, size + 1, 1 << 40):
        assert await store.fetch_log_segment(metadata, start) == log[start:]
        assert await store.fetch_log_segment(metadata, start, start) == log[start : start + 1]
        assert await store.fetch_log_segment(metadata, start, 1 << 41) == log[start:]
    for start, end in ((0, size - 1), (3, 9), (size - 4, size + 100)):
        assert await store.fetch_log_segment(metadata, start, end) == log[start : end + 1]
    for start, no_end in ((1, 0), (10, 3), (0, -1), (-1, None)):
        with pytest.raises(ValueError, match="not a range"):
            await store.fetch_log_segment(metadata, start, no_end)
    await store.close()
