"""The Prometheus metrics of the remote read path. A scrape reads the attributes of the reader."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tiers.metric_spec import CounterSpec, GaugeSpec, SummarySpec
from tiers.reader.remote_log_reader import RemoteLogReader

_PREFIX = "tidegate_remote_reader"
_WITH_CACHE = "where the process has the cache"

RUNNING = GaugeSpec(f"{_PREFIX}_running", "Downloads in progress.", ("pool",))
PENDING = GaugeSpec(
    f"{_PREFIX}_pending", "Downloads that wait for a slot.", ("pool",), kafka="RemoteLogReaderTaskQueueSize"
)
DOWNLOADED = CounterSpec(
    f"{_PREFIX}_downloaded_bytes",
    "Bytes that came from the store for reads. Divided by `tidegate_remote_fetch_bytes_total`, they are the bytes that "
    "were downloaded per byte that was served.",
    ("pool",),
)
HEDGED_REQUESTS = CounterSpec(f"{_PREFIX}_hedged_requests", "Slow GETs that were sent a second time.")
READ_AHEAD_BYTES = GaugeSpec(f"{_PREFIX}_read_ahead_bytes", "Bytes reserved for read-ahead.")
CACHE_BYTES = GaugeSpec(f"{_PREFIX}_cache_bytes", "Bytes in a cache.", ("cache",), since=_WITH_CACHE)
CACHE_HITS = CounterSpec(f"{_PREFIX}_cache_hits", "Chunks or indexes found in it.", ("cache",), since=_WITH_CACHE)
CACHE_MISSES = CounterSpec(f"{_PREFIX}_cache_misses", "Chunks or indexes not in it.", ("cache",), since=_WITH_CACHE)
THROTTLE_TIME = SummarySpec(
    "tidegate_remote_fetch_throttle_time_seconds",
    "The time until a quota allows a read again, per throttled read.",
    kafka="remote-fetch-throttle-time",
)
CIRCUIT_OPEN = GaugeSpec(
    f"{_PREFIX}_circuit_open", "1: the circuit breaker of a location rejects reads, after failures in a row."
)


class RemoteLogReaderMetrics(Collector):
    def __init__(self, reader: RemoteLogReader) -> None:
        self._reader = reader

    def collect(self) -> Iterator[Metric]:
        reader, fetcher = self._reader, self._reader.fetcher
        of_pools = [spec.family() for spec in (RUNNING, PENDING, DOWNLOADED)]
        for name, pool, downloaded_bytes in (
            ("chunk", fetcher.chunk_pool, fetcher.hedged_reads.downloaded_bytes),
            ("index", fetcher.index_pool, fetcher.downloaded_index_bytes),
        ):
            for family, count in zip(of_pools, (pool.running_count, pool.pending_count, downloaded_bytes), strict=True):
                family.add_metric([name], count)
        yield from of_pools
        yield from self._of_caches()
        yield HEDGED_REQUESTS.family(fetcher.hedged_reads.hedged_requests)
        yield READ_AHEAD_BYTES.family(reader.read_ahead.reserved_bytes)
        throttled = THROTTLE_TIME.family()
        throttled.add_metric([], reader.quotas.throttled_count, reader.quotas.throttled_ms / 1000)
        yield throttled
        yield from reader.accounts.collect()
        yield CIRCUIT_OPEN.family(int(bool(fetcher.breakers.open_locations)))

    def _of_caches(self) -> Iterator[Metric]:
        fetcher = self._reader.fetcher
        sizes, hits, misses = CACHE_BYTES.family(), CACHE_HITS.family(), CACHE_MISSES.family()
        sizes.add_metric(["index"], fetcher.index_cache.currsize)
        for name, cache in (
            ("chunk", fetcher.chunk_cache), ("chunk_files", fetcher.disk_chunks), ("index_files", fetcher.local_indexes)
        ):  # fmt: skip
            if cache is not None:
                sizes.add_metric([name], cache.size_bytes)
                hits.add_metric([name], cache.hits)
                misses.add_metric([name], cache.misses)
        yield from (sizes, hits, misses)
