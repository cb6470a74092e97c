"""Builds the `ProcessReport` of a process from the parts that count. It reads numbers, and costs microseconds."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from protocol.api_keys import ApiKey
from proxy.admin.counts import Counts, ProcessReport, StoreCounts
from proxy.metrics import ProxyMetrics, api_name
from tiers.reader.remote_log_reader import RemoteLogReader

_PREFIX: Final = "tidegate_remote_storage"
_STORE_METRICS: Final = tuple(
    f"{_PREFIX}_{name}" for name in ("requests_total", "errors_total", "seconds_bucket", "in_flight")
)
_COPIED: Final = "tidegate_remote_copy_bytes_total"
_READ: Final = "fetch_log_segment"


@dataclass(slots=True)
class CountedParts:
    """What a process has opened of the parts that count."""

    proxy: ProxyMetrics | None = None
    reader: RemoteLogReader | None = None
    backlog_bytes: Callable[[], int | None] | None = None


def process_report(registry: CollectorRegistry, parts: CountedParts) -> ProcessReport:
    return ProcessReport(
        pid=os.getpid(),
        rss_bytes=_rss_bytes(),
        connections=None if parts.proxy is None else parts.proxy.open_connections,
        backlog_bytes=None if parts.backlog_bytes is None else parts.backlog_bytes(),
        counts=_counts(registry, parts),
        stores=_stores(registry),
    )


def _counts(registry: CollectorRegistry, parts: CountedParts) -> Counts:
    counts = Counts(copied_bytes=int(sum(value for _, _, value in _samples(registry, [_COPIED]))))
    if (reader := parts.reader) is not None:
        disk = reader.fetcher.disk_chunks
        hits = reader.fetcher.chunk_cache.hits + (0 if disk is None else disk.hits)
        misses = reader.fetcher.chunk_cache.misses if disk is None else disk.misses
        counts += Counts(remote_bytes=reader.accounts.total_bytes, cache_hits=hits, cache_misses=misses)
    if (proxy := parts.proxy) is not None:
        local, remote = (proxy.latency.get((api_name(ApiKey.FETCH), tier)) for tier in ("local", "remote"))
        counts += Counts(local_bytes=proxy.bytes_from_brokers)
        if local is not None:
            counts += Counts(local_fetches=tuple(local.counts))
        if remote is not None:
            counts += Counts(remote_fetches=tuple(remote.counts))
    return counts


def _stores(registry: CollectorRegistry) -> tuple[StoreCounts, ...]:
    requests: dict[str, int] = {}
    errors: dict[str, int] = {}
    in_flight: dict[str, int] = {}
    reads: dict[str, dict[float, int]] = {}
    for name, labels, value in _samples(registry, _STORE_METRICS):
        store = labels.get("store", "")
        match name.removeprefix(f"{_PREFIX}_"):
            case "requests_total":
                requests[store] = requests.get(store, 0) + int(value)
            case "errors_total" if labels["kind"] != "not_found":
                errors[store] = errors.get(store, 0) + int(value)
            case "in_flight":
                in_flight[store] = int(value)
            case "seconds_bucket" if labels["operation"] == _READ:
                reads.setdefault(store, {})[float(labels["le"])] = int(value)
    found = []
    for store, count in requests.items():
        buckets = sorted(reads.get(store, {}).items())
        cumulative = [value for _, value in buckets]
        found.append(
            StoreCounts(
                store=store,
                requests=count,
                errors=errors.get(store, 0),
                in_flight=in_flight.get(store, 0),
                bounds_s=tuple(bound for bound, _ in buckets[:-1]),
                reads=tuple(later - earlier for earlier, later in zip([0, *cumulative], cumulative, strict=False)),
            )
        )
    return tuple(found)


def _samples(registry: CollectorRegistry, names: Sequence[str]) -> list[tuple[str, dict[str, str], float]]:
    """Returns the samples with these names, without collecting the other metrics."""
    return [
        (sample.name, sample.labels, sample.value)
        for family in registry.restricted_registry(names).collect()
        for sample in family.samples
    ]


def _rss_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None
