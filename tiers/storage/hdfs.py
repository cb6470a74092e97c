"""`HdfsRemoteStorageManager`: a folder of HDFS as the remote tier, by hdfs-native, without a JVM and without libhdfs.

* It uses only the blocking client. The asynchronous one runs its retries on Python's event loop, where they panic.
* A read beyond the end panics as well, so every range is clamped to the file's length. Opening a file returns the
  length anyway.
* A file is one block, so that one hsync before its end makes all of it durable. It does not count before as many
  DataNodes have it as `min.replicas` says. A client gets its acknowledgements from the DataNodes that it was given, or
  that are left after failures. That may be a single one. So WebHDFS is asked, because hdfs-native does not tell. The
  NameNode knows a replica when its DataNode has reported it, which takes a moment.
* Closing a file takes about half a second, even for a small file, because the NameNode waits for the DataNode's report.
  A segment has two files, so each copy pays this twice.
* The one connection to the NameNode has no deadline, and a call waits for it as long as the kernel keeps it. So the
  library runs in a child process (`child_calls.py`), which is replaced when a call passes its deadline.
* The user comes from Kerberos, or from `$HADOOP_USER_NAME`, which the library reads whenever it connects.
"""

from __future__ import annotations

import getpass
import json
import os
import posixpath
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from tiers.errors import RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.activity import note_progress
from tiers.storage.child_calls import ChildCalls
from tiers.storage.file_system import DEFAULTS, FileSystemRemoteStorageManager, ThreadCalls, refusal
from tiers.storage.remote_storage_manager import StoredObject
from tiers.storage.settings import read_duration_ms, read_number, read_settings

try:
    from hdfs_native import Client, WriteOptions
except ImportError as error:
    raise ImportError("hdfs-native is missing: run `pip install '.[hdfs]'` in the clone of Tidegate") from error

_DEFAULTS: Mapping[str, str | None] = {
    **DEFAULTS,
    "url": None,
    "path": None,
    "config.dir": "",
    "kerberos.principal": "",
    "kerberos.keytab": "",
    "replication": "",
    "min.replicas": "2",
    "web.url": "",
}
_WEB_PORT = 9870
_FIRST_PAUSE_S = 0.02
_PAUSE_S = 0.5
_MIN_BLOCK_BYTES = 1 << 20
"""The smallest block that a NameNode accepts by default."""
_CREDENTIALS = "renew or change the credentials, or their rights on `path`"
_REFUSALS = {
    "AccessControlException": _CREDENTIALS,
    "AuthorizationException": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "SASLError": _CREDENTIALS,
    "GSSAPIError": _CREDENTIALS,
    "NoSASLMechanism": _CREDENTIALS,
    "not supported for erasure-coded files": "a file of erasure-coded blocks cannot be synced: change `path`",
    "QuotaExceededException": "raise the quota of `path`",
    "ParentNotDirectoryException": "a file has a folder's name: change `path`",
    "FileAlreadyExistsException": "a file has a folder's name: change `path`",
    "UrlParseError": "change `url`",
    "InvalidArgument": "change `url` or `config.dir`",
    "InvalidPath": "change `path`",
}


class HdfsRemoteStorageManager(FileSystemRemoteStorageManager):
    """The storage manager `hdfs`.

    The required settings are `url` (hdfs://host:port or hdfs://nameservice), `path` (absolute) and `cluster.id`.
    Optional are `config.dir` (the folder of Hadoop's XML files), `kerberos.principal`, `kerberos.keytab`, `replication`
    (by default the cluster's), `min.replicas` (2), `web.url` (the web addresses of the NameNodes, separated by
    commas; by default port 9870 of `url`), `threads` (16), and `timeout.ms` (30 s), the time without
    progress after which a call ends."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(ChildCalls(in_this_process, settings))


def in_this_process(settings: Mapping[str, str]) -> ThreadCalls:
    """Returns what the child process runs, not yet open. Raises `ValueError`."""
    values = settings_of(settings)
    return ThreadCalls(HdfsFiles(values), values)


def settings_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings with the defaults. Raises `ValueError`."""
    return read_settings("hdfs", settings, _DEFAULTS)


