"""The Prometheus metrics of the remote read path. A scrape reads the attributes of the reader."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tiers.metric_spec import CounterSpec, GaugeSpec, SummarySpec
from tiers.reader.remote_log_reader import RemoteLogReader

_PREFIX = "tidegate_remote_reader"
_WITH_FOLDER = "where the process has the cache"

RUNNING = GaugeSpec(f"{_PREFIX}_running", "Downloads in progress.", ("pool",))
PENDING = GaugeSpec(
    f"{_PREFIX}_pending", "Downloads that wait for a slot.", ("pool",), kafka="RemoteLogReaderTaskQueueSize"
)
IN_FLIGHT = GaugeSpec(f"{_PREFIX}_bytes_in_flight", "Bytes of the downloads in progress.", ("pool",))
DOWNLOADED = CounterSpec(
    f"{_PREFIX}_downloaded_bytes",
    "Bytes that came from the store for reads. Divided by `tidegate_remote_fetch_bytes_total`, they are the bytes that "
    "were downloaded per byte that was served.",
    ("pool",),
)
HEDGED_REQUESTS = CounterSpec(f"{_PREFIX}_hedged_requests", "Slow GETs that were sent a second time.")
HEDGE_WINS = CounterSpec(f"{_PREFIX}_hedge_wins", "Second GETs that were faster than the first.")
READ_AHEAD_BYTES = GaugeSpec(f"{_PREFIX}_read_ahead_bytes", "Bytes reserved for read-ahead.")
CACHE_BYTES = GaugeSpec(f"{_PREFIX}_cache_bytes", "Bytes in memory caches.", ("cache",))
CHUNK_HITS = CounterSpec(f"{_PREFIX}_chunk_hits", "Chunks found in memory.")
CHUNK_MISSES = CounterSpec(f"{_PREFIX}_chunk_misses", "Chunks not in memory.")
LOCAL_INDEX_HITS = CounterSpec(f"{_PREFIX}_local_index_hits", "Indexes read from files.", since=_WITH_FOLDER)
LOCAL_INDEX_MISSES = CounterSpec(f"{_PREFIX}_local_index_misses", "Indexes not in files.", since=_WITH_FOLDER)
LOCAL_INDEX_BYTES = GaugeSpec(
    f"{_PREFIX}_local_index_bytes", "Bytes of index files in the folder that the process writes.", since=_WITH_FOLDER
)
DISK_CHUNK_HITS = CounterSpec(f"{_PREFIX}_disk_chunk_hits", "Chunks read from files.", since=_WITH_FOLDER)
DISK_CHUNK_MISSES = CounterSpec(f"{_PREFIX}_disk_chunk_misses", "Chunks not in files.", since=_WITH_FOLDER)
DISK_CHUNK_EVICTIONS = CounterSpec(f"{_PREFIX}_disk_chunk_evictions", "Chunks evicted from files.", since=_WITH_FOLDER)
DISK_CHUNK_BYTES = GaugeSpec(f"{_PREFIX}_disk_chunk_bytes", "Bytes of chunk files.", since=_WITH_FOLDER)
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
        of_pools = [spec.family() for spec in (RUNNING, PENDING, IN_FLIGHT, DOWNLOADED, CACHE_BYTES)]
        for name, pool, downloaded_bytes, cached_bytes in (
            ("chunk", fetcher.chunk_pool, fetcher.hedged_reads.downloaded_bytes, fetcher.chunk_cache.size_bytes),
            ("index", fetcher.index_pool, fetcher.downloaded_index_bytes, fetcher.index_cache.currsize),
        ):
            counts = (pool.running_count, pool.pending_count, pool.bytes_in_flight, downloaded_bytes, cached_bytes)
            for family, count in zip(of_pools, counts, strict=True):
                family.add_metric([name], count)
        yield from of_pools
        yield CHUNK_HITS.family(fetcher.chunk_cache.hits)
        yield CHUNK_MISSES.family(fetcher.chunk_cache.misses)
        if (local := fetcher.local_indexes) is not None:
            yield LOCAL_INDEX_HITS.family(local.hits)
            yield LOCAL_INDEX_MISSES.family(local.misses)
            yield LOCAL_INDEX_BYTES.family(local.size_bytes)
        if (disk := fetcher.disk_chunks) is not None:
            yield DISK_CHUNK_HITS.family(disk.hits)
            yield DISK_CHUNK_MISSES.family(disk.misses)
            yield DISK_CHUNK_EVICTIONS.family(disk.evictions)
            yield DISK_CHUNK_BYTES.family(disk.size_bytes)
        yield HEDGED_REQUESTS.family(fetcher.hedged_reads.hedged_requests)
        yield HEDGE_WINS.family(fetcher.hedged_reads.hedge_wins)
        yield READ_AHEAD_BYTES.family(reader.read_ahead.reserved_bytes)
        throttled = THROTTLE_TIME.family()
        throttled.add_metric([], reader.quotas.throttled_count, reader.quotas.throttled_ms / 1000)
        yield throttled
        yield from reader.accounts.collect()
        yield CIRCUIT_OPEN.family(int(bool(fetcher.breakers.open_locations)))
