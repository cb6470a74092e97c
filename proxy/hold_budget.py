"""`HoldBudget`: memory for held responses whose size a client would otherwise choose, shared by all connections."""

from __future__ import annotations

OVERSHOOT_BYTES = 1024 * 1024
"""One batch may exceed any limit (KIP-74); message.max.bytes is about this by default."""

_SHARE = 4


class HoldBudget:
    """A grant is at most a quarter of what is left, so that late comers get something; and never less than a byte."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self.reserved_bytes = 0

    def reserve(self, wanted_bytes: int) -> int:
        """The MaxBytes to ask the broker for; to be given back with `release`."""
        free_bytes = self._total_bytes - self.reserved_bytes
        granted = max(1, min(wanted_bytes, free_bytes // _SHARE))
        self.reserved_bytes += granted + OVERSHOOT_BYTES
        return granted

    def release(self, granted_bytes: int) -> None:
        self.reserved_bytes -= granted_bytes + OVERSHOOT_BYTES
