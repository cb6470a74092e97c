"""A delayed operation completes exactly once: by event, deadline or disconnect."""

from __future__ import annotations

import asyncio

import pytest

from proxy.handlers.fetch.purgatory import Completion, DelayedOperation, DelayedOperationPurgatory


class Gate(DelayedOperation):
    def __init__(self) -> None:
        super().__init__()
        self.is_open = False
        self.completions: list[Completion] = []

    def is_satisfied(self) -> bool:
        return self.is_open

    def on_complete(self, completion: Completion) -> None:
        self.completions.append(completion)


async def test_satisfied_at_once_is_never_watched() -> None:
    purgatory = DelayedOperationPurgatory("fetch")
    gate = Gate()
    gate.is_open = True
    assert purgatory.try_complete_else_watch(gate, ["a"], 1000)
    assert gate.completions == [Completion.SATISFIED]
    assert (purgatory.pending_count, purgatory.watched_keys_count, purgatory.satisfied_count) == (0, 0, 1)


async def test_an_event_on_any_of_its_keys_completes_it_once() -> None:
    purgatory = DelayedOperationPurgatory("fetch")
    gate = Gate()
    assert not purgatory.try_complete_else_watch(gate, ["a", "b"], 60_000)
    assert purgatory.check_and_complete("a") == 0
    gate.is_open = True
    assert purgatory.check_and_complete("c") == 0
    assert purgatory.check_and_complete("b") == 1
    assert purgatory.check_and_complete("a") == 0
    assert not gate.force_complete(Completion.EXPIRED)
    assert await gate.wait() is Completion.SATISFIED
    assert gate.completions == [Completion.SATISFIED]
    assert (purgatory.pending_count, purgatory.watched_keys_count) == (0, 0)


async def test_the_deadline_completes_it() -> None:
    purgatory = DelayedOperationPurgatory("fetch")
    gate = Gate()
    purgatory.try_complete_else_watch(gate, ["a"], 1)
    assert await gate.wait() is Completion.EXPIRED
    assert (purgatory.expired_count, purgatory.pending_count, purgatory.watched_keys_count) == (1, 0, 0)


async def test_a_deadline_in_the_past_expires_without_a_timer() -> None:
    purgatory = DelayedOperationPurgatory("fetch")
    gate = Gate()
    assert not purgatory.try_complete_else_watch(gate, ["a"], 0)
    assert gate.completions == [Completion.EXPIRED]


async def test_a_waiter_that_goes_away_cancels_it() -> None:
    purgatory = DelayedOperationPurgatory("fetch")
    gate = Gate()
    purgatory.try_complete_else_watch(gate, ["a"], 60_000)
    async with asyncio.TaskGroup() as group:
        waiter = group.create_task(gate.wait())
        await asyncio.sleep(0)
        waiter.cancel()
    assert gate.completions == [Completion.CANCELLED]
    assert (purgatory.cancelled_count, purgatory.pending_count) == (1, 0)


async def test_an_operation_is_watched_once() -> None:
    purgatory = DelayedOperationPurgatory("fetch")
    gate = Gate()
    gate.force_complete(Completion.CANCELLED)
    with pytest.raises(ValueError, match="completed before"):
        purgatory.try_complete_else_watch(gate, ["a"], 1000)


async def test_one_event_completes_all_that_wait_for_it_and_no_other() -> None:
    purgatory = DelayedOperationPurgatory("fetch")
    gates = [Gate() for _ in range(3)]
    for gate, key in zip(gates, ["a", "a", "b"], strict=True):
        purgatory.try_complete_else_watch(gate, [key], 60_000)
        gate.is_open = True
    assert purgatory.check_and_complete("a") == 2
    assert [gate.completion for gate in gates] == [Completion.SATISFIED, Completion.SATISFIED, None]
    assert purgatory.check_and_complete("b") == 1