class HdfsFiles:
    """The `BlockingFileSystem` on hdfs-native. A file is visible while it is written, with its current length."""

    shows_on_close = False
    moves_once = True

    def __init__(self, values: Mapping[str, str]) -> None:
        root = values["path"].rstrip("/")
        if not values["path"].startswith("/"):
            raise ValueError("setting 'path': expected an absolute path")
        self._url = values["url"]
        self._root = root
        self._config_dir = values["config.dir"] or None
        self._principal = values["kerberos.principal"] or None
        self._keytab = values["kerberos.keytab"] or None
        self._replication = read_number(values, "replication", 1) if values["replication"] else None
        minimum = self._min_replicas = read_number(values, "min.replicas", 1)
        if self._replication is not None and self._replication < minimum:
            raise ValueError(f"`replication` is below `min.replicas`, {minimum}: raise it, or lower `min.replicas`")
        if minimum > 1 and self._principal is not None:
            raise ValueError(
                "`min.replicas` above 1 is counted by WebHDFS, which takes no Kerberos ticket from this process: set it"
                " to 1, and dfs.namenode.replication.min to 2 on the NameNode"
            )
        self._web_urls = [url.strip().rstrip("/") for url in values["web.url"].split(",") if url.strip()]
        host = urlsplit(values["url"])
        if not self._web_urls and host.hostname and host.port:
            self._web_urls = [f"http://{host.hostname}:{_WEB_PORT}"]
        if minimum > 1 and not self._web_urls:
            raise ValueError("setting 'web.url' of the hdfs storage manager is missing: `url` is a nameservice")
        timeout_ms = read_duration_ms(values, "timeout.ms", 1)
        self._report_s = timeout_ms / 2000
        """The deadline of a request to WebHDFS, and the time in which DataNodes must report their replicas."""
        # The library's own timeouts are minutes. An abandoned call must end soon after its deadline.
        self._config = {
            "dfs.client.socket-timeout": str(timeout_ms),
            "dfs.client.failover.max.attempts": "4",
            "dfs.client.failover.sleep.base.millis": "100",
            "dfs.client.failover.sleep.max.millis": "1000",
        }
        self.name = f"{self._url}{root or '/'}"
        self._client: Client

    def connect(self) -> None:
        self._client = Client(
            self._url,
            self._config,
            self._config_dir,
            kerberos_principal=self._principal,
            kerberos_keytab=self._keytab,
        )

    def size(self, path: str) -> int | None:
        try:
            status = self._client.get_file_info(self._path(path))
        except FileNotFoundError:
            return None
        return None if status.isdir else status.length

    def write(self, path: str, size_bytes: int, pieces: Iterator[bytes]) -> None:
        # An hsync reaches the block that is being written, and a block that is full is closed without one.
        block_bytes = max(_MIN_BLOCK_BYTES, (size_bytes // _MIN_BLOCK_BYTES + 1) * _MIN_BLOCK_BYTES)
        options = WriteOptions(
            block_size=block_bytes, replication=self._replication, overwrite=True, create_parent=True
        )
        # This avoids the library's wrapper, which closes a dropped file and so would complete a failed one.
        writer = self._client.inner.create(self._path(path), options)
        for piece in pieces:
            writer.write(piece)
        if size_bytes:
            writer.hsync()
        writer.close()
        if self._min_replicas > 1:
            self._require_replicas(self._path(path))

    def _require_replicas(self, path: str) -> None:
        """Returns when every block of the closed file has enough replicas.

        Raises `RetriableRemoteStorageError`, which names the settings, if that takes too long."""
        deadline_s, pause_s = time.monotonic() + self._report_s, _FIRST_PAUSE_S
        while (found := self._fewest_replicas(path)) < self._min_replicas:
            if time.monotonic() >= deadline_s:
                raise RetriableRemoteStorageError(
                    f"{path} has {found} of {self._min_replicas} replicas {self._report_s:g} s after it was closed:"
                    " start another DataNode, raise `replication`, or lower `min.replicas`"
                )
            note_progress()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)

    def _fewest_replicas(self, path: str) -> int:
        """Returns the number of replicas of the block that has the fewest. An empty file has no block to lose."""
        user = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
        query = urlencode({"op": "GET_BLOCK_LOCATIONS", "user.name": user})
        trouble = ""
        for url in self._web_urls:
            try:
                request = f"{url}/webhdfs/v1{quote(path)}?{query}"
                with urllib.request.urlopen(request, timeout=self._report_s) as answer:
                    blocks: Any = json.load(answer)["LocatedBlocks"]["locatedBlocks"]
            except urllib.error.HTTPError as error:  # a NameNode in standby refuses as well
                trouble = f"{url}: {error.code} {error.read(500).decode(errors='replace')}"
            except (OSError, ValueError) as error:
                trouble = f"{url}: {error}"
            else:
                return min((len(block["locations"]) for block in blocks), default=self._min_replicas)
        raise RetriableRemoteStorageError(
            f"the replicas of {path} cannot be counted: {trouble}: change `web.url`, or set `min.replicas` to 1 and"
            " dfs.namenode.replication.min to 2 on the NameNode"
        )

    def move(self, source: str, target: str, check: Callable[[], None], *, replace: bool) -> None:
        moved = self._path(source), self._path(target)
        check()
        try:
            self._client.rename(*moved, overwrite=replace)
        except FileNotFoundError:
            self._client.mkdirs(posixpath.dirname(moved[1]), create_parent=True)
            check()
            self._client.rename(*moved, overwrite=replace)

    def read(self, path: str, start: int, end: int | None) -> memoryview:
        reader = self._client.read(self._path(path))
        size = reader.size
        length = max(0, (size if end is None else min(end + 1, size)) - start)
        buffer = bytearray(length)
        position = 0
        if length:
            for piece in reader.read_range_stream(start, length):
                buffer[position : position + len(piece)] = piece
                position += len(piece)
                note_progress()
        if position != length or len(buffer) != length:
            raise RetriableRemoteStorageError(f"{self.name}/{path}: only {position} of {length} bytes arrived")
        return memoryview(buffer)

    def delete(self, path: str) -> None:
        self._client.delete(self._path(path))

    def walk(self, prefix: str) -> Iterator[StoredObject]:
        """Yields the files. Does not enter folders that cannot hold the prefix, and skips a folder that vanishes."""
        first = prefix.rpartition("/")[0]
        folders = [self._path(first) if first else self._root or "/"]
        while folders:
            with suppress(FileNotFoundError):
                for status in self._client.list_status(folders.pop()):
                    key = status.path.removeprefix(f"{self._root}/")
                    if not key.startswith(prefix):
                        continue
                    if status.isdir:
                        folders.append(status.path)
                    else:
                        yield StoredObject(key, status.length, modified_ms=status.modification_time)

    def error_of(self, error: Exception) -> RemoteStorageError:
        text = str(error).partition("\\n")[0].partition("\n")[0]
        source = "`kerberos.keytab`" if self._keytab else "the Kerberos ticket cache or $HADOOP_USER_NAME"
        known = refusal(self.name, text, _REFUSALS, _CREDENTIALS, source)
        return known or RetriableRemoteStorageError(f"{self.name}: {text}")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"
