from __future__ import annotations

import aiohttp
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from protocol.api_keys import ApiKey
from proxy.metrics import ProxyMetrics
from proxy.process.admin.http import Health, admin_http


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


async def test_a_proxy_that_serves_may_have_problems() -> None:
    stopping, reasons = list[str](), ["the cluster was not read yet", "the topic is missing"]
    health = Health(lambda: stopping, lambda: reasons)
    async with admin_http(("127.0.0.1", 0), CollectorRegistry(), health) as (_, port):
        assert await get(port, "/livez") == (200, "live\n")
        assert await get(port, "/readyz") == (503, "the cluster was not read yet\nthe topic is missing\n")
        assert await get(port, "/servez") == (200, "serving\n")
        reasons.clear()
        assert await get(port, "/readyz") == (200, "ready\n")
        stopping += ["state: DRAINING", "stopping"]
        assert await get(port, "/servez") == (503, "state: DRAINING\nstopping\n")


async def test_metrics_are_prometheus_text_with_latency_by_api_and_tier() -> None:
    registry = CollectorRegistry()
    metrics = ProxyMetrics()
    registry.register(metrics)
    metrics.requests[ApiKey.FETCH] += 2
    metrics.requests[12345] += 1
    metrics.requests[-7] += 1
    metrics.observe(ApiKey.FETCH, "local", 0.0015)
    metrics.observe(ApiKey.FETCH, "remote", 0.3)
    metrics.observe(ApiKey.FETCH, "remote", 99.0)
    async with admin_http(("127.0.0.1", 0), registry, Health(list, list)) as (_, port):
        status, text = await get(port, "/metrics")
    assert status == 200
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["tidegate_requests_total", "Fetch"] == 2
    assert samples["tidegate_requests_total", "Unknown"] == 2
    assert samples["tidegate_request_latency_seconds_bucket", "0.001", "Fetch", "local"] == 0
    assert samples["tidegate_request_latency_seconds_bucket", "0.002", "Fetch", "local"] == 1
    assert samples["tidegate_request_latency_seconds_bucket", "0.5", "Fetch", "remote"] == 1
    assert samples["tidegate_request_latency_seconds_count", "Fetch", "remote"] == 2
