"""`ArrowRemoteStorageManager`: a remote tier on any object store that `pyarrow.fs` supports, or on a folder.

These are Google Cloud Storage, Azure Blob Storage and Data Lake, and others that pyarrow opens by URI. A folder
(`file:///PATH`) is stored as `local.py` does, because pyarrow syncs no file.

* A range costs two requests: opening an object asks for its size, which is needed to clamp the range.
* An object also appears when its stream is dropped before its end. So a failed write closes its stream and deletes the
  object, and a replacement is written under another name, and then copied by the store.
* A GCS file holds the interpreter's lock while it begins its download, even for `NativeFile.closed`, and gives up only
  after minutes. So the library runs in a child process (`child_calls.py`).
* S3 and HDFS have their own managers, which are faster and abort the writes that they give up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from tiers.errors import RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.activity import note_progress
from tiers.storage.child_calls import ChildCalls
from tiers.storage.file_system import DEFAULTS, PIECE_BYTES, FileSystemRemoteStorageManager, ThreadCalls, refusal
from tiers.storage.local import LocalFiles
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


class ArrowRemoteStorageManager(FileSystemRemoteStorageManager):
    """The storage manager `arrow`.

    The required settings are `cluster.id` and `uri`: gs://bucket/prefix,
    abfss://container@account.dfs.core.windows.net/prefix, az://container/prefix, or another URI that pyarrow accepts.
    Optional are `endpoint.url`, `anonymous` (false), `threads` (16), and `timeout.ms` (30 s), the time without
    progress after which a call ends. Azure also has `account.name`, `account.key` and `sas.token`. Without a
    key or a token, the credentials come from the environment."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(ChildCalls(in_this_process, settings))


def in_this_process(settings: Mapping[str, str]) -> ThreadCalls:
    """Returns what the child process runs, not yet open. Raises `ValueError`."""
    values = read_settings("arrow", settings, _DEFAULTS)
    uri = urlsplit(values["uri"])
    if uri.scheme != "file":
        return ThreadCalls(ArrowFiles(values), values)
    if uri.netloc or not uri.path:
        raise ValueError("setting 'uri': expected file:///PATH for a folder")
    return ThreadCalls(LocalFiles(Path(unquote(uri.path)), "uri"), values)


class ArrowFiles:
    """The `BlockingFileSystem` on an object store of `pyarrow.fs`. No object store needs folders."""

    shows_on_close = True
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
        self._files: Any
        self._root: str

    def connect(self) -> None:
        self._files, root = self._file_system()
        self._root = root.strip("/")

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
        if files.type_name not in _OBJECT_STORES:
            raise RemoteStorageError(f"{self.name} is no object store: change `uri`")
        return files, root

    def size(self, path: str) -> int | None:
        info = self._files.get_file_info(self._path(path))
        return int(info.size) if info.type == fs.FileType.File else None

    def write(self, path: str, size_bytes: int, pieces: Iterator[bytes]) -> None:
        with self._files.open_output_stream(self._path(path), compression=None) as stream:
            for piece in pieces:
                stream.write(piece)

    def move(self, source: str, target: str, check: Callable[[], None], *, replace: bool) -> None:
        check()
        # Not every object store has a move, but each one copies an object as a whole.
        self._files.copy_file(self._path(source), self._path(target))
        self.delete(source)

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
        with suppress(FileNotFoundError):
            self._files.delete_file(self._path(path))

    def walk(self, prefix: str) -> Iterator[StoredObject]:
        """Yields the objects below the last slash of the prefix."""
        base = self._path(prefix.rpartition("/")[0])
        for info in self._files.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True)):
            if info.type == fs.FileType.File:
                modified_ms = None if info.mtime_ns is None else info.mtime_ns // 1_000_000
                yield StoredObject(info.path.removeprefix(f"{self._root}/"), int(info.size), modified_ms=modified_ms)

    def error_of(self, error: Exception) -> RemoteStorageError:
        text = str(error).partition("\n")[0]
        given = [f"`{key}`" for key in ("account.key", "sas.token") if self._values[key]]
        kind = RetriableRemoteStorageError if isinstance(error, OSError) else RemoteStorageError
        known = refusal(self.name, text, _REFUSALS, _CREDENTIALS, given[0] if given else "this process")
        return known or kind(f"{self.name}: {text}")

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
