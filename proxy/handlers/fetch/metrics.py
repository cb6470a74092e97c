"""The Prometheus metrics of Fetches from the remote tier: what they got, and the Fetches that wait."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from proxy.handlers.fetch.delayed import Completion
from proxy.handlers.fetch.handler import FetchHandler
from tiers.metric_spec import CounterSpec, GaugeSpec

_PREFIX = "tidegate_remote_fetch"

FETCH_REQUESTS = CounterSpec(
    f"{_PREFIX}_requests", "Reads of the remote tier, one per partition of a Fetch.", kafka="RemoteFetchRequestsPerSec"
)
FETCH_BYTES = CounterSpec(
    f"{_PREFIX}_bytes", "Bytes of remote records in answers to clients.", kafka="RemoteFetchBytesPerSec"
)
FETCH_ERRORS = CounterSpec(
    f"{_PREFIX}_errors", "Reads of the remote tier that failed.", kafka="RemoteFetchErrorsPerSec"
)
PENDING = GaugeSpec(f"{_PREFIX}_pending", "Fetches that wait for the remote tier now.")
COMPLETED = CounterSpec(
    f"{_PREFIX}_completed",
    "Fetches that have waited for the remote tier, by their end: satisfied, expired or cancelled.",
    ("completion",),
    kafka="DelayedRemoteFetchMetrics ExpiresPerSec (expired)",
)
HELD_BYTES = GaugeSpec(f"{_PREFIX}_held_bytes", "Bytes reserved for held answers.")
IN_NEITHER_TIER = CounterSpec(
    f"{_PREFIX}_in_neither_tier",
    "Fetched offsets above the log start that are in no tier and in no recorded gap.",
)


class RemoteFetchMetrics(Collector):
    def __init__(self, handler: FetchHandler) -> None:
        self._handler = handler

    def collect(self) -> Iterator[Metric]:
        purgatory, reads = self._handler.purgatory, self._handler.remote_reads
        yield FETCH_REQUESTS.family(reads.requests)
        yield FETCH_BYTES.family(reads.size_bytes)
        yield FETCH_ERRORS.family(reads.errors)
        yield PENDING.family(purgatory.pending_count)
        completed = COMPLETED.family()
        for completion in Completion:
            completed.add_metric([completion.value], purgatory.completed[completion])
        yield completed
        yield HELD_BYTES.family(self._handler.held_bytes)
        yield IN_NEITHER_TIER.family(self._handler.in_neither_tier_count)
