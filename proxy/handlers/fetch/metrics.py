"""Prometheus metrics of Fetches that wait for the remote tier: their purgatory, and the memory of held answers.

tidegate_remote_fetch_pending                  Fetches that wait now
tidegate_remote_fetch_completed_total          Fetches that have waited; completion = satisfied | expired | cancelled
tidegate_remote_fetch_held_bytes               bytes reserved for held answers
tidegate_remote_fetch_in_neither_tier_total    ALARM: a fetched offset above the log start is in no tier and no gap
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.handlers.fetch.delayed import Completion
from proxy.handlers.fetch.handler import FetchHandler


class RemoteFetchMetrics(Collector):
    def __init__(self, handler: FetchHandler) -> None:
        self._handler = handler

    def collect(self) -> Iterator[Metric]:
        purgatory = self._handler.purgatory
        name = "tidegate_remote_fetch"
        yield GaugeMetricFamily(
            f"{name}_pending", "Fetches that wait for the remote tier now.", value=purgatory.pending_count
        )
        completed = CounterMetricFamily(
            f"{name}_completed", "Fetches that have waited for the remote tier.", labels=["completion"]
        )
        for completion in Completion:
            completed.add_metric([completion.value], purgatory.completed[completion])
        yield completed
        yield GaugeMetricFamily(
            f"{name}_held_bytes", "Bytes reserved for held answers.", value=self._handler.held_bytes
        )
        yield CounterMetricFamily(
            f"{name}_in_neither_tier",
            "Fetched offsets above the log start that are in no tier and in no recorded gap: alarm on any increase.",
            value=self._handler.in_neither_tier_count,
        )
