"""`HoldBudget`: limits the memory of all connections for held answers, whose size a client would otherwise choose.

A grant covers one answer, from before it is built until its last byte has left. While the client does not read, the
grant lasts.
"""

from __future__ import annotations

OVERSHOOT_BYTES = 1024 * 1024
"""One batch may exceed any limit (KIP-74). The default of message.max.bytes is about this size."""

_SHARE = 4


class Grant:
    """Memory for one answer. The answer may have `max_bytes`, and one batch beyond them."""

    __slots__ = ("_budget", "_is_released", "_reserved_bytes", "max_bytes")

    def __init__(self, budget: HoldBudget, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._budget = budget
        self._is_released = False
        self._reserved_bytes = max_bytes + OVERSHOOT_BYTES
        budget.reserved_bytes += self._reserved_bytes

    def resize(self, size_bytes: int) -> None:
        """Adjusts the reservation to the size of the complete answer. Does nothing after `release`."""
        if self._is_released:
            return
        self._budget.reserved_bytes += size_bytes - self._reserved_bytes
        self._reserved_bytes = size_bytes

    def release(self) -> None:
        """Frees the memory. Further calls have no effect."""
        self.resize(0)
        self._is_released = True


class HoldBudget:
    """Grants at most a quarter of the free memory, so that later requests get some too, and at least one byte."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self.reserved_bytes = 0

    def grant(self, wanted_bytes: int) -> Grant:
        free_bytes = self._total_bytes - self.reserved_bytes
        return Grant(self, max(1, min(wanted_bytes, free_bytes // _SHARE)))
