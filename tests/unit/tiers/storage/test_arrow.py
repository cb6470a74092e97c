"""Objects by pyarrow. The contract test of the stores has the rest, over emulators of the clouds."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from pyarrow import fs

from tiers.errors import CredentialsRefusedError, RetriableRemoteStorageError
from tiers.storage.arrow import ArrowFiles, in_this_process
from tiers.storage.local import LocalFiles


@pytest.fixture
def files(tmp_path: Path) -> ArrowFiles:
    """A folder in the place of a bucket."""
    found = ArrowFiles(defaultdict(str, {"uri": "gs://bucket/prefix", "timeout.ms": "1000", "account.key": "k"}))
    found._files, found._root = fs.LocalFileSystem(), str(tmp_path)
    (tmp_path / "a").mkdir()
    return found


def test_objects_are_written_moved_read_and_deleted(files: ArrowFiles, tmp_path: Path) -> None:
    files.write("a/1", 3, iter([b"ab", b"c"]))
    checks: list[str] = []
    files.move("a/1", "a/2", lambda: checks.append("checked"), replace=True)
    assert checks == ["checked"]
    assert [files.size(path) for path in ("a/1", "a/2", "a")] == [None, 3, None]
    for start, end, found in ((0, None, b"abc"), (1, 1, b"b"), (1, 9, b"bc"), (3, 9, b"")):
        assert files.read("a/2", start, end) == found
    for prefix in ("", "a/", "a/2"):
        assert [(stored.key, stored.size_bytes) for stored in files.walk(prefix)] == [("a/2", 3)]
    assert [*files.walk("b/")] == []
    for _ in range(2):
        files.delete("a/2")
    assert [*files.walk("")] == []


def test_a_refusal_names_what_to_change(files: ArrowFiles) -> None:
    refused = files.error_of(OSError("PERMISSION_DENIED: no\nmore"))
    assert type(refused) is CredentialsRefusedError
    assert str(refused).endswith("their rights on `uri`; the credentials come from `account.key`")
    assert "create it or change `uri`" in str(files.error_of(OSError("NO_SUCH_BUCKET")))
    assert type(files.error_of(OSError("slow"))) is RetriableRemoteStorageError
    assert not files.error_of(ValueError("wrong")).retriable


def test_a_folder_is_stored_as_the_local_store_does() -> None:
    found = in_this_process({"uri": "file:///a%20b/c", "cluster.id": "c"}).files
    assert (type(found), found.name) == (LocalFiles, "/a b/c")


@pytest.mark.parametrize("uri", ["file://a/b", "file:", "/a", "hdfs://a/b", "viewfs://a"])
def test_what_is_no_uri_of_a_store_is_named(uri: str) -> None:
    with pytest.raises(ValueError, match=r"'uri': expected"):
        in_this_process({"uri": uri, "cluster.id": "c"})
