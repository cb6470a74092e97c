"""The Prometheus metrics of the remote read path. A scrape reads the attributes of the reader.

tidegate_remote_reader_running, _pending, _bytes_in_flight     pool = chunk | index
tidegate_remote_reader_cache_bytes                             cache = chunk | index
tidegate_remote_reader_chunk_hits_total, _chunk_misses_total
tidegate_remote_reader_local_index_hits_total, _local_index_misses_total
tidegate_remote_reader_local_index_bytes                       files in the folder that the process writes
tidegate_remote_reader_disk_chunk_hits_total, _disk_chunk_misses_total, _disk_chunk_evictions_total
tidegate_remote_reader_disk_chunk_bytes                        files on the disk
tidegate_remote_reader_hedged_requests_total, _hedge_wins_total
tidegate_remote_reader_read_ahead_bytes                        reserved windows
tidegate_remote_fetch_bytes_total, _reads_total, _throttled_total    client_id, topic
tidegate_remote_fetch_throttle_time_seconds                    sum and count: remote-fetch-throttle-time of KIP-956
tidegate_remote_reader_circuit_open                            1 while the circuit breaker of a location rejects calls
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from tiers.reader.local_index_cache import LocalIndexes
from tiers.reader.read_accounts import ReadAccountMetrics
from tiers.reader.remote_log_reader import RemoteLogReader

_PREFIX = "tidegate_remote_reader"


class LocalIndexMetrics(Collector):
    """The size of the folder that this process writes. A process may write index files without a reader."""

    def __init__(self, indexes: LocalIndexes) -> None:
        self._indexes = indexes

    def collect(self) -> Iterator[Metric]:
        size_bytes = self._indexes.cache.size_bytes
        yield GaugeMetricFamily(f"{_PREFIX}_local_index_bytes", "Index files' bytes.", value=size_bytes)


class RemoteLogReaderMetrics(Collector):
    def __init__(self, reader: RemoteLogReader) -> None:
        self._reader = reader

    def collect(self) -> Iterator[Metric]:
        reader = self._reader
        pools = (("chunk", reader.chunk_pool), ("index", reader.index_pool))
        running = GaugeMetricFamily(f"{_PREFIX}_running", "Downloads in progress.", labels=["pool"])
        pending = GaugeMetricFamily(f"{_PREFIX}_pending", "Downloads that wait for a slot.", labels=["pool"])
        in_flight = GaugeMetricFamily(f"{_PREFIX}_bytes_in_flight", "Bytes of running downloads.", labels=["pool"])
        for name, pool in pools:
            running.add_metric([name], pool.running_count)
            pending.add_metric([name], pool.pending_count)
            in_flight.add_metric([name], pool.bytes_in_flight)
        cache = GaugeMetricFamily(f"{_PREFIX}_cache_bytes", "Bytes in memory caches.", labels=["cache"])
        cache.add_metric(["chunk"], reader.chunk_cache.size_bytes)
        cache.add_metric(["index"], reader.index_cache.size_bytes)
        yield from (running, pending, in_flight, cache)
        yield CounterMetricFamily(f"{_PREFIX}_chunk_hits", "Chunks found in memory.", value=reader.chunk_cache.hits)
        yield CounterMetricFamily(f"{_PREFIX}_chunk_misses", "Chunks not in memory.", value=reader.chunk_cache.misses)
        if (local := reader.local_indexes) is not None:
            yield CounterMetricFamily(f"{_PREFIX}_local_index_hits", "Indexes read from files.", value=local.hits)
            yield CounterMetricFamily(f"{_PREFIX}_local_index_misses", "Indexes not in files.", value=local.misses)
            yield from LocalIndexMetrics(local).collect()
        if (disk := reader.disk_chunks) is not None:
            yield CounterMetricFamily(f"{_PREFIX}_disk_chunk_hits", "Chunks read from files.", value=disk.hits)
            yield CounterMetricFamily(f"{_PREFIX}_disk_chunk_misses", "Chunks not in files.", value=disk.misses)
            yield CounterMetricFamily(f"{_PREFIX}_disk_chunk_evictions", "Chunks evicted.", value=disk.evictions)
            yield GaugeMetricFamily(f"{_PREFIX}_disk_chunk_bytes", "Bytes of chunk files.", value=disk.size_bytes)
        hedged = reader.hedged_reads
        yield CounterMetricFamily(f"{_PREFIX}_hedged_requests", "Slow GETs sent again.", value=hedged.hedged_requests)
        yield CounterMetricFamily(f"{_PREFIX}_hedge_wins", "Second GETs that won.", value=hedged.hedge_wins)
        yield GaugeMetricFamily(
            f"{_PREFIX}_read_ahead_bytes", "Bytes reserved for read-ahead.", value=reader.read_ahead.reserved_bytes
        )
        yield SummaryMetricFamily(
            "tidegate_remote_fetch_throttle_time_seconds",
            "remote-fetch-throttle-time of KIP-956: the time until a quota allows a read again, per throttled read.",
            count_value=reader.quotas.throttled_count,
            sum_value=reader.quotas.throttled_ms / 1000,
        )
        yield from ReadAccountMetrics(reader.accounts).collect()
        yield GaugeMetricFamily(
            f"{_PREFIX}_circuit_open", "1 while a circuit is open.", value=int(bool(reader.breakers.open_locations))
        )
