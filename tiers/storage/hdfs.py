"""`HdfsRemoteStorageManager`: a folder of HDFS as the remote tier, by hdfs-native, without a JVM and without libhdfs.

* It uses only the blocking client. The asynchronous one runs its retries on Python's event loop, where they panic.
* A read beyond the end panics as well, so every range is clamped to the file's length. Opening a file returns the
  length anyway.
* A file is one block, so that one hsync before its end makes all of it durable. It does not count before as many
  DataNodes have it as `min.replicas` says (`hdfs_replicas.py`).
* Closing a file takes about half a second, even for a small file, because the NameNode waits for the DataNode's report.
  A segment has two files, so each copy pays this twice.
* The one connection to the NameNode has no deadline, and a call waits for it as long as the kernel keeps it. So the
  library runs in a child process (`child_storage.py`), which is replaced when a call passes its deadline.
* The user comes from Kerberos, or from `$HADOOP_USER_NAME`, which the library reads whenever it connects.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from tiers.errors import CredentialsRefusedError, RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.activity import note_progress
from tiers.storage.child_storage import ChildStorageManager
from tiers.storage.file_system import DEFAULTS, FileSystemRemoteStorageManager
from tiers.storage.hdfs_replicas import ReplicaCount, default_urls
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


class HdfsRemoteStorageManager(ChildStorageManager):
    """The storage manager `hdfs`.

    The required settings are `url` (hdfs://host:port or hdfs://nameservice), `path` (absolute) and `cluster.id`.
    Optional are `config.dir` (the folder of Hadoop's XML files), `kerberos.principal`, `kerberos.keytab`, `replication`
    (by default the cluster's), `min.replicas` (2), `web.url` (the web addresses of the NameNodes, separated by
    commas; by default port 9870 of `url`), `threads` (16), and `timeout.ms` (30 s), the time without
    progress after which a call ends."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(in_this_process, settings)


def in_this_process(settings: Mapping[str, str]) -> FileSystemRemoteStorageManager:
    """Returns the manager that the child process runs, not yet open. Raises `ValueError`."""
    values = settings_of(settings)
    return FileSystemRemoteStorageManager(HdfsFiles(values), values)


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
        minimum = read_number(values, "min.replicas", 1)
        if self._replication is not None and self._replication < minimum:
            raise ValueError(f"`replication` is below `min.replicas`, {minimum}: raise it, or lower `min.replicas`")
        if minimum > 1 and self._principal is not None:
            raise ValueError(
                "`min.replicas` above 1 is counted by WebHDFS, which takes no Kerberos ticket from this process: set it"
                " to 1, and dfs.namenode.replication.min to 2 on the NameNode"
            )
        urls = [url.strip() for url in values["web.url"].split(",") if url.strip()] or default_urls(values["url"])
        if minimum > 1 and not urls:
            raise ValueError("setting 'web.url' of the hdfs storage manager is missing: `url` is a nameservice")
        timeout_ms = read_duration_ms(values, "timeout.ms", 1)
        self._replicas = None if minimum == 1 else ReplicaCount(urls, minimum, timeout_ms / 2000)
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

    def disconnect(self) -> None:
        vars(self).pop("_client", None)

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
        if self._replicas is not None:
            self._replicas.require(self._path(path))

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
        for name, change in _REFUSALS.items():
            if name in text and change is _CREDENTIALS:
                source = "`kerberos.keytab`" if self._keytab else "the Kerberos ticket cache or $HADOOP_USER_NAME"
                return CredentialsRefusedError(f"{self.name}: {text}: {change}; the credentials come from {source}")
            if name in text:
                return RemoteStorageError(f"{self.name}: {text}: {change}")
        return RetriableRemoteStorageError(f"{self.name}: {text}")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"
