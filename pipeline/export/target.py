"""`ExportTarget`: where an export writes: a folder, an S3 bucket or HDFS. A file appears whole, and only once.

`create` and `publish` never replace a file: if two writers use one name, one succeeds and the other is told. So a task
that was started twice, or one that outlives its driver, changes nothing. A file that a task has staged is not visible
before the driver publishes it: it is a hidden file that is moved, or an S3 upload that is completed. All calls block,
as Spark's tasks do.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from pipeline.config import PipelineConfig
from pipeline.worker import worker
from tiers.durable_folders import create_folder
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError
from tiers.storage.file_system import PIECE_BYTES, TEMPORARY, BlockingFileSystem
from tiers.storage.local import LocalFiles
from tiers.storage.remote_storage_manager import UnfinishedUpload
from tiers.storage.s3.storage import S3RemoteStorageManager
from tiers.storage.s3.upload import StagedUpload
from tiers.upkeep.runner import JobError

_S3_SETTINGS = ("endpoint.url", "region", "access.key.id", "secret.access.key", "path.style", "timeout.ms", "part.size")
_HDFS_SETTINGS = (
    "config.dir",
    "kerberos.principal",
    "kerberos.keytab",
    "replication",
    "min.replicas",
    "web.url",
    "timeout.ms",
)
_FOLDER = "file://"
FORMS = "a folder, s3://BUCKET/PREFIX or hdfs://HOST:PORT/PATH"


class TargetError(JobError):
    """The target is wrong. The message is one line for the user."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A complete file that is not visible under its name yet. `parts` are S3's, and only the task that staged the file
    knows them."""

    name: str
    id: str
    parts: tuple[Mapping[str, str], ...] = ()


class ExportTarget(Protocol):
    """A place for files. Names are relative to the target's folder."""

    def names(self, prefix: str) -> list[str]:
        """Returns the names of all complete files below `prefix`, which ends with a slash."""

    def read(self, name: str) -> bytes:
        """Returns the content of a file. Raises `FileNotFoundError`."""

    def create(self, name: str, source: Path) -> bool:
        """Creates a file from `source`. Returns False, and changes nothing, if a file of that name exists."""

    def stage(self, name: str, source: Path) -> StagedFile: ...

    def publish(self, staged: StagedFile) -> bool:
        """Makes a staged file visible. Returns False if a file of that name exists, which stays unchanged, or if the
        staged file is gone."""

    def discard(self, staged: StagedFile) -> None:
        """Deletes a staged file. A file that is already gone is no error."""

    def staged(self, prefix: str) -> list[StagedFile]:
        """Returns the staged files below `prefix`, which ends with a slash, of all writers."""

    def uri(self, name: str) -> str:
        """Returns the URI by which other programs find the file."""

    def require_atomic_creation(self) -> None:
        """Raises `TargetError` if several writers could create one file."""


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """`url` is file:///..., s3://bucket/prefix or hdfs://host:port/path. The keys of `settings` are those of the tier's
    stores."""

    url: str
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme


def target_settings(to: str, config: PipelineConfig, given: Mapping[str, str]) -> TargetSettings:
    """Parses `to`; a path without a scheme is a folder. A target of the same kind as the tier's store takes the
    settings of that store, and `given` overrides them. Raises `TargetError`."""
    url = urlsplit(to)
    if url.scheme in ("", "file"):
        if given:
            raise TargetError(f"a folder has no settings: {', '.join(given)}")
        if not url.scheme and "//" in to:
            raise TargetError(f"{to}: expected {FORMS}")
        # Iceberg's readers take the path of a file as it stands, so its URI is not quoted.
        return TargetSettings(f"{_FOLDER}{Path(unquote(url.path) if url.scheme else to).resolve()}")
    known = {"s3": _S3_SETTINGS, "s3a": _S3_SETTINGS, "hdfs": _HDFS_SETTINGS}.get(url.scheme)
    if known is None or not url.netloc:
        raise TargetError(f"{to}: expected {FORMS}")
    if wrong := given.keys() - set(known):
        raise TargetError(
            f"unknown setting of {url.scheme}: {', '.join(sorted(wrong))}; the settings are {', '.join(known)}"
        )
    settings: dict[str, str] = {}
    if config.storage is not None and config.storage.implementation == url.scheme.removesuffix("a"):
        settings = {key: value for key, value in config.storage.plain_settings().items() if key in known}
    return TargetSettings(to.replace("s3a://", "s3://", 1), {**settings, **given})


_open: dict[str, ExportTarget] = {}


def open_target(target: TargetSettings) -> ExportTarget:
    """Returns this process's target. A folder has no connection, and may be another one now.

    Raises `TargetError`, `RemoteStorageError`."""
    if target.scheme == "file":
        return _folder(target.url)
    key = f"{os.getpid()} {target.url} {sorted(target.settings.items())}"
    if key not in _open:
        _open[key] = _made(target)
    return _open[key]


def _made(target: TargetSettings) -> ExportTarget:
    url = urlsplit(target.url)
    try:
        if url.scheme == "s3":
            settings = {**target.settings, "bucket": url.netloc, "prefix": url.path, "cluster.id": "export"}
            return S3Target(target.url, settings)
        return _hdfs(target)
    except (ValueError, ImportError) as error:
        raise TargetError(f"{target.url}: {error}") from error


