"""A listing by the beginning of a key enters no folder that cannot hold it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

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


def walked(name_node: Any, root: str, prefix: str) -> list[str]:
    settings = {"url": "hdfs://localhost", "path": root, "timeout.ms": "1000", "min.replicas": "1"}
    files = HdfsFiles(defaultdict(str, settings))
    files._client = name_node
    return sorted(stored.key for stored in files.walk(prefix))


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
