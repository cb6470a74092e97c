"""The report of a process: cheap numbers from the parts that it has opened."""

from __future__ import annotations

import os
from contextlib import suppress

from prometheus_client import CollectorRegistry

from protocol.api_keys import ApiKey
from proxy.metrics import LATENCY_BUCKETS_S, ProxyMetrics
from proxy.process.admin.process_report import CountedParts, process_report
from tiers.errors import RemoteResourceNotFoundError, RetriableRemoteStorageError
from tiers.storage.metrics import RemoteStorageMetrics
from tiers.tasks.metrics import RemoteLogManagerMetrics


def test_a_report_has_what_clients_were_sent_by_tier() -> None:
    metrics = ProxyMetrics()
    metrics.open_connections, metrics.bytes_from_brokers = 3, 700
    metrics.observe(ApiKey.FETCH, "local", 0.0015)
    metrics.observe(ApiKey.FETCH, "remote", 0.3)
    metrics.observe(ApiKey.PRODUCE, "local", 9.0)
    report = process_report(CollectorRegistry(), CountedParts(proxy=metrics))
    assert (report.pid, report.connections, report.backlog_bytes) == (os.getpid(), 3, None)
    assert report.counts.local_bytes == 700
    assert sum(report.counts.local_fetches) == report.counts.local_fetches[LATENCY_BUCKETS_S.index(0.002)] == 1
    assert sum(report.counts.remote_fetches) == report.counts.remote_fetches[LATENCY_BUCKETS_S.index(0.5)] == 1
    assert report.rss_bytes is not None
    assert report.rss_bytes > 1 << 20


def test_a_report_has_the_calls_of_each_store() -> None:
    registry = CollectorRegistry()
    metrics = RemoteStorageMetrics(registry, "s3")
    calls = (("put_object", RetriableRemoteStorageError), ("fetch_log_segment", RemoteResourceNotFoundError))
    for operation, error in calls:
        with suppress(error), metrics.call(operation):
            raise error("x")
    with metrics.call("put_object"):
        (store,) = process_report(registry, CountedParts()).stores
    assert (store.store, store.requests, store.errors, store.in_flight) == ("s3", 3, 1, 1)
    assert sum(store.reads) == store.reads[0] == 1


def test_a_report_has_the_bytes_that_were_copied() -> None:
    registry = CollectorRegistry()
    metrics = RemoteLogManagerMetrics(registry)
    metrics.copy_bytes.labels("orders").inc(10)
    metrics.copy_bytes.labels("audit").inc(5)
    report = process_report(registry, CountedParts(backlog_bytes=lambda: 77))
    assert (report.counts.copied_bytes, report.backlog_bytes) == (15, 77)
