"""The registry of metrics, docs/metrics.md, and what the code exposes are the same."""

from __future__ import annotations

import ast
import asyncio
import re
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from proxy.admin.facts import ProcessState
from proxy.commands.metrics_reference import all_metrics, reference
from proxy.handlers.fetch.handler import RemoteFetchMetrics
from proxy.metrics import CLOSE_CAUSES, REJECT_REASONS, ProxyMetrics, register_build_info
from proxy.process.admin.process_alarms import ProcessAlarms
from proxy.process.admin.process_state import register_state
from proxy.process.checks.loop_latency import LoopLatency
from proxy.wire.admission import Limit
from tests.support.fakes.fetch_bench import P0, bench_of
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.metric_names import series_per_partition, series_per_topic
from tests.support.repository import ROOT
from tiers.config.topic_policy import TierWork
from tiers.fitness import UNFIT
from tiers.metadata.topic.metrics import RemoteLogMetadataMetrics
from tiers.metric_spec import FROM_THE_START, MetricSpec, specs_of
from tiers.reader.metrics import RemoteLogReaderMetrics
from tiers.reader.read_accounts import MAX_CLIENTS, MAX_TOPICS, OTHERS
from tiers.storage.circuit_breaker import CircuitBreakers
from tiers.storage.metrics import RemoteStorageMetrics, WriteCircuitMetrics
from tiers.tasks.metrics import BOUNDS, STAGES, RemoteLogManagerMetrics

WRITTEN, MARK, GENERATED = (ROOT / "docs" / "metrics.md").read_text().partition("<!-- generated from the code -->\n")
LABELS = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", WRITTEN, re.MULTILINE))
_TEXTS = {".py", ".md", ".yaml", ".json"}
SPECS = {spec.name: spec for spec in all_metrics()}
MAKERS = {"Counter", "Gauge", "Histogram", "Summary"} | {
    f"{kind}MetricFamily" for kind in ("Counter", "Gauge", "Histogram", "Summary", "Info", "StateSet", "Untyped")
}
OF_ALL_PROCESSES = {"tidegate_process_up", "tidegate_process_restarts", "tidegate_remote_reader_shared_bytes"}
"""The metrics that only a proxy with workers has."""


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("tiers", "proxy"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def test_the_page_is_generated_from_the_registry() -> None:
    assert reference() == GENERATED, f"python -m proxy.commands.metrics_reference prints what follows {MARK}"


def test_every_metric_is_made_from_a_spec() -> None:
    for path, module in sources():
        imported = {
            name.name
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prometheus_client")
            for name in node.names
        }
        called = {
            node.func.id for node in ast.walk(module) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        if path.name != "metric_spec.py":
            assert not imported & called & MAKERS, path


def test_every_spec_is_in_the_registry() -> None:
    declared: list[MetricSpec[Any, Any]] = []
    for path, module in sources():
        makes = any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Spec")
            for node in ast.walk(module)
        )
        if makes:
            declared += specs_of(import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)))
    assert len(declared) > 50
    assert sorted(spec.name for spec in declared) == sorted(SPECS)


def test_the_names_follow_the_rules_of_prometheus() -> None:
    for spec in SPECS.values():
        assert re.fullmatch(r"tidegate(_[a-z]+)+", re.sub(r"_\d+", "", spec.name)), spec.name
        assert not spec.name.endswith("_total")
        assert spec.meaning.endswith(".")
        if spec.unit in ("bytes", "seconds") and spec.kind == "gauge":
            assert f"_{spec.unit}" in spec.name
        assert set(spec.labels) <= LABELS.keys()


def test_every_label_has_a_bound() -> None:
    assert LABELS.keys() == {label for spec in SPECS.values() for label in spec.labels}
    values: dict[str, Iterable[str]] = {
        "bound": BOUNDS,
        "cause": CLOSE_CAUSES,
        "stage": STAGES,
        "state": ProcessState,
        "work": TierWork,
    }
    assert {label for label, each in values.items() if f"`{'`, `'.join(each)}`" not in LABELS[label]} == set()


def test_the_page_has_the_bounds_of_the_series() -> None:
    said = " ".join(WRITTEN.split())
    of_client = sum("client_id" in spec.labels for spec in SPECS.values())
    assert f"A client id adds {of_client} series for each topic" in said
    assert f"at most {MAX_CLIENTS} client ids, and at most {MAX_TOPICS} topics of each" in said
    assert f"at most {MAX_CLIENTS} in a process, the rest is `{OTHERS}`" in LABELS["client_id"]
    assert f"A topic adds {series_per_topic()} series" in said
    assert f"A partition adds {series_per_partition()} series" in said


