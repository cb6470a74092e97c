"""The package of `docs/examples/tape-store`, installed as pip would leave it, is found by its entry point.

`tests/contract/test_segment_reads.py` has the contract of its reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import install_example
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.config.managers import create_storage
from tiers.config.settings import StorageConfig


async def test_a_package_of_a_third_party_is_found_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_example("tape-store", tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    (tmp_path / "tapes").mkdir()
    config = {"implementation": "tape", "folder": str(tmp_path / "tapes")}
    storage = create_storage(StorageConfig.model_validate(config), "c")
    await storage.open()
    await storage.check()
    built = build_segment(tmp_path / "log", [batch_of(0, 5)])
    metadata = metadata_of(built)
    await storage.copy_log_segment_data(metadata, built.log_segment_data(metadata))
    assert await storage.delete_log_segment_data(metadata)
    assert [stored async for stored in storage.list_objects("")] == []
    await storage.close()
    with pytest.raises(ValueError, match="did you mean folder"):
        create_storage(StorageConfig.model_validate({"implementation": "tape", "foldr": "/"}), "c")
