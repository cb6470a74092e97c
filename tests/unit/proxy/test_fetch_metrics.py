"""The read path's numbers are there on a scrape."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from proxy.handlers.fetch.handler import RemoteFetchMetrics
from tests.support.fakes.fetch_bench import ask, bench_of
from tiers.reader.metrics import RemoteLogReaderMetrics


async def test_a_scrape_tells_what_the_remote_tier_did(tmp_path: Path) -> None:
    async with bench_of(tmp_path) as bench, asyncio.timeout(60):
        registry = CollectorRegistry()
        registry.register(RemoteFetchMetrics(bench.handler))
        registry.register(RemoteLogReaderMetrics(bench.reader))
        await bench.fetch(13, ask(13, 0))
        await bench.fetch(13, ask(13, 0))
        lines = generate_latest(registry).decode().splitlines()
        samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert samples["tidegate_remote_fetch_pending"] == "0.0"
        assert float(samples['tidegate_remote_fetch_completed_total{completion="satisfied"}']) == 2
        assert samples["tidegate_remote_fetch_requests_total"] == "2.0"
        assert samples["tidegate_remote_fetch_errors_total"] == "0.0"
        served, downloaded = (
            float(samples[name])
            for name in (
                "tidegate_remote_fetch_bytes_total",
                'tidegate_remote_reader_downloaded_bytes_total{pool="chunk"}',
            )
        )
        assert served > downloaded > 0, "the second read came from the cache"
        assert float(samples['tidegate_remote_reader_downloaded_bytes_total{pool="index"}']) > 0
        assert samples["tidegate_remote_fetch_held_bytes"] == "0.0"
        assert samples["tidegate_remote_fetch_in_neither_tier_total"] == "0.0"
        assert float(samples['tidegate_remote_reader_cache_bytes{cache="chunk"}']) > 0
        assert float(samples['tidegate_remote_reader_cache_hits_total{cache="chunk"}']) > 0
        assert samples["tidegate_remote_reader_circuit_open"] == "0.0"