def _folder(url: str) -> ExportTarget:
    """Returns the target on a file system that all executors share."""
    root = Path(url.removeprefix(_FOLDER))
    files = LocalFiles(root)
    try:
        create_folder(root)
        files.connect()
    except OSError as error:
        raise TargetError(f"{root}: {error.strerror}: change the folder or its permissions") from error
    return FilesTarget(url, files)


def _hdfs(target: TargetSettings) -> ExportTarget:
    from tiers.storage import hdfs  # its library is an optional dependency

    url = urlsplit(target.url)
    where = {"url": f"hdfs://{url.netloc}", "path": url.path or "/", "cluster.id": "export"}
    files = hdfs.HdfsFiles(hdfs.settings_of({**target.settings, **where}))
    files.connect()
    return FilesTarget(target.url, files)


class S3Target:
    def __init__(self, url: str, settings: Mapping[str, str]) -> None:
        """`settings` are those of the S3 store. Raises `ValueError`, `RemoteStorageError`."""
        self._url = url.rstrip("/")
        self._storage = S3RemoteStorageManager(settings)
        worker().run(worker().keep(self._storage))

    def names(self, prefix: str) -> list[str]:
        async def listed() -> list[str]:
            return [stored.key async for stored in self._storage.list_objects(prefix)]

        return worker().run(listed())

    def read(self, name: str) -> bytes:
        try:
            return worker().run(self._storage.get_object(name))
        except RemoteResourceNotFoundError as error:
            raise FileNotFoundError(self.uri(name)) from error

    def create(self, name: str, source: Path) -> bool:
        return worker().run(self._storage.create_object(name, source))

    def stage(self, name: str, source: Path) -> StagedFile:
        upload = worker().run(self._storage.stage_object(name, source))
        return StagedFile(name, upload.id, upload.parts)

    def publish(self, staged: StagedFile) -> bool:
        return worker().run(self._storage.publish_object(staged.name, StagedUpload(staged.id, staged.parts)))

    def discard(self, staged: StagedFile) -> None:
        worker().run(self._storage.abort_upload(UnfinishedUpload(staged.name, staged.id, None)))

    def staged(self, prefix: str) -> list[StagedFile]:
        async def listed() -> list[StagedFile]:
            uploads = self._storage.list_uploads()
            return [StagedFile(upload.key, upload.id) async for upload in uploads if upload.key.startswith(prefix)]

        return worker().run(listed())

    def uri(self, name: str) -> str:
        return f"{self._url}/{name}"

    def require_atomic_creation(self) -> None:
        if fault := worker().run(self._storage.race_fault()):
            raise TargetError(
                f"{self._url}: this server lets several writers create one object ({fault}), so an export"
                " cannot write each record exactly once: update the server to one that honours If-None-Match, or"
                " export to a folder or to HDFS"
            )


class FilesTarget:
    """A file system on which a file is written under another name and then moved."""

    def __init__(self, url: str, files: BlockingFileSystem) -> None:
        """`files` must be connected, and is the file system at `url`."""
        self._url = url.rstrip("/")
        self._files = files

    def names(self, prefix: str) -> list[str]:
        try:
            with self._errors():
                return sorted(stored.key for stored in self._files.walk(prefix) if stored.key.startswith(prefix))
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes:
        with self._errors():
            return bytes(self._files.read(name, 0, None))

    def create(self, name: str, source: Path) -> bool:
        return not self._is_there(name) and self.publish(self.stage(name, source))

    def stage(self, name: str, source: Path) -> StagedFile:
        staged = StagedFile(name, str(uuid.uuid4()))
        with self._errors():
            self._files.write(_hidden_name(staged), source.stat().st_size, _pieces(source))
        return staged

    def publish(self, staged: StagedFile) -> bool:
        hidden = _hidden_name(staged)
        with self._errors():
            try:
                self._files.move(hidden, staged.name, lambda: None, replace=False)
            except FileExistsError:
                self._files.delete(hidden)
                return False
            except FileNotFoundError:
                return False
        return True

    def discard(self, staged: StagedFile) -> None:
        with self._errors():
            self._files.delete(_hidden_name(staged))

    def staged(self, prefix: str) -> list[StagedFile]:
        hidden = f"{TEMPORARY}/"
        return [_staged_file(name.removeprefix(hidden)) for name in self.names(hidden + prefix)]

    def _is_there(self, name: str) -> bool:
        with self._errors():
            return self._files.size(name) is not None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, RemoteStorageError):
            raise
        except Exception as error:
            raise self._files.error_of(error) from error

    def uri(self, name: str) -> str:
        return f"{self._url}/{name}"

    def require_atomic_creation(self) -> None:
        if not self._files.moves_once:
            raise TargetError(f"{self._files.name}: this file system lets several writers create one file")


def _hidden_name(staged: StagedFile) -> str:
    return f"{TEMPORARY}/{staged.name}.{staged.id}"


def _staged_file(name: str) -> StagedFile:
    of, _, staged_id = name.rpartition(".")
    return StagedFile(of, staged_id)


def _pieces(source: Path) -> Iterator[bytes]:
    with source.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece
