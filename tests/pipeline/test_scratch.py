"""Executors keep temporary files beside Spark's own, which are removed with the executor."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pipeline.spark.scratch import scratch_folder


@pytest.mark.parametrize("folders", ["{spark}", "/no/such/folder,{spark}"])
def test_it_is_where_spark_removes_what_a_dead_executor_leaves(
    folders: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", folders.format(spark=tmp_path))
    with scratch_folder("merge") as folder:
        assert folder.parent == tmp_path
        (folder / "segment").write_bytes(b"records")
    assert list(tmp_path.iterdir()) == []


def test_without_spark_it_is_where_temporary_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    with scratch_folder("merge") as folder:
        assert folder.parent == Path(tempfile.gettempdir())
