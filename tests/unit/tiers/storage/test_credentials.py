"""Refused credentials are read again, at most once per pause."""

from __future__ import annotations

import asyncio

import pytest

from tiers.errors import CredentialsRefusedError
from tiers.storage.retries import PAUSE_MS, CredentialsRenewal


class Store:
    def __init__(self) -> None:
        self.now_ms = 0
        self.credentials = self.accepted = 1
        self.newest = 1
        self.reads = self.calls = 0
        self.is_readable = True
        self.renewal = CredentialsRenewal(self._read, lambda: self.now_ms)

    async def _read(self) -> None:
        self.reads += 1
        await asyncio.sleep(0)
        if not self.is_readable:
            raise ValueError("the file is missing")
        self.credentials = self.newest

    async def call(self) -> str:
        async def once() -> str:
            self.calls += 1
            used = self.credentials
            await asyncio.sleep(0)
            if used != self.accepted:
                raise CredentialsRefusedError("refused")
            return "done"

        return await self.renewal.tried(once)


async def test_all_calls_that_are_refused_together_share_one_renewal() -> None:
    store = Store()
    store.accepted = store.newest = 2
    assert await asyncio.gather(*[store.call() for _ in range(10)]) == ["done"] * 10
    assert (store.reads, store.calls) == (1, 20)


async def test_a_lasting_refusal_reads_once_per_pause() -> None:
    store = Store()
    store.accepted = 2
    for _ in range(10):
        with pytest.raises(CredentialsRefusedError):
            await store.call()
    assert store.reads == 1
    store.newest, store.now_ms = 2, PAUSE_MS
    assert await store.call() == "done"
    assert store.reads == 2


async def test_a_source_that_cannot_be_read_leaves_the_refusal() -> None:
    store = Store()
    store.accepted = store.newest = 2
    store.is_readable = False
    with pytest.raises(CredentialsRefusedError, match="refused"):
        await store.call()
    store.is_readable, store.now_ms = True, PAUSE_MS
    assert await store.call() == "done"
