"""The package of `docs/examples/tape-store`, installed as pip would leave it, found by its entry point, and used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.examples import install_example
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.config.settings import StorageConfig
from tiers.config.storage_registry import create_storage
from tiers.errors import RemoteResourceNotFoundError


async def test_a_package_of_a_third_party_is_found_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_example("tape-store", tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    (tmp_path / "tapes").mkdir()
    config = StorageConfig.model_validate({"implementation": "tape", "folder": str(tmp_path / "tapes")})
    storage = create_storage(config, "c")
    await storage.open()
    await storage.check()

    built = build_segment(tmp_path / "log", [batch_of(0, 5)])
    metadata = metadata_of(built)
    data = built.log_segment_data(metadata)
    log = data.log_segment.read_bytes()
    copied = replace(metadata, custom_metadata=await storage.copy_log_segment_data(metadata, data))
    assert await storage.fetch_log_segment(copied, 3, 9) == log[3:10]
    assert await storage.fetch_log_segment(copied, 3) == log[3:]
    assert len(await storage.fetch_log_segment(copied, len(log), len(log) + 9)) == 0
    assert len(await storage.fetch_log_segment(copied, len(log))) == 0
    with pytest.raises(ValueError, match="not a range"):
        await storage.fetch_log_segment(copied, 3, 2)
    assert await storage.fetch_indexes(copied) == data.indexes
    assert await storage.delete_log_segment_data(metadata)
    with pytest.raises(RemoteResourceNotFoundError):
        await storage.fetch_indexes(copied)
    assert [stored async for stored in storage.list_objects("")] == []
    await storage.close()


async def test_its_settings_are_checked_as_ours_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_example("tape-store", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="did you mean folder"):
        create_storage(StorageConfig.model_validate({"implementation": "tape", "foldr": "/"}), "c")
