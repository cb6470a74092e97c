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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from protocol.records.record_batch import crc32c
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, StoreOverloadedError
from tiers.storage.activity import PIECE_BYTES, Activity, while_active
from tiers.storage.s3.credentials import S3Credentials
from tiers.storage.s3.errors import (
    NoSuchUploadError,
    PreconditionFailedError,
    UnsupportedRequestError,
    error_of_exception,
)

PARTS_AT_ONCE = 3
MAX_PARTS = 10_000
ATTEMPTS_PER_PART = 3
_CHECKSUM: Final = "ChecksumCRC32C"


class StagedUpload(NamedTuple):
    """A multipart upload with all its parts, which can be completed.

    `parts` are the ETags and checksums, by their names in the request that completes the upload."""

    id: str
    parts: tuple[Mapping[str, str], ...]


class Part(NamedTuple):
    """The bytes that a request sends. `read` takes a position and a length, and raises `RemoteStorageError`."""

    size_bytes: int
    read: Callable[[int, int], bytes]

    @classmethod
    def of(cls, data: bytes) -> Part:
        return cls(len(data), lambda position, length: data[position : position + length])

    async def checksum(self) -> dict[str, str]:
        """Returns the parameter that has the checksum."""

        def checksum() -> int:
            crc = 0
            for position in range(0, self.size_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, self.size_bytes - position)
                crc = crc32c(self.read(position, length), 0, length, crc)
            return crc

        return {_CHECKSUM: base64.b64encode((await asyncio.to_thread(checksum)).to_bytes(4, "big")).decode()}


