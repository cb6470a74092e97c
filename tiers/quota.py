"""Quotas in bytes per second (KIP-956), by reservations: bytes count as used before they are transferred.

A rate applies to a sliding window of `num` samples of `size_ms` each, which are Kafka's two settings. A quota grants a
reservation while the used and the reserved bytes are below the limit of the window. So within any window, the
transferred bytes exceed the limit by at most one reservation, even if many tasks reserve concurrently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import inf
from types import TracebackType
from typing import Self

from cachetools import LRUCache

DEFAULT_WINDOW_NUM = 11
DEFAULT_WINDOW_SIZE_MS = 1_000
_CLIENTS_KEPT = 10_000
"""Clients choose their ids, so the number of their quotas must be bounded."""


@dataclass(frozen=True, slots=True)
class QuotaWindow:
    num: int = DEFAULT_WINDOW_NUM
    size_ms: int = DEFAULT_WINDOW_SIZE_MS

    @property
    def length_ms(self) -> int:
        return self.num * self.size_ms


@dataclass(slots=True)
class _Sample:
    start_ms: int
    size_bytes: int = 0


class RateQuota:
    """One quota. None: no limit. `clock_ms` is monotonic. It is not thread-safe."""

    def __init__(self, bytes_per_second: int | None, window: QuotaWindow, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._samples: deque[_Sample] = deque()
        self._used_bytes = 0
        self.change(bytes_per_second, window)

    def change(self, bytes_per_second: int | None, window: QuotaWindow) -> None:
        """Replaces the limit. The bytes that were used within the window still count."""
        self._window = window
        self._allowed_bytes = inf if bytes_per_second is None else bytes_per_second * window.length_ms / 1000

    def reserve(self, size_bytes: int) -> Reservation | None:
        """Returns a reservation; None when the quota is used up. `throttle_ms` tells for how long."""
        self._expire()
        return None if self._used_bytes >= self._allowed_bytes else self.exceed(size_bytes)

    def exceed(self, size_bytes: int) -> Reservation:
        """Returns a reservation, also when the quota is used up: later ones wait for longer."""
        now_ms = self._expire()
        if not self._samples or now_ms >= self._samples[-1].start_ms + self._window.size_ms:
            self._samples.append(_Sample(now_ms))
        reservation = Reservation()
        reservation.held.append((self, self._samples[-1], size_bytes))
        self._add(self._samples[-1], size_bytes)
        return reservation

    def throttle_ms(self) -> int:
        """Returns the time until a reservation is possible; 0 means now.

        The time is shorter if reserved bytes are returned, and longer if other tasks reserve."""
        now_ms = self._expire()
        left_bytes = self._used_bytes
        for sample in self._samples:
            if left_bytes < self._allowed_bytes:
                break
            left_bytes -= sample.size_bytes
            free_at_ms = sample.start_ms + self._window.size_ms + self._window.length_ms
            if left_bytes < self._allowed_bytes:
                return free_at_ms - now_ms
        return 0

    def _expire(self) -> int:
        """Drops the samples that are wholly older than the window. Returns the current time."""
        now_ms = self._clock_ms()
        oldest_ms = now_ms - self._window.length_ms - self._window.size_ms
        while self._samples and self._samples[0].start_ms <= oldest_ms:
            self._used_bytes -= self._samples.popleft().size_bytes
        return now_ms

    def _add(self, sample: _Sample, size_bytes: int) -> None:
        sample.size_bytes += size_bytes
        if self._samples and sample.start_ms >= self._samples[0].start_ms:
            self._used_bytes += size_bytes


@dataclass(slots=True)
class Reservation:
    """Reserved bytes of one or more quotas. As a context manager, it charges `used_bytes` at its end."""

    used_bytes: int = 0
    held: list[tuple[RateQuota, _Sample, int]] = field(default_factory=list)

    def charge(self, used_bytes: int) -> None:
        """Replaces the reserved bytes by the bytes that were really transferred. Further calls have no effect."""
        held, self.held = self.held, []
        for quota, sample, reserved_bytes in held:
            quota._add(sample, used_bytes - reserved_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.charge(self.used_bytes)


class RemoteFetchQuotas:
    """The fetch quotas: remote.log.manager.fetch.max.bytes.per.second for the process, and limits per topic and client.

    There are none before the first `change`."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self.change(QuotaWindow())
        self.throttled_count = 0
        """The number of reads that were answered empty."""
        self.throttled_ms = 0
        """The sum over these reads of the time until the quotas would have allowed the read."""

    def change(
        self,
        window: QuotaWindow,
        bytes_per_second: int | None = None,
        per_client: int | None = None,
        per_topic: Sequence[tuple[str, int | None]] = (),
    ) -> None:
        """Replaces the quotas. Their windows begin again, empty. None means no limit.

        `per_topic` has shell patterns and limits. The first pattern that matches a topic decides, and each topic has
        its own quota."""
        self._window = window
        self._whole = RateQuota(bytes_per_second, window, self._clock_ms)
        self._per_client = per_client
        self._per_topic = tuple(per_topic)
        self._of_clients: LRUCache[str, RateQuota] = LRUCache(_CLIENTS_KEPT)
        self._of_topics: dict[str, RateQuota] = {}

    def reserve(self, topic: str, client_id: str, size_bytes: int) -> Reservation | None:
        """Returns a reservation from all quotas that apply; None, and nothing is reserved, when one is used up."""
        of_topic = next((limit for pattern, limit in self._per_topic if fnmatchcase(topic, pattern)), None)
        quotas = [
            self._whole,
            *self._quota(self._of_topics, topic, of_topic),
            *self._quota(self._of_clients, client_id, self._per_client),
        ]
        throttle_ms = max(quota.throttle_ms() for quota in quotas)
        if throttle_ms:
            self.throttled_count += 1
            self.throttled_ms += throttle_ms
            return None
        return Reservation(held=[held for quota in quotas for held in quota.exceed(size_bytes).held])

    def _quota(self, known: MutableMapping[str, RateQuota], name: str, limit: int | None) -> list[RateQuota]:
        if limit is None:
            return []
        quota = known.get(name)
        if quota is None:
            quota = known[name] = RateQuota(limit, self._window, self._clock_ms)
        return [quota]
