"""Who waits for remote records: from the first request without records to the first one with records."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

from proxy.handlers.fetch.delayed import GONE_AFTER_MS, MAX_SHOWN, SHOWN_AFTER_MS, WaitingReads
from tiers.errors import OffsetGapError, RemoteLogError, RemoteReadTimeoutError, RetriableRemoteStorageError
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteReadRequest

PARTITION = TopicIdPartition(UUID(int=1), 3, "orders")
REQUEST = RemoteReadRequest(PARTITION, 7, 1 << 20, True, 0, 10_000, 1, "billing")
DOWN = RemoteReadTimeoutError("the deadline passed", RetriableRemoteStorageError("the store is down"))


class Reads:
    """Stands for the reader. `error` is that of the next reads; None: they have records."""

    def __init__(self) -> None:
        self.error: RemoteLogError | None = DOWN
        self.hangs = False
        self.now_ms = 0
        self.waiting = WaitingReads(cast(Any, self), lambda: self.now_ms)

    async def read(self, request: RemoteReadRequest) -> Any:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return "records"

    async def ask(self, at_ms: int, request: RemoteReadRequest = REQUEST) -> None:
        self.now_ms = at_ms
        with suppress(RemoteLogError):
            await self.waiting.read(request)

    def shown(self) -> list[tuple[str, int, int, str]]:
        return [(each.client_id, each.offset, waited, each.reason) for each, waited in self.waiting.now()]


async def test_a_client_waits_from_its_first_request_without_records() -> None:
    reads = Reads()
    await reads.ask(0)
    reads.now_ms = SHOWN_AFTER_MS
    assert reads.shown() == [], "it may have gone on with other records"
    await reads.ask(SHOWN_AFTER_MS)
    assert reads.shown() == [("billing", 7, SHOWN_AFTER_MS, "the store is down")]
    reads.error = None
    await reads.ask(SHOWN_AFTER_MS + 1)
    assert reads.shown() == []


async def test_a_client_that_asks_no_more_does_not_wait() -> None:
    reads = Reads()
    for at_ms in (0, SHOWN_AFTER_MS):
        await reads.ask(at_ms)
    reads.now_ms += GONE_AFTER_MS
    assert len(reads.shown()) == 1
    reads.now_ms += 1
    assert reads.shown() == []
    began_ms = reads.now_ms + 1
    for at_ms in (began_ms, began_ms + SHOWN_AFTER_MS):
        await reads.ask(at_ms)
    assert [waited for _, _, waited, _ in reads.shown()] == [SHOWN_AFTER_MS], "the time begins anew"


def test_a_client_whose_records_are_not_known_waits_too() -> None:
    reads = Reads()
    for reads.now_ms in (0, SHOWN_AFTER_MS):
        reads.waiting.asked("billing", PARTITION, 9, "the leader does not answer")
    assert reads.shown() == [("billing", 9, SHOWN_AFTER_MS, "the leader does not answer")]


async def test_an_offset_that_the_remote_tier_lacks_is_an_answer() -> None:
    reads = Reads()
    reads.error = OffsetGapError("no remote segment holds offset 7")
    for at_ms in (0, SHOWN_AFTER_MS):
        await reads.ask(at_ms)
    assert reads.shown() == []


async def test_a_read_in_progress_waits_until_it_is_cancelled() -> None:
    reads = Reads()
    reads.hangs = True
    read = asyncio.create_task(reads.ask(0))
    await asyncio.sleep(0)
    reads.now_ms = SHOWN_AFTER_MS + GONE_AFTER_MS
    assert [client for client, *_ in reads.shown()] == ["billing"]
    read.cancel()
    await asyncio.wait([read])
    assert reads.shown() == []


async def test_the_clients_that_wait_longest_are_shown() -> None:
    reads = Reads()
    for at_ms in (0, SHOWN_AFTER_MS + MAX_SHOWN):
        for number in range(MAX_SHOWN + 1):
            await reads.ask(at_ms + number, replace(REQUEST, client_id=f"{number}"))
    assert [client for client, *_ in reads.shown()] == [f"{number}" for number in range(MAX_SHOWN)]