@pytest.fixture
async def scraped(tmp_path: Path) -> list[tuple[str, str, list[Sample]]]:
    """The families of a process that has done nothing: name, type and samples."""
    registry = CollectorRegistry()
    async with bench_of(tmp_path) as bench:
        register_build_info(registry)
        registry.register(ProxyMetrics())
        register_state(registry, lambda: ProcessState.SERVING)
        registry.register(ProcessAlarms())
        registry.register(LoopLatency(asyncio.get_running_loop(), time.monotonic))
        UNFIT.metric(registry)
        registry.register(RemoteFetchMetrics(bench.handler))
        registry.register(RemoteLogReaderMetrics(bench.reader))
        registry.register(WriteCircuitMetrics(CircuitBreakers(lambda: 0)))
        RemoteStorageMetrics(registry, "local")
        registry.register(RemoteLogMetadataMetrics(InMemoryRemoteLogMetadataManager(lambda: 0, lambda: 0).log.status))
        metrics = RemoteLogManagerMetrics(registry)
        metrics.add(P0)
        return [(family.name, family.type, family.samples) for family in registry.collect()]


async def test_every_metric_exists_from_the_start(scraped: list[tuple[str, str, list[Sample]]]) -> None:
    found = {name for name, _, samples in scraped if samples}
    missing = {spec.name for spec in SPECS.values() if spec.since == FROM_THE_START} - found
    assert missing - OF_ALL_PROCESSES == set()


async def test_what_is_exposed_has_the_type_and_labels_of_its_spec(
    scraped: list[tuple[str, str, list[Sample]]],
) -> None:
    for name, kind, samples in scraped:
        spec = SPECS[name]
        assert kind == spec.kind
        for sample in samples:
            assert set(sample.labels) - {"le", "quantile"} == set(spec.labels), sample


def test_clients_can_add_no_series() -> None:
    """Clients choose the API keys. Everything else that a client causes has a name of the code."""
    metrics = ProxyMetrics()
    size = len([sample for family in metrics.collect() for sample in family.samples])
    for api_key in range(-1000, 1000):
        metrics.requests[api_key] += 1
        metrics.observe(api_key, "none", 0.001)
    families = {family.name: family.samples for family in metrics.collect()}
    apis = {sample.labels["api"] for sample in families["tidegate_requests"]}
    grown = len(
        {(sample.labels["api"], sample.labels["tier"]) for sample in families["tidegate_request_latency_seconds"]}
    )
    assert len(families["tidegate_requests"]) == len(apis)
    assert grown == len(apis) + 2
    others = sum(len(samples) for name, samples in families.items() if name != "tidegate_request_latency_seconds")
    assert others < size


def test_the_causes_and_reasons_are_those_of_the_code() -> None:
    """A cause is the first argument of these calls, or that of a limit."""
    causes = {limit.cause for limit in Limit} | {"client"}
    for path, module in sources():
        if path.parent.name != "wire":
            continue
        for node in ast.walk(module):
            match node:
                case (
                    ast.Call(func=ast.Attribute(attr="close" | "abort" | "end" | "_failed"), args=[argument, *_])
                    | ast.Call(func=ast.Attribute(attr="_start_timer"), args=[_, argument])
                ):
                    causes |= {
                        each.value
                        for each in ast.walk(argument)
                        if isinstance(each, ast.Constant) and isinstance(each.value, str)
                    }
    assert causes == set(CLOSE_CAUSES)
    assert {limit for limit in Limit if limit.cause != "setup_timeout"} <= set(REJECT_REASONS)


def test_rules_documents_and_tests_name_metrics_that_exist() -> None:
    """A regular expression names the beginning of a metric."""
    exposed = {f"{name}{suffix}" for name in SPECS for suffix in ("", "_total", "_bucket", "_sum", "_count")}
    families = {"_".join(name.split("_")[:2]) for name in exposed}
    files = (path for folder in ("tests", "bench", "deploy", "docs") for path in (ROOT / folder).rglob("*.*"))
    texts = (path.read_text() for path in (ROOT / "README.md", *files) if path.suffix in _TEXTS)
    named = {word for text in texts for word in re.findall(r"\btidegate_[a-z0-9_]+", text)}
    assert {
        word
        for word in named
        if "_".join(word.split("_")[:2]) in families and not any(name.startswith(word) for name in exposed)
    } == set()
