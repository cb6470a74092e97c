"""`S3RemoteStorageManager`: a bucket of S3, or of an S3-compatible store, as the remote tier.

A test counts the requests per operation. The copy of a segment takes 2 PUTs; that of a segment above twice the part
size takes 1 PUT and a multipart upload. A range takes 1 GET, and the indexes take 1 GET. The delete of a copied segment
takes 1 HEAD and 2 DELETEs. None of these lists. Only the delete of an unfinished attempt does, because a listing is the
only way to find its multipart uploads. The delete of many segments lists the uploads of each partition once, and
deletes 1000 objects by a request.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError
from botocore.handlers import add_expect_header
from botocore.httpsession import get_cert_path

from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.object_key import check_cluster_id, indexes_key, log_key
from tiers.storage.remote_storage_manager import (
    Allocate,
    LogSegmentData,
    StoredObject,
    UnfinishedUpload,
    check_range,
)
from tiers.storage.s3.buffers import ReusedBuffers
from tiers.storage.s3.credentials import S3Credentials
from tiers.storage.s3.download import S3Downloader
from tiers.storage.s3.errors import NoSuchUploadError, PreconditionFailedError
from tiers.storage.s3.race import race_fault
from tiers.storage.s3.upload import Part, PartWindow, S3Uploader, StagedUpload
from tiers.storage.settings import read_duration_ms, read_flag, read_number, read_settings, read_size_bytes

_MINIMUM_PART_BYTES = 5 * 1024 * 1024
"""S3's minimum; only the last part may be smaller."""
_UPLOAD_MARKS = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
_DEFAULTS = {
    "bucket": None,
    "cluster.id": None,
    "prefix": "",
    "endpoint.url": "",
    "region": "",
    "access.key.id": "",
    "secret.access.key": "",
    "path.style": "false",
    "part.size": "128MiB",
    "timeout.ms": "30s",
    "max.concurrency": "64",
}


_NOT_SENT_OPTION = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_NOT_SENT_BYTES = 512 << 10


