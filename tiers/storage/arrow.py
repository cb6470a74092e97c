"""`ArrowRemoteStorageManager`: a remote tier on any store that `pyarrow.fs` supports.

These are Google Cloud Storage, Azure Blob Storage and Data Lake, and the other file systems that pyarrow opens by URI.

* A range costs two requests: opening an object asks for its size, which is needed to clamp the range.
* An object also appears when its stream is dropped before its end. So a failed write closes its stream and deletes the
  object, and a replacement is written under another name, and then copied by the store.
* A GCS file holds the interpreter's lock while it begins its download, even for `NativeFile.closed`, and gives up only
  after minutes. So the library runs in a child process (`child_storage.py`).
* S3 and HDFS have their own managers, which are faster and abort the writes that they give up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tiers.errors import CredentialsRefusedError, RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.activity import note_progress
from tiers.storage.child_storage import ChildStorageManager
from tiers.storage.file_system import DEFAULTS, PIECE_BYTES, FileSystemRemoteStorageManager
from tiers.storage.remote_storage_manager import StoredObject
from tiers.storage.settings import read_duration_ms, read_flag, read_settings

try:
    from pyarrow import fs
except ImportError as error:
    raise ImportError("pyarrow is missing: run `pip install '.[arrow]'` in the clone of Tidegate") from error

_DEFAULTS: Mapping[str, str | None] = {
    **DEFAULTS,
    "uri": None,
    "endpoint.url": "",
    "anonymous": "false",
    "account.name": "",
    "account.key": "",
    "sas.token": "",
}
_GCS = ("gs", "gcs")
_AZURE = ("az", "abfs", "abfss")
_OBJECT_STORES = ("gcs", "abfs", "s3")
_CREDENTIALS = "renew or change the credentials, or their rights on `uri`"
_REFUSALS = {
    "AuthorizationFailure": _CREDENTIALS,
    "AuthorizationPermissionMismatch": _CREDENTIALS,
    "AuthenticationFailed": _CREDENTIALS,
    "PERMISSION_DENIED": _CREDENTIALS,
    "UNAUTHENTICATED": _CREDENTIALS,
    "ACCESS_DENIED": _CREDENTIALS,
    "INVALID_ACCESS_KEY_ID": _CREDENTIALS,
    "SIGNATURE_DOES_NOT_MATCH": _CREDENTIALS,
    "Permission denied": _CREDENTIALS,
    "ContainerNotFound": "the container does not exist: create it or change `uri`",
    "NO_SUCH_BUCKET": "the bucket does not exist: create it or change `uri`",
}


class ArrowRemoteStorageManager(ChildStorageManager):
    """The storage manager `arrow`.

    The required settings are `cluster.id` and `uri`: gs://bucket/prefix,
    abfss://container@account.dfs.core.windows.net/prefix, az://container/prefix, or another URI that pyarrow accepts.
    Optional are `endpoint.url`, `anonymous` (false), `threads` (16), and `timeout.ms` (30 s), the time without
    progress after which a call ends. Azure also has `account.name`, `account.key` and `sas.token`. Without a
    key or a token, the credentials come from the environment."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(in_this_process, settings)


def in_this_process(settings: Mapping[str, str]) -> FileSystemRemoteStorageManager:
    """Returns the manager that the child process runs, not yet open. Raises `ValueError`."""
    values = read_settings("arrow", settings, _DEFAULTS)
    return FileSystemRemoteStorageManager(ArrowFiles(values), values)


