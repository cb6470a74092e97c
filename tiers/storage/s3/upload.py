"""Creates objects from files, unless they exist: by one PUT, or a large one by a multipart upload.

A request ends when it moves no piece in the time of its deadline (docs/design.md, "Durability and deadlines"). A part
that fails so is sent again, and fewer parts are in flight from then on.

An upload can also be staged, so that another process completes it. An upload that fails or is cancelled is aborted. An
upload that a crash left can be found by its key, which includes the uuid of the attempt. Payloads are not signed,
because every copy is read back and verified by its checksums. Each body has its CRC-32C, which a bucket with object
lock demands. A server that refuses the header of the checksum gets the request again without it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from protocol.records.record_batch import crc32c
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, StoreOverloadedError
from tiers.storage.activity import PIECE_BYTES, Activity, while_active
from tiers.storage.part_window import PartWindow
from tiers.storage.s3.credentials import S3Credentials
from tiers.storage.s3.errors import PreconditionFailedError, UnsupportedRequestError, error_of_exception

PARTS_AT_ONCE = 3
MAX_PARTS = 10_000
ATTEMPTS_PER_PART = 3
_CHECKSUM: Final = "ChecksumCRC32C"


class StagedUpload(NamedTuple):
    """A multipart upload with all its parts, which can be completed.

    `parts` are the ETags and checksums, by their names in the request that completes the upload."""

    id: str
    parts: tuple[Mapping[str, str], ...]


class _FilePart(NamedTuple):
    """The bytes of an open file that a request sends."""

    descriptor: int
    start: int
    size_bytes: int

    def read(self, position: int, length: int) -> bytes:
        """Raises `RemoteStorageError`."""
        try:
            piece = os.pread(self.descriptor, length, self.start + position)
        except OSError as error:
            raise RemoteStorageError(f"the segment to copy cannot be read: {error.strerror}") from error
        if len(piece) != length:
            end, expected = self.start + position + len(piece), self.start + self.size_bytes
            raise RemoteStorageError(f"the segment to copy ends at {end} instead of {expected}")
        return piece


def parts_of(size_bytes: int, least_bytes: int) -> list[tuple[int, int]]:
    """Returns the starts and sizes of the parts of an object. One of up to twice `least_bytes` is one part.

    All parts have one size of about `least_bytes` or more, and the last one may have less: Cloudflare R2 takes no
    others."""
    count = min(max(1, (size_bytes - 1) // least_bytes), MAX_PARTS)
    part_bytes = max(1, -(-size_bytes // count))
    return [(start, min(part_bytes, size_bytes - start)) for start in range(0, max(1, size_bytes), part_bytes)]


class S3Uploader:
    def __init__(
        self,
        client: Any,
        bucket: str,
        timeout_s: float,
        part_bytes: int,
        window: PartWindow,
        credentials: S3Credentials,
    ) -> None:
        """`timeout_s` is the time without progress after which a request ends. `window` bounds the parts and small
        segments in flight, over all uploads."""
        self._client = client
        self._bucket = bucket
        self._timeout_s = timeout_s
        self._part_bytes = part_bytes
        self._window = window
        self._credentials = credentials

    async def create_from_file(self, key: str, path: Path) -> None:
        """Creates the object. An existing object of the same size is no error.

        Raises `RemoteStorageError` for an existing object of another size: then a uuid was used twice.
        """
        size = await self._put_file(key, path)
        if size is not None:
            await self._check_size(key, size)

    async def create_unless_there(self, key: str, path: Path) -> bool:
        """Creates the object. Returns False when there is an object with that key already, whatever its content.

        Only one of several writers succeeds, if the store passed the race (`race.py`)."""
        return await self._put_file(key, path) is None

    async def stage(self, key: str, path: Path) -> StagedUpload:
        """Uploads all parts. The object is not visible until a process calls `complete`."""
        with path.open("rb", 0) as file:
            return await self.stage_parts(key, self._parts_of(file.fileno(), os.fstat(file.fileno()).st_size))

    async def complete(self, key: str, upload: StagedUpload) -> None:
        """Completes an upload.

        Raises `PreconditionFailedError` when there is an object with that key, and `NoSuchUploadError` when the upload
        is gone.
        """
        await self._complete(key, upload, IfNoneMatch="*")

    async def _complete(self, key: str, upload: StagedUpload, **condition: str) -> None:
        parts = {"Parts": [{"PartNumber": number, **part} for number, part in enumerate(upload.parts, start=1)]}
        await self.call(
            "complete_multipart_upload", key, Key=key, UploadId=upload.id, MultipartUpload=parts, **condition
        )

    async def _put_file(self, key: str, path: Path) -> int | None:
        """Returns None if it created the object, or the file's size if there is an object already."""
        try:
            file = await asyncio.to_thread(path.open, "rb", 0)
        except OSError as error:
            raise RemoteStorageError(f"{path}: the segment to copy cannot be read: {error.strerror}") from error
        try:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            try:
                parts = self._parts_of(descriptor, size)
                await (self._put(key, parts[0]) if len(parts) == 1 else self._put_parts(key, parts))
            except PreconditionFailedError:
                return size
        finally:
            file.close()
        return None

    async def create(self, key: str, data: bytes) -> None:
        try:
            await self._put(key, data)
        except PreconditionFailedError:
            await self._check_size(key, len(data))

    async def read(self, key: str) -> bytes:
        """Reads a small object."""
        return await self._credentials.tried(partial(self._read, key))

    async def _read(self, key: str) -> bytes:
        try:
            async with while_active(self._timeout_s):
                answer = await self._client.get_object(Bucket=self._bucket, Key=key)
                async with answer["Body"] as body:
                    return bytes(await body.read())
        except Exception as error:
            raise error_of_exception(self._bucket, key, error) from error

    async def call(self, operation: str, key: str, **parameters: Any) -> Any:
        """Sends one request. `Body` is bytes or a `_FilePart`.

        Raises `RemoteStorageError` for every error of the client library, and `StoreOverloadedError` when no piece
        moved in the time of the deadline."""
        return await self._credentials.tried(partial(self._call, operation, key, **parameters))

    async def _call(self, operation: str, key: str, **parameters: Any) -> Any:
        body: _Body | None = None
        try:
            async with while_active(self._timeout_s) as activity:
                if "Body" in parameters:
                    body = parameters["Body"] = _Body(parameters["Body"], activity)
                return await getattr(self._client, operation)(Bucket=self._bucket, **parameters)
        except Exception as error:
            if body is not None and body.trouble is not None:
                raise body.trouble from error
            raise error_of_exception(self._bucket, key, error) from error
        finally:
            if body is not None:
                body.close()

    async def _put(self, key: str, data: bytes | _FilePart) -> None:
        await self._send(lambda: self._create(key, partial(self.put, key, data)))

    async def put(self, key: str, data: bytes | _FilePart, **condition: str) -> Any:
        """Sends a PUT of a whole object. Returns the answer."""
        try:
            return await self.call("put_object", key, Key=key, Body=data, **await _checksum(data), **condition)
        except UnsupportedRequestError:
            return await self.call("put_object", key, Key=key, Body=data, **condition)

    async def _create(self, key: str, write: Callable[..., Awaitable[Any]]) -> None:
        """Sends a request that creates an object. Raises `PreconditionFailedError` when there is one."""
        try:
            await write(IfNoneMatch="*")
        except UnsupportedRequestError:
            # The server does not know the condition. All writers of a key are of one attempt and write the same bytes,
            # so a look before the write suffices.
            try:
                await self.call("head_object", key, Key=key)
            except RemoteResourceNotFoundError:
                await write()
            else:
                raise PreconditionFailedError(f"s3://{self._bucket}/{key} exists") from None

    async def _send(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Sends one part or one small object, within the window. Repeats it if the store is overloaded."""
        for attempt in range(ATTEMPTS_PER_PART):
            try:
                async with self._window.part():
                    return await send()
            except StoreOverloadedError:
                if attempt == ATTEMPTS_PER_PART - 1:
                    raise
        raise AssertionError("unreachable")

    async def _put_parts(self, key: str, parts: Sequence[_FilePart]) -> None:
        upload = await self.stage_parts(key, parts)
        try:
            await self._create(key, partial(self._complete, key, upload))
        except BaseException:
            await self._abort(key, upload.id)
            raise

    def _parts_of(self, descriptor: int, size: int) -> list[_FilePart]:
        return [_FilePart(descriptor, start, size_bytes) for start, size_bytes in parts_of(size, self._part_bytes)]

    async def stage_parts(self, key: str, parts: Sequence[bytes | _FilePart]) -> StagedUpload:
        """Uploads the parts. The object is not visible until a process calls `complete`."""
        has_checksums = True
        try:
            created = await self.call("create_multipart_upload", key, Key=key, ChecksumAlgorithm="CRC32C")
        except UnsupportedRequestError:
            has_checksums = False
            created = await self.call("create_multipart_upload", key, Key=key)
        upload = {"Key": key, "UploadId": created["UploadId"]}
        free = asyncio.Semaphore(PARTS_AT_ONCE)

        async def put_part(number: int, part: bytes | _FilePart) -> dict[str, str]:
            async with free:
                sums = await _checksum(part) if has_checksums else {}
                answer = await self._send(
                    lambda: self.call("upload_part", key, **upload, PartNumber=number, Body=part, **sums)
                )
                return {"ETag": str(answer["ETag"]), **sums}

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(put_part(number, part)) for number, part in enumerate(parts, start=1)]
        except BaseException as error:
            await self._abort(key, created["UploadId"])
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from error
            raise
        return StagedUpload(created["UploadId"], tuple(task.result() for task in tasks))

    async def _abort(self, key: str, upload_id: str) -> None:
        # If the abort fails, the delete of this attempt finds the upload.
        with contextlib.suppress(RemoteStorageError):
            await self.call("abort_multipart_upload", key, Key=key, UploadId=upload_id)

    async def _check_size(self, key: str, size: int) -> None:
        found = (await self.call("head_object", key, Key=key))["ContentLength"]
        if found != size:
            raise RemoteStorageError(
                f"s3://{self._bucket}/{key} exists with {found} bytes, not {size}: a uuid was used twice"
            )


async def _checksum(data: bytes | _FilePart) -> dict[str, str]:
    """Returns the parameter that has the checksum of a body."""

    def checksum() -> int:
        if not isinstance(data, _FilePart):
            return crc32c(data, 0, len(data))
        crc = 0
        for position in range(0, data.size_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, data.size_bytes - position)
            crc = crc32c(data.read(position, length), 0, length, crc)
        return crc

    return {_CHECKSUM: base64.b64encode((await asyncio.to_thread(checksum)).to_bytes(4, "big")).decode()}


class _Body(io.RawIOBase):
    """The body of a request. In a thread, the HTTP client reads the next piece when the connection has taken the last.

    A part of a file is never in memory as a whole: fresh memory for it would cost as much CPU time as sending it."""

    def __init__(self, data: bytes | _FilePart, activity: Activity) -> None:
        self.trouble: RemoteStorageError | None = None
        """Why the file cannot be read. The HTTP client only tells that it could not send the body."""
        self._data = data
        self._size = data.size_bytes if isinstance(data, _FilePart) else len(data)
        self._activity = activity
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Returns at least `size` bytes, if there are as many: the client asks for less than a good piece."""
        rest = self._size - self._position
        length = rest if size is None or size < 0 else min(rest, max(size, PIECE_BYTES))
        piece = self._piece(length)
        self._position += length
        if self._position < self._size:
            self._activity.moved_elsewhere()
        else:
            self._activity.handed_over_elsewhere()
        return piece

    def _piece(self, length: int) -> bytes:
        if self.closed:  # the request has ended, and its file may be closed
            raise ValueError("the request has ended")
        if not isinstance(self._data, _FilePart):
            return self._data[self._position : self._position + length]
        try:
            return self._data.read(self._position, length)
        except RemoteStorageError as error:
            self.trouble = error
            raise
