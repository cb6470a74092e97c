"""A listing by the beginning of a key enters no folder that cannot hold it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from tiers.storage.arrow import ArrowFiles


class Watched:
    """A file system that notes the folders it is asked for."""

    def __init__(self, files: fs.FileSystem) -> None:
        self._files = files
        self.asked: list[tuple[str, bool]] = []

    def get_file_info(self, selector: fs.FileSelector) -> Any:
        self.asked.append((Path(selector.base_dir).name, selector.recursive))
        return self._files.get_file_info(selector)


@pytest.mark.parametrize(
    ("prefix", "found", "asked"),
    [
        ("", ["aa11/x/1", "ab22/y/2", "b333/z/3", "top"], [("store", True)]),
        ("a", ["aa11/x/1", "ab22/y/2"], [("store", False), ("aa11", True), ("ab22", True)]),
        ("ab22/", ["ab22/y/2"], [("ab22", True)]),
        ("ab22/y/2", ["ab22/y/2"], [("y", False)]),
        ("c", [], [("store", False)]),
    ],
)
def test_only_what_may_hold_it_is_entered(
    tmp_path: Path, prefix: str, found: list[str], asked: list[tuple[str, bool]]
) -> None:
    root = tmp_path / "store"
    for key in ("aa11/x/1", "ab22/y/2", "b333/z/3", "top"):
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"1")
    files = ArrowFiles(defaultdict(str, {"uri": root.as_uri(), "timeout.ms": "1000"}))
    files.connect()
    watched = Watched(files._files)
    files._files = watched
    walked = sorted(stored.key for stored in files.walk(prefix))
    assert [key for key in walked if key.startswith(prefix)] == found
    assert sorted(watched.asked) == sorted(asked)