class ArrowFiles:
    """The `BlockingFileSystem` on `pyarrow.fs`."""

    moves_once = False

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self._timeout_ms = read_duration_ms(values, "timeout.ms", 1)
        uri = urlsplit(values["uri"])
        if not uri.scheme or uri.scheme in ("hdfs", "viewfs"):
            raise ValueError("setting 'uri': expected a URI such as gs://bucket/prefix; use `hdfs` for HDFS")
        if uri.scheme in _AZURE:
            _azure_account(uri, values)
        self._uri = uri
        self.name = f"{uri.scheme}://{uri.netloc.rpartition('@')[2]}{uri.path}"
        self.shows_on_close = uri.scheme in (*_GCS, *_AZURE, "s3")
        self._files: Any
        self._root: str

    def connect(self) -> None:
        self._files, root = self._file_system()
        self._root = root.strip("/") if self._files.type_name in _OBJECT_STORES else root.rstrip("/")
        self.shows_on_close = self._files.type_name in _OBJECT_STORES
        if not self.shows_on_close and self.size_or_folder("") is None:
            # The folder is not created, because a file system that is not mounted must not look like an empty store.
            raise RemoteStorageError(f"{self.name} does not exist: create it, or change `uri`")

    def disconnect(self) -> None:
        vars(self).pop("_files", None)

    def _file_system(self) -> tuple[Any, str]:
        endpoint = urlsplit(self._values["endpoint.url"])
        if self._uri.scheme in _GCS:
            return (
                fs.GcsFileSystem(
                    anonymous=read_flag(self._values, "anonymous"),
                    endpoint_override=endpoint.netloc or None,
                    scheme=endpoint.scheme or "https",
                    retry_time_limit=timedelta(milliseconds=self._timeout_ms),
                ),
                f"{self._uri.netloc}{self._uri.path}",
            )
        if self._uri.scheme in _AZURE:
            container, account = _azure_account(self._uri, self._values)
            return (
                fs.AzureFileSystem(
                    account,
                    account_key=self._values["account.key"] or None,
                    sas_token=self._values["sas.token"] or None,
                    blob_storage_authority=endpoint.netloc or None,
                    dfs_storage_authority=endpoint.netloc or None,
                    blob_storage_scheme=endpoint.scheme or None,
                    dfs_storage_scheme=endpoint.scheme or None,
                ),
                f"{container}{self._uri.path}",
            )
        try:
            files, root = fs.FileSystem.from_uri(self._values["uri"])
        except (ValueError, TypeError, NotImplementedError) as error:
            # The message omits pyarrow's own one, which quotes the URI and may so show a secret.
            raise RemoteStorageError(f"{self.name}: pyarrow does not support this URI: change `uri`") from error
        return files, root

    def size_or_folder(self, path: str) -> int | None:
        """Returns the size of a file, 0 for a folder, and None when there is neither."""
        info = self._files.get_file_info(self._path(path))
        return None if info.type == fs.FileType.NotFound else int(info.size or 0)

    def size(self, path: str) -> int | None:
        info = self._files.get_file_info(self._path(path))
        return int(info.size) if info.type == fs.FileType.File else None

    def write(self, path: str, size_bytes: int, pieces: Iterator[bytes]) -> None:
        if not self.shows_on_close:
            self._make_parent(path)
        with self._files.open_output_stream(self._path(path), compression=None) as stream:
            for piece in pieces:
                stream.write(piece)

    def move(self, source: str, target: str, check: Callable[[], None], *, replace: bool) -> None:
        check()
        if self.shows_on_close:
            # Not every object store has a move, but each one copies an object as a whole.
            self._files.copy_file(self._path(source), self._path(target))
            self.delete(source)
            return
        if not replace and self.size(target) is not None:
            raise FileExistsError(target)
        self._make_parent(target)
        self._files.move(self._path(source), self._path(target))

    def read(self, path: str, start: int, end: int | None) -> memoryview:
        with self._files.open_input_file(self._path(path)) as file:
            size = int(file.size())
            length = max(0, (size if end is None else min(end + 1, size)) - start)
            buffer = bytearray(length)
            view = memoryview(buffer)
            position = 0
            if length:
                file.seek(start)
            while position < length:
                count = file.readinto(view[position : position + PIECE_BYTES])
                if not count:
                    raise RetriableRemoteStorageError(f"{self.name}/{path}: only {position} of {length} bytes arrived")
                position += count
                note_progress()
            return view

    def delete(self, path: str) -> None:
        try:
            self._files.delete_file(self._path(path))
        except FileNotFoundError:
            return

    def walk(self, prefix: str) -> Iterator[StoredObject]:
        """Yields the files. Does not enter folders that cannot hold the prefix.

        Object stores need not have folders, so they are listed recursively.
        """
        folder, _, begin = prefix.rpartition("/")
        base = self._path(folder) if folder else self._root
        is_whole = not begin or self.shows_on_close
        for info in self._infos(base, recursive=is_whole):
            if info.type == fs.FileType.File:
                yield self._stored(info)
            elif not is_whole and info.base_name.startswith(begin):
                yield from (self._stored(each) for each in self._infos(info.path) if each.type == fs.FileType.File)

    def _infos(self, folder: str, *, recursive: bool = True) -> Sequence[fs.FileInfo]:
        found: Sequence[fs.FileInfo] = self._files.get_file_info(
            fs.FileSelector(folder, allow_not_found=True, recursive=recursive)
        )
        return found

    def _stored(self, info: fs.FileInfo) -> StoredObject:
        modified_ms = None if info.mtime_ns is None else info.mtime_ns // 1_000_000
        return StoredObject(info.path.removeprefix(f"{self._root}/"), int(info.size), modified_ms=modified_ms)

    def error_of(self, error: Exception) -> RemoteStorageError:
        text = str(error).partition("\n")[0]
        for name, change in _REFUSALS.items():
            if name in text and change is _CREDENTIALS:
                given = [f"`{key}`" for key in ("account.key", "sas.token") if self._values[key]]
                source = given[0] if given else "this process"
                return CredentialsRefusedError(f"{self.name}: {text}: {change}; the credentials come from {source}")
            if name in text:
                return RemoteStorageError(f"{self.name}: {text}: {change}")
        if isinstance(error, OSError):
            return RetriableRemoteStorageError(f"{self.name}: {text}")
        return RemoteStorageError(f"{self.name}: {text}")

    def _make_parent(self, path: str) -> None:
        parent = self._path(path).rpartition("/")[0]
        self._files.create_dir(parent, recursive=True)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def _azure_account(uri: SplitResult, values: Mapping[str, str]) -> tuple[str, str]:
    """Returns the container and the account, which the URI or the settings name. Raises `ValueError`."""
    container, _, host = uri.netloc.rpartition("@")
    if not container:
        container, host = host, ""
    account = values["account.name"] or host.partition(".")[0]
    if not account:
        raise ValueError("setting 'account.name' of the arrow storage manager is missing")
    if values["account.key"] and values["sas.token"]:
        raise ValueError("`account.key` and `sas.token` exclude each other: remove one")
    if values["endpoint.url"].startswith("http:") and not (values["account.key"] or values["sas.token"]):
        # Azure's library ends the process instead of sending a bearer token without TLS.
        raise ValueError("`endpoint.url` without TLS needs `account.key` or `sas.token`")
    return container, account
