"""`StoreRace` finds out by races whether a store with the S3 protocol honours If-None-Match.

A second request that follows the first one proves nothing: some servers check the condition, and then let several
concurrent writers win. So writers race for one key, several times. Each race ends with a look at the object, because a
server may also confirm a write that it did not make.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tiers.errors import RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.remote_storage_manager import StoreFeatures
from tiers.storage.s3.errors import ConflictError, PreconditionFailedError
from tiers.storage.s3.upload import S3Uploader

WRITERS = 12
ROUNDS = 3
"""The first round also opens the connections, so its requests arrive further apart."""

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[object]]

_REFUSALS = (PreconditionFailedError, ConflictError)


@dataclass(frozen=True, slots=True)
class _Verdict:
    is_proved: bool
    evidence: str


class StoreRace:
    """Races below `prefix`, which is empty or ends with a slash. Deletes what it wrote."""

    def __init__(self, uploader: S3Uploader, prefix: str) -> None:
        self._up = uploader
        self._prefix = prefix

    async def run(self) -> StoreFeatures:
        """Raises the store's errors, and `RetriableRemoteStorageError` if a race had no result."""
        creation = await self._rounds("If-None-Match by PUT", self._creations)
        if creation.is_proved:
            completion = await self._rounds("If-None-Match by multipart upload", self._completions)
            creation = _Verdict(completion.is_proved, f"{creation.evidence}; {completion.evidence}")
        return StoreFeatures(creation.is_proved, creation.evidence)

    async def _rounds(self, name: str, race: Callable[[str], Awaitable[str]]) -> _Verdict:
        for _ in range(ROUNDS):
            key = f"{self._prefix}.race-{uuid.uuid4()}"
            try:
                fault = await race(key)
            finally:
                with contextlib.suppress(RemoteStorageError):
                    await self._up.call("delete_object", key, Key=key)
            if fault:
                return _Verdict(False, f"{name}: {fault}")
        return _Verdict(True, f"{name}: one of {WRITERS} concurrent writers won, in each of {ROUNDS} races")

    async def _creations(self, key: str) -> str:
        async def create(data: bytes) -> object:
            return await self._up.put(key, data, IfNoneMatch="*")

        return await self._race(key, [create] * WRITERS)

    async def _completions(self, key: str) -> str:
        uploads: list[str] = []

        async def staged(number: int) -> Write:
            upload = await self._up.stage_parts(key, [_body(number)])
            uploads.append(upload.id)
            return lambda data: self._up.complete(key, upload)

        try:
            writes = await _at_once([staged(number) for number in range(WRITERS)])
            return await self._race(key, writes)
        finally:
            for upload_id in uploads:
                with contextlib.suppress(RemoteStorageError):
                    await self._up.call("abort_multipart_upload", key, Key=key, UploadId=upload_id)

    async def _race(self, key: str, writes: Sequence[Write]) -> str:
        """Returns what was wrong; empty if exactly one writer won. Writer n writes `_body(n)`."""
        results = await _at_once([_outcome(write(_body(number))) for number, write in enumerate(writes)])
        winners = [number for number, error in enumerate(results) if error is None]
        unclear = [error for error in results if error is not None and not isinstance(error, _REFUSALS)]
        if len(winners) > 1:
            return f"{len(winners)} of {len(writes)} concurrent writers won"
        if not winners and unclear and not any(error.retriable for error in unclear):
            return f"the store refuses the condition: {unclear[0]}"
        if unclear or not winners:
            why = unclear[0] if unclear else "the store refused all writers"
            raise RetriableRemoteStorageError(f"a race of {len(writes)} writers had no result: {why}")
        found = await self._up.read(key)
        if found != _body(winners[0]):
            return "the store has other bytes than those of the writer that won"
        return ""


async def _at_once(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Raises the first error of a call, if there is one."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _outcome(write: Awaitable[object]) -> RemoteStorageError | None:
    try:
        await write
    except RemoteStorageError as error:
        return error
    return None


def _body(number: int) -> bytes:
    return b"writer %d" % number
