"""`race_fault` finds out by races whether a store with the S3 protocol honours If-None-Match.

A second request that follows the first one proves nothing: some servers check the condition, and then let several
concurrent writers win. So writers race for one key, several times. Each race ends with a look at the object, because a
server may also confirm a write that it did not make.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Sequence

from tiers.errors import RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.s3.errors import ConflictError, PreconditionFailedError
from tiers.storage.s3.upload import Part, S3Uploader, StagedUpload

WRITERS = 12
ROUNDS = 3
"""The first round also opens the connections, so its requests arrive further apart."""


async def race_fault(up: S3Uploader, read: Callable[[str], Awaitable[memoryview]], prefix: str) -> str:
    """Races below `prefix`, which is empty or ends with a slash. Deletes what it wrote. `read` reads an object.

    Returns what was wrong; empty if exactly one writer won each race. Raises the store's errors, and
    `RetriableRemoteStorageError` if a race had no result."""
    for name, race in (("PUT", _creations), ("multipart upload", _completions)):
        for _ in range(ROUNDS):
            key = f"{prefix}.race-{uuid.uuid4()}"
            try:
                fault = await race(up, read, key)
            finally:
                with contextlib.suppress(RemoteStorageError):
                    await up.call("delete_object", Key=key)
            if fault:
                return f"If-None-Match by {name}: {fault}"
    return ""


async def _creations(up: S3Uploader, read: Callable[[str], Awaitable[memoryview]], key: str) -> str:
    return await _race(read, key, [up.put(key, _body(number), IfNoneMatch="*") for number in range(WRITERS)])


async def _completions(up: S3Uploader, read: Callable[[str], Awaitable[memoryview]], key: str) -> str:
    uploads: dict[int, StagedUpload] = {}

    async def stage(number: int) -> None:
        uploads[number] = await up.stage_parts(key, [_body(number)])

    try:
        for error in await asyncio.gather(*map(stage, range(WRITERS)), return_exceptions=True):
            if error is not None:
                raise error
        return await _race(read, key, [up.complete(key, uploads[n], IfNoneMatch="*") for n in range(WRITERS)])
    finally:
        for upload in uploads.values():
            with contextlib.suppress(RemoteStorageError):
                await up.abort(key, upload.id)


async def _race(read: Callable[[str], Awaitable[memoryview]], key: str, writes: Sequence[Awaitable[object]]) -> str:
    """Returns what was wrong; empty if exactly one writer won. Writer n writes `_body(n)`."""
    errors = await asyncio.gather(*map(_error_of, writes))
    winners = [number for number, error in enumerate(errors) if error is None]
    refusals = (PreconditionFailedError, ConflictError)
    unclear = [error for error in errors if error is not None and not isinstance(error, refusals)]
    if len(winners) > 1:
        return f"{len(winners)} of {len(writes)} concurrent writers won"
    if not winners and unclear and not any(error.retriable for error in unclear):
        return f"the store refuses the condition: {unclear[0]}"
    if unclear or not winners:
        why = unclear[0] if unclear else "the store refused all writers"
        raise RetriableRemoteStorageError(f"a race of {len(writes)} writers had no result: {why}")
    body = _body(winners[0])
    if await read(key) != body.read(0, body.size_bytes):
        return "the store has other bytes than those of the writer that won"
    return ""


async def _error_of(write: Awaitable[object]) -> RemoteStorageError | None:
    try:
        await write
    except RemoteStorageError as error:
        return error
    return None


def _body(number: int) -> Part:
    return Part.of(b"writer %d" % number)