def _socket_that_shows_progress(address: tuple[Any, ...]) -> socket.socket:
    """Returns a socket that takes bytes as fast as they leave. Otherwise the kernel takes a whole part at once."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    with suppress(OSError):  # an aid, which not every kernel has
        made.setsockopt(socket.IPPROTO_TCP, _NOT_SENT_OPTION, _NOT_SENT_BYTES)
    return made


def _context_of_client(ca_bundle: str | None) -> ssl.SSLContext:
    """Returns a context that trusts the authorities of the client library. `ca_bundle` is its setting for a file.

    Otherwise a store whose authority AWS_CA_BUNDLE names would take every copy, and no copy could be read."""
    return ssl.create_default_context(cafile=get_cert_path(ca_bundle or True))


def _ask_no_cache(params: dict[str, Any], **_: Any) -> None:
    """Lets no HTTP proxy answer a read: its copy may be of an object that the store has lost."""
    params["headers"]["Cache-Control"] = "no-cache"


class S3RemoteStorageManager:
    """The storage manager `s3`.

    The required settings are `bucket` and `cluster.id`. Optional are `prefix`, `endpoint.url`, `region`,
    `access.key.id` and `secret.access.key` (without them the SDK's credential chain applies), `path.style` (false),
    `part.size` (128 MiB), the least size of a part, `timeout.ms` (30 s), the time without progress after which a
    request ends, and `max.concurrency` (64), the number of connections for reads and also the number for all other
    requests.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        values = read_settings("s3", settings, _DEFAULTS)
        if bool(values["access.key.id"]) != bool(values["secret.access.key"]):
            raise ValueError("`access.key.id` and `secret.access.key` belong together: set both or neither")
        self._bucket = values["bucket"]
        self._cluster_id = check_cluster_id(values["cluster.id"])
        prefix = values["prefix"].strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_bytes = read_size_bytes(values, "part.size", _MINIMUM_PART_BYTES)
        self._timeout_s = read_duration_ms(values, "timeout.ms", 1) / 1000
        self._max_connections = read_number(values, "max.concurrency", 1)
        self._credentials = S3Credentials(partial(read_settings, "s3", settings, _DEFAULTS), self._timeout_s)
        self._deletions = asyncio.Semaphore(max(1, self._max_connections // 4))
        """Copies get half of the connections, deletions a quarter. So requests that hang leave some to the others."""
        self._allocate: Allocate = ReusedBuffers().allocate
        config = AioConfig(
            signature_version="s3v4",
            max_pool_connections=self._max_connections,
            connect_timeout=self._timeout_s,
            # The deadlines of the requests follow the progress of a body. This one would not.
            read_timeout=None,
            connector_args={"socket_factory": _socket_that_shows_progress},
            retries={"mode": "standard", "total_max_attempts": 2},
            # The uploader gives the checksums, which is cheaper. Signatures of payloads are off, because they cost more
            # CPU than all other work. Every copy is read back and verified by the checksums in the segment's indexes.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={
                "addressing_style": "path" if read_flag(values, "path.style") else "auto",
                "payload_signing_enabled": False,
            },
        )
        where = {"region_name": values["region"] or None, "endpoint_url": values["endpoint.url"] or None}
        self._client_arguments = {**where, "config": config}
        self._resources = AsyncExitStack()
        self._up: S3Uploader
        self._down: S3Downloader

    async def open(self) -> None:
        try:
            session = get_session()
            session.register_component("credential_provider", self._credentials)
            client = await self._resources.enter_async_context(session.create_client("s3", **self._client_arguments))
        except (BotoCoreError, ValueError) as error:
            raise RemoteStorageError(f"S3 client: {error}: change `endpoint.url` or `region`") from error
        # The client library would wait for `100 Continue` before each body that is no bytes object: a round trip more.
        client.meta.events.unregister("before-call.s3", add_expect_header)
        client.meta.events.register("before-call.s3.GetObject", _ask_no_cache)
        window = PartWindow(max(1, self._max_connections // 2))
        self._up = S3Uploader(client, self._bucket, self._timeout_s, self._part_bytes, window, self._credentials)
        tls = partial(_context_of_client, session.get_config_variable("ca_bundle"))
        self._down = S3Downloader(client, self._bucket, self._timeout_s, self._max_connections, tls)
        self._resources.push_async_callback(self._down.close)

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        await self._up.ensure(self._log_key(metadata), data.log_segment)
        await self._up.ensure(self._indexes_key(metadata), data.indexes)
        return None

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        check_range(start_position, end_position)
        return await self._get(self._log_key(metadata), start_position, end_position, self._allocate)

    def use_memory(self, allocate: Allocate) -> None:
        self._allocate = allocate

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        return bytes(await self._get(self._indexes_key(metadata)))

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        log, indexes = self._log_key(metadata), self._indexes_key(metadata)
        async with self._deletions:
            try:
                await self._up.call("head_object", Key=indexes)
            except RemoteResourceNotFoundError:
                # The indexes are written last. Without them, a multipart upload of the log may be unfinished.
                await self._abort_uploads(log)
            await self._up.call("delete_object", Key=indexes)
            await self._up.call("delete_object", Key=log)
        return True

    async def race_fault(self) -> str:
        """Lets writers race (`race.py`), by about 170 requests. Returns what was wrong; empty if one won each race."""
        return await race_fault(self._up, self._get, self._prefix)

    async def put_object(self, key: str, data: bytes) -> None:
        await self._up.put(self._prefix + key, Part.of(data))

    async def create_object(self, key: str, source: Path) -> bool:
        """Creates an object from a file. Returns False when there is an object already, which stays as it is."""
        return await self._up.create(self._prefix + key, source)

    async def stage_object(self, key: str, source: Path) -> StagedUpload:
        """Uploads a file. The object is not visible before `publish_object`."""
        return await self._up.stage(self._prefix + key, source)

    async def publish_object(self, key: str, staged: StagedUpload) -> bool:
        """Makes a staged object visible.

        Returns False when there is an object with that key already, which stays as it is, or when the staged upload is
        gone.
        """
        try:
            await self._up.complete(self._prefix + key, staged, IfNoneMatch="*")
        except PreconditionFailedError:
            await self._up.abort(self._prefix + key, staged.id)
            return False
        except NoSuchUploadError:
            return False
        return True

    async def get_object(self, key: str) -> bytes:
        return bytes(await self._get(self._prefix + key))

    async def delete_object(self, key: str) -> None:
        await self._up.call("delete_object", Key=self._prefix + key)

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        marks = {"ContinuationToken": "NextContinuationToken"}
        async for page in self._pages("list_objects_v2", self._prefix + prefix, marks):
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                yield StoredObject(key, item["Size"], modified_ms=_milliseconds(item.get("LastModified")))

    async def list_uploads(self) -> AsyncIterator[UnfinishedUpload]:
        async for page in self._pages("list_multipart_uploads", self._prefix, _UPLOAD_MARKS):
            for item in page.get("Uploads", ()):
                key = item["Key"].removeprefix(self._prefix)
                yield UnfinishedUpload(key, item["UploadId"], _milliseconds(item.get("Initiated")))

    async def _pages(self, operation: str, prefix: str, marks: Mapping[str, str]) -> AsyncIterator[Any]:
        """Yields the pages of a listing. `marks` are the parameters of the next page, with their names in an answer."""
        parameters = {"Prefix": prefix}
        while True:
            page = await self._up.call(operation, **parameters)
            yield page
            if not page.get("IsTruncated"):
                return
            parameters |= {parameter: page[name] for parameter, name in marks.items()}

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        await self._up.abort(self._prefix + upload.key, upload.id)

    async def close(self) -> None:
        await self._resources.aclose()

    async def _get(self, key: str, *rest: Any) -> memoryview:
        return await self._credentials.tried(lambda: self._down.get(key, *rest))

    async def _abort_uploads(self, key: str) -> None:
        """Aborts the uploads of `key`. One page suffices: an attempt has one upload, or a few after retries."""
        page = await self._up.call("list_multipart_uploads", Prefix=key)
        for upload in page.get("Uploads", ()):
            if upload["Key"] == key:
                await self._up.abort(key, upload["UploadId"])

    def _log_key(self, metadata: RemoteLogSegmentMetadata) -> str:
        return self._prefix + log_key(self._cluster_id, metadata)

    def _indexes_key(self, metadata: RemoteLogSegmentMetadata) -> str:
        return self._prefix + indexes_key(self._cluster_id, metadata)


def _milliseconds(time: datetime | None) -> int | None:
    return None if time is None else int(time.timestamp() * 1000)