def parts_of(size_bytes: int, least_bytes: int) -> list[tuple[int, int]]:
    """Returns the starts and sizes of the parts of an object. One of up to twice `least_bytes` is one part.

    All parts have one size of about `least_bytes` or more, and the last one may have less: Cloudflare R2 takes no
    others."""
    count = min(max(1, (size_bytes - 1) // least_bytes), MAX_PARTS)
    part_bytes = max(1, -(-size_bytes // count))
    return [(start, min(part_bytes, size_bytes - start)) for start in range(0, max(1, size_bytes), part_bytes)]


class PartWindow:
    """Bounds the parts of all uploads of one store that are in flight. Time-outs lower the bound.

    A slow store gets fewer parts at a time, so each of them moves faster. The bound halves when a part passes its
    deadline, and grows by one after as many successes as it has places (additive increase, multiplicative decrease)."""

    def __init__(self, max_parts: int) -> None:
        self._max = self._places = max_parts
        self._limit = float(max_parts)
        self._free = asyncio.Semaphore(max_parts)
        self._decreases = 0

    @property
    def limit(self) -> int:
        """The number of parts that may be in flight now; at least 1."""
        return int(self._limit)

    @asynccontextmanager
    async def part(self) -> AsyncIterator[None]:
        """Takes a place for one part. The wait for the place has no deadline: every part in flight has one.

        `StoreOverloadedError` halves the limit, once for all parts that were in flight together. It passes on."""
        await self._free.acquire()
        decreases = self._decreases
        try:
            yield
        except StoreOverloadedError:
            # The other parts in flight will fail as well, and say the same thing again.
            if decreases == self._decreases:
                self._decreases += 1
                self._limit = max(1.0, self._limit / 2)
            while self._places > self.limit and not self._free.locked():
                await self._free.acquire()  # a free place, so it does not wait
                self._places -= 1
            raise
        else:
            self._limit = min(float(self._max), self._limit + 1 / self._limit)
        finally:
            self._places -= 1
            while self._places < self.limit:
                self._places += 1
                self._free.release()


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

    async def ensure(self, key: str, source: Path | bytes) -> None:
        """Creates the object. An existing object of the same size is no error.

        Raises `RemoteStorageError` for an existing object of another size: then a uuid was used twice."""
        async with self._parts_of(source) as parts:
            if await self._create_unless_there(key, parts):
                return
        size, found = sum(part.size_bytes for part in parts), await self.call("head_object", Key=key)
        if found["ContentLength"] != size:
            raise RemoteStorageError(
                f"s3://{self._bucket}/{key} exists with {found['ContentLength']} bytes, not {size}: a uuid was used"
                " twice"
            )

    async def create(self, key: str, path: Path) -> bool:
        """Creates the object. Returns False when there is an object with that key already, whatever its content.

        Only one of several writers succeeds, if the store passed the race (`race.py`)."""
        async with self._parts_of(path) as parts:
            return await self._create_unless_there(key, parts)

    async def stage(self, key: str, path: Path) -> StagedUpload:
        """Uploads all parts. The object is not visible until a process calls `complete`."""
        async with self._parts_of(path) as parts:
            return await self.stage_parts(key, parts)

    async def complete(self, key: str, upload: StagedUpload, **condition: str) -> None:
        """Completes an upload. Raises `NoSuchUploadError` when it is gone.

        With the condition `IfNoneMatch="*"`, raises `PreconditionFailedError` when there is an object with that key."""
        parts = {"Parts": [{"PartNumber": number, **part} for number, part in enumerate(upload.parts, start=1)]}
        await self.call("complete_multipart_upload", Key=key, UploadId=upload.id, MultipartUpload=parts, **condition)

    async def put(self, key: str, part: Part, **condition: str) -> None:
        """Sends a PUT of a whole object."""
        try:
            await self.call("put_object", Key=key, Body=part, **await part.checksum(), **condition)
        except UnsupportedRequestError:
            await self.call("put_object", Key=key, Body=part, **condition)

    async def abort(self, key: str, upload_id: str) -> None:
        """Aborts an upload. A missing one was completed, or its writer aborted it."""
        with contextlib.suppress(NoSuchUploadError):
            await self.call("abort_multipart_upload", Key=key, UploadId=upload_id)

    async def call(self, operation: str, **parameters: Any) -> Any:
        """Sends one request. `Body` is a `Part`.

        Raises `RemoteStorageError` for every error of the client library, and `StoreOverloadedError` when no piece
        moved in the time of the deadline."""
        return await self._credentials.tried(partial(self._call, operation, **parameters))

    async def _call(self, operation: str, **parameters: Any) -> Any:
        body: _Body | None = None
        try:
            async with while_active(self._timeout_s) as activity:
                if "Body" in parameters:
                    body = parameters["Body"] = _Body(parameters["Body"], activity)
                return await getattr(self._client, operation)(Bucket=self._bucket, **parameters)
        except Exception as error:
            if body is not None and body.trouble is not None:
                raise body.trouble from error
            key = parameters.get("Key", parameters.get("Prefix", ""))
            raise error_of_exception(self._bucket, key, error) from error
        finally:
            if body is not None:
                body.close()

    async def _create_unless_there(self, key: str, parts: Sequence[Part]) -> bool:
        try:
            if len(parts) == 1:
                await self._send(lambda: self._write_once(key, partial(self.put, key, parts[0])))
                return True
            upload = await self.stage_parts(key, parts)
            try:
                await self._write_once(key, partial(self.complete, key, upload))
            except BaseException:
                with contextlib.suppress(RemoteStorageError):  # the delete of this attempt finds the upload
                    await self.abort(key, upload.id)
                raise
        except PreconditionFailedError:
            return False
        return True

    async def _write_once(self, key: str, write: Callable[..., Awaitable[None]]) -> None:
        """Sends a request that creates an object. Raises `PreconditionFailedError` when there is one."""
        try:
            await write(IfNoneMatch="*")
        except UnsupportedRequestError:
            # The server does not know the condition. All writers of a key are of one attempt and write the same bytes,
            # so a look before the write suffices.
            try:
                await self.call("head_object", Key=key)
            except RemoteResourceNotFoundError:
                await write()
            else:
                raise PreconditionFailedError(f"s3://{self._bucket}/{key} exists") from None

    async def _send(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Sends one part or one small object, within the window. Repeats it if the store is overloaded."""
        for _ in range(ATTEMPTS_PER_PART - 1):
            with contextlib.suppress(StoreOverloadedError):
                async with self._window.part():
                    return await send()
        async with self._window.part():
            return await send()

    @asynccontextmanager
    async def _parts_of(self, source: Path | bytes) -> AsyncIterator[list[Part]]:
        """Opens a file, and yields its parts. Bytes are one part."""
        if isinstance(source, bytes):
            yield [Part.of(source)]
            return
        try:
            file = await asyncio.to_thread(source.open, "rb", 0)
        except OSError as error:
            raise RemoteStorageError(f"{source}: the segment to copy cannot be read: {error.strerror}") from error
        with file:
            sizes = parts_of(os.fstat(file.fileno()).st_size, self._part_bytes)
            yield [Part(size, partial(_read, file.fileno(), start, start + size)) for start, size in sizes]

    async def stage_parts(self, key: str, parts: Sequence[Part]) -> StagedUpload:
        """Uploads the parts. The object is not visible until a process calls `complete`."""
        has_checksums = True
        try:
            created = await self.call("create_multipart_upload", Key=key, ChecksumAlgorithm="CRC32C")
        except UnsupportedRequestError:
            has_checksums = False
            created = await self.call("create_multipart_upload", Key=key)
        upload = {"Key": key, "UploadId": created["UploadId"]}
        free = asyncio.Semaphore(PARTS_AT_ONCE)

        async def put_part(number: int, part: Part) -> dict[str, str]:
            async with free:
                sums = await part.checksum() if has_checksums else {}
                answer = await self._send(
                    lambda: self.call("upload_part", **upload, PartNumber=number, Body=part, **sums)
                )
                return {"ETag": str(answer["ETag"]), **sums}

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(put_part(number, part)) for number, part in enumerate(parts, start=1)]
        except BaseException as error:
            with contextlib.suppress(RemoteStorageError):
                await self.abort(key, created["UploadId"])
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from error
            raise
        return StagedUpload(created["UploadId"], tuple(task.result() for task in tasks))


def _read(descriptor: int, start: int, end: int, position: int, length: int) -> bytes:
    """Returns bytes of the part `[start, end)` of a file. Raises `RemoteStorageError`."""
    try:
        piece = os.pread(descriptor, length, start + position)
    except OSError as error:
        raise RemoteStorageError(f"the segment to copy cannot be read: {error.strerror}") from error
    if len(piece) != length:
        raise RemoteStorageError(f"the segment to copy ends at {start + position + len(piece)} instead of {end}")
    return piece


class _Body(io.RawIOBase):
    """The body of a request. In a thread, the HTTP client reads the next piece when the connection has taken the last.

    A part of a file is never in memory as a whole: fresh memory for it would cost as much CPU time as sending it."""

    def __init__(self, part: Part, activity: Activity) -> None:
        self.trouble: RemoteStorageError | None = None
        """Why the file cannot be read. The HTTP client only tells that it could not send the body."""
        self._part = part
        self._activity = activity
        self._position = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._part.size_bytes}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """Returns at least `size` bytes, if there are as many: the client asks for less than a good piece."""
        if self.closed:  # the request has ended, and its file may be closed
            raise ValueError("the request has ended")
        rest = self._part.size_bytes - self._position
        length = rest if size is None or size < 0 else min(rest, max(size, PIECE_BYTES))
        try:
            piece = self._part.read(self._position, length)
        except RemoteStorageError as error:
            self.trouble = error
            raise
        self._position += length
        self._activity.moved_elsewhere(is_last=self._position == self._part.size_bytes)
        return piece
