"""`HoldBudget`: memory for answers whose size a client would otherwise choose, shared by all connections.

A grant stands for an answer from before it is made until its last byte has left: a client that does not read keeps it.
"""

from __future__ import annotations

OVERSHOOT_BYTES = 1024 * 1024
"""One batch may exceed any limit (KIP-74); message.max.bytes is about this by default."""

_SHARE = 4


class Grant:
    """`max_bytes` is what the answer may have, one batch beyond it aside."""

    __slots__ = ("_budget", "_is_released", "_reserved_bytes", "max_bytes")

    def __init__(self, budget: HoldBudget, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._budget = budget
        self._is_released = False
        self._reserved_bytes = max_bytes + OVERSHOOT_BYTES
        budget.reserved_bytes += self._reserved_bytes

    def settle(self, size_bytes: int) -> None:
        """The answer is made, and this large. Nothing once the grant is released: it stands for no answer any more."""
        if self._is_released:
            return
        self._budget.reserved_bytes += size_bytes - self._reserved_bytes
        self._reserved_bytes = size_bytes

    def release(self) -> None:
        """May be called again."""
        self.settle(0)
        self._is_released = True


class HoldBudget:
    """A grant is at most a quarter of what is left, so that late comers get something; and never less than a byte."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self.reserved_bytes = 0

    def reserve(self, wanted_bytes: int) -> Grant:
        free_bytes = self._total_bytes - self.reserved_bytes
        return Grant(self, max(1, min(wanted_bytes, free_bytes // _SHARE)))
