"""The model of an object store: the time to its first byte, and the rate of one connection."""

from __future__ import annotations

from dataclasses import dataclass

BURST_S = 0.005
"""A connection may make up for this much lost time. Timers are late, and the kernel has buffers."""


@dataclass(frozen=True, slots=True)
class StoreModel:
    name: str
    first_byte_ms: float
    """The delay of the first byte of an answer to a GET."""
    bytes_per_s: float
    """The rate of one connection, in each direction. 0 is unlimited."""

    def __str__(self) -> str:
        if not self.bytes_per_s and not self.first_byte_ms:
            return self.name
        rate = f"{self.bytes_per_s / 1e9:g} GB/s" if self.bytes_per_s >= 1e9 else f"{self.bytes_per_s / 1e6:g} MB/s"
        return f"{self.name} ({self.first_byte_ms:g} ms, {rate})"


FAR = StoreModel("far", 60, 80e6)
"""S3 from another zone."""
NEAR = StoreModel("near", 5, 1e9)
"""A store nearby."""
PLAIN = StoreModel("plain", 0, 0)
"""The relay without a model. It shows what the relay itself costs."""
MODELS = {model.name: model for model in (FAR, NEAR, PLAIN)}


class Pace:
    """Says when the bytes of one direction of a connection have passed a line of a given rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def passed_at(self, now_s: float, count: int) -> float:
        """Returns the time at which `count` more bytes have passed. They begin at `now_s`, or after earlier bytes.

        The caller waits until then before it delivers the bytes. Bytes may begin up to `BURST_S` in the past, so a
        caller that wakes up late loses no rate."""
        if not self._bytes_per_s:
            return now_s
        self._free_at_s = max(self._free_at_s, now_s - BURST_S) + count / self._bytes_per_s
        return self._free_at_s
