"""`DelayedOperation` and `DelayedOperationPurgatory` (docs/semantics.md 12) on one event loop.

An operation completes exactly once: by an event on one of its keys, by its deadline, or because its client disconnects.
There are no locks and no reaper as in Kafka, because every transition happens on the loop's thread, and the timer is
`loop.call_later`. A completed operation leaves every watcher list at once, so it keeps no records in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable
from enum import Enum


class Completion(Enum):
    """How an operation ended."""

    SATISFIED = "satisfied"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class DelayedOperation:
    """An operation that waits for a condition. A subclass defines the condition and the action that follows it.

    `try_complete` may be called at any time. It must not await.
    """

    def __init__(self) -> None:
        self._completion: Completion | None = None
        self._done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._purgatory: DelayedOperationPurgatory | None = None
        self._keys: tuple[Hashable, ...] = ()

    @property
    def completion(self) -> Completion | None:
        """None while the operation is pending."""
        return self._completion

    def is_satisfied(self) -> bool:
        """Returns whether the condition holds now."""
        raise NotImplementedError

    def on_complete(self, completion: Completion) -> None:
        """Called exactly once, regardless of what completed the operation."""

    def try_complete(self) -> bool:
        """Completes the operation if its condition holds. Returns False if it stays pending or was already complete."""
        return self._completion is None and self.is_satisfied() and self.force_complete(Completion.SATISFIED)

    def force_complete(self, completion: Completion) -> bool:
        """Completes the operation. Only the first call has an effect and returns True."""
        if self._completion is not None:
            return False
        self._completion = completion
        if self._timer is not None:
            self._timer.cancel()
        if self._purgatory is not None:
            self._purgatory._forget(self, self._keys, completion)
        try:
            self.on_complete(completion)
        finally:
            if not self._done.done():
                self._done.set_result(completion)
        return True

    async def wait(self) -> Completion:
        """Waits until the operation completes. If the waiter is cancelled (its client is gone), so is the operation."""
        try:
            return await asyncio.shield(self._done)
        except asyncio.CancelledError:
            self.force_complete(Completion.CANCELLED)
            raise


class DelayedOperationPurgatory:
    """The pending operations, by the keys whose events may complete them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._watchers: dict[Hashable, dict[DelayedOperation, None]] = {}
        self._pending = 0
        self.satisfied_count = 0
        self.expired_count = 0
        self.cancelled_count = 0

    @property
    def pending_count(self) -> int:
        return self._pending

    @property
    def watched_keys_count(self) -> int:
        return len(self._watchers)

    def try_complete_else_watch(self, operation: DelayedOperation, keys: Iterable[Hashable], delay_ms: int) -> bool:
        """Returns True if the operation completes at once. Else watches it under every key for `delay_ms`."""
        if operation.try_complete():
            self._count(Completion.SATISFIED)
            return True
        if operation.completion is not None:
            raise ValueError("the operation was completed before")
        operation._purgatory = self
        operation._keys = tuple(keys)
        self._pending += 1
        for key in operation._keys:
            self._watchers.setdefault(key, {})[operation] = None
        if delay_ms <= 0:
            operation.force_complete(Completion.EXPIRED)
            return False
        operation._timer = asyncio.get_running_loop().call_later(
            delay_ms / 1000, operation.force_complete, Completion.EXPIRED
        )
        return False

    def check_and_complete(self, key: Hashable) -> int:
        """Handles an event on `key`: tries to complete its operations, and returns how many completed."""
        return sum(operation.try_complete() for operation in list(self._watchers.get(key, ())))

    def _forget(self, operation: DelayedOperation, keys: tuple[Hashable, ...], completion: Completion) -> None:
        self._pending -= 1
        self._count(completion)
        for key in keys:
            watchers = self._watchers.get(key)
            if watchers is not None:
                watchers.pop(operation, None)
                if not watchers:
                    del self._watchers[key]

    def _count(self, completion: Completion) -> None:
        if completion is Completion.SATISFIED:
            self.satisfied_count += 1
        elif completion is Completion.EXPIRED:
            self.expired_count += 1
        else:
            self.cancelled_count += 1
