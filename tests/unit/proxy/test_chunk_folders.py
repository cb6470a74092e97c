"""The folders of the chunk files of each process, and the removal of unused ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from proxy.config import TidegateConfig
from proxy.process.budgets import chunk_folder, remove_other_chunk_folders
from tests.support.proxy.parsed_config import parse_config


def settings(state: Path, cache_bytes: int) -> TidegateConfig:
    text = f'''
remote.log.chunk.file.cache.total.size.bytes = {cache_bytes}
[upstream]
bootstrap.servers = "a:9092"
[state]
path = "{state}"
'''
    return parse_config(text)


@pytest.mark.parametrize(
    ("cache_bytes", "workers", "kept"),
    [
        (1, ["worker-1", "worker-2", "remote-log"], {"worker-1", "worker-2"}),
        (0, ["worker-1"], set()),
    ],
)
def test_folders_of_processes_that_are_no_more_go(
    tmp_path: Path, cache_bytes: int, workers: Sequence[str], kept: set[str]
) -> None:
    config = settings(tmp_path, cache_bytes)
    remove_other_chunk_folders(config, workers)
    for worker in ("worker-1", "worker-2", "worker-3"):
        folder = chunk_folder(config, worker)
        folder.mkdir(parents=True)
        (folder / "chunk").write_bytes(b"records")
    other = tmp_path / "metadata" / "data.mdb"
    other.parent.mkdir()
    other.write_bytes(b"state")
    remove_other_chunk_folders(config, workers)
    assert {path.parent.name for path in (tmp_path / "chunks").rglob("chunk")} == kept
    assert other.exists()
