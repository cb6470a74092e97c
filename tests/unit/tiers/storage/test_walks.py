"""A listing by the beginning of a key enters no folder that cannot hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from tiers.storage.arrow import ArrowFiles
from tiers.storage.hdfs import HdfsFiles

KEYS = ["aa11/x/1", "ab22/y/2", "b333/z/3", "top"]


@dataclass
class Status:
    path: str
    isdir: bool
    length: int = 1
    modification_time: int = 0


@dataclass
class NameNode:
    """Answers as a real one does (verified on Hadoop 3.4): a file's own status where it is asked for as a folder."""

    files: list[str]
    gone: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def list_status(self, path: str, recursive: bool = False) -> Iterator[Status]:
        self.asked.append(path)
        assert not recursive
        inside = path.rstrip("/") + "/"
        names = {one.removeprefix(inside).partition("/")[:2] for one in self.files if one.startswith(inside)}
        if path in self.files:
            yield Status(path, isdir=False)
        elif not names or path in self.gone:
            raise FileNotFoundError(path)
        for name, slash in sorted(names):
            yield Status(inside + name, isdir=bool(slash))


def files_over(name_node: Any, root: str) -> HdfsFiles:
    settings = {"url": "hdfs://localhost", "path": root, "timeout.ms": "1000", "min.replicas": "1"}
    files = HdfsFiles(defaultdict(str, settings))
    files._client = name_node
    return files


def walked(name_node: NameNode, root: str, prefix: str) -> list[str]:
    return sorted(stored.key for stored in files_over(name_node, root).walk(prefix))


@pytest.mark.parametrize(
    ("prefix", "found", "asked"),
    [
        ("", KEYS, ["", "aa11", "aa11/x", "ab22", "ab22/y", "b333", "b333/z"]),
        ("a", KEYS[:2], ["", "aa11", "aa11/x", "ab22", "ab22/y"]),
        ("ab22/", KEYS[1:2], ["ab22", "ab22/y"]),
        ("ab22/y/2", KEYS[1:2], ["ab22/y"]),
        ("c", [], [""]),
        ("c/d/e", [], ["c/d"]),
        ("top/", [], ["top"]),
    ],
)
@pytest.mark.parametrize("root", ["/tier", "/"])
def test_only_what_may_hold_it_is_entered(root: str, prefix: str, found: list[str], asked: list[str]) -> None:
    base = root.rstrip("/")
    name_node = NameNode([f"{base}/{key}" for key in KEYS])
    assert walked(name_node, root, prefix) == found
    assert sorted(name_node.asked) == [f"{base}/{folder}" if folder else root for folder in asked]


def test_a_folder_that_goes_meanwhile_hides_no_other() -> None:
    name_node = NameNode([f"/tier/{key}" for key in KEYS], gone={"/tier/ab22", "/tier/aa11/x"})
    assert walked(name_node, "/tier", "") == ["b333/z/3", "top"]


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
        ("", KEYS, [("store", True)]),
        ("a", KEYS[:2], [("store", False), ("aa11", True), ("ab22", True)]),
        ("ab22/", KEYS[1:2], [("ab22", True)]),
        ("ab22/y/2", KEYS[1:2], [("y", False)]),
        ("c", [], [("store", False)]),
    ],
)
def test_only_what_may_hold_it_is_entered_in_pyarrow(
    tmp_path: Path, prefix: str, found: list[str], asked: list[tuple[str, bool]]
) -> None:
    root = tmp_path / "store"
    for key in KEYS:
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(b"1")
    files = ArrowFiles(defaultdict(str, {"uri": root.as_uri(), "timeout.ms": "1000"}))
    files.connect()
    watched = Watched(files._files)
    files._files = watched
    walked = sorted(stored.key for stored in files.walk(prefix))
    assert [key for key in walked if key.startswith(prefix)] == found
    assert sorted(watched.asked) == sorted(asked)
