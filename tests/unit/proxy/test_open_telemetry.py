"""The spans that a collector of OpenTelemetry gets, and how little the collector can do to the proxy."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from protocol.apis.fetch.request import parse_fetch_request
from protocol.header import parse_request_header
from proxy import cli
from proxy.handlers.base import FetchSettings
from proxy.handlers.fetch.trace import ABANDONED, begin_trace
from proxy.process import open_telemetry, tracing
from proxy.process.open_telemetry import batches_to_collector, provider_of
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fetch_frames import fetch_frame
from tests.support.fakes.fetch_bench import P0, ask, ask_local, bench_of, codes, records
from tests.support.marks import full
from tests.support.repository import ROOT
from tests.support.servers.collector import running_collector
from tests.support.servers.ports import free_ports
from tests.support.tiers.waiting import until
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.errors import RemoteStorageError
from tiers.tracing import fail, traceparent, within_named

ALL, NONE = "1", "0"
TRACING = '[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[admin]\nport = 0\n[tracing]\nenabled = true\n'
MISSING = "[tracing] opentelemetry is missing: run `pip install '.[otel]'` in the clone of Tidegate"


@pytest.fixture(autouse=True)
def all_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ALL)


def tracer_to(processor: SpanProcessor) -> Tracer:
    return provider_of("1.2", processor).get_tracer("tidegate")


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(memory: InMemorySpanExporter) -> Tracer:
    return tracer_to(SimpleSpanProcessor(memory))


@pytest.fixture(autouse=True)
def own_loggers() -> Iterator[None]:
    """The tracer of a process takes over the library's loggers. A test gives them back."""
    loggers = [logging.getLogger(name) for name in ("opentelemetry", "opentelemetry.exporter")]
    before = [(each, each.handlers[:], each.propagate) for each in loggers]
    yield
    for each, handlers, propagate in before:
        each.handlers[:], each.propagate = handlers, propagate


def by_name(memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = memory.get_finished_spans()
    found = {span.name: span for span in spans}
    assert len(found) == len(spans)
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_fetch_over_both_tiers_is_one_trace(
    memory: InMemorySpanExporter, tracer: Tracer, tmp_path: Path
) -> None:
    async with bench_of(tmp_path, tracer=tracer) as bench:
        response = await bench.fetch(
            13, ask(13, 60, max_bytes=1), ask_local(13, 0), min_bytes=1_000, max_wait_ms=60_000
        )
        assert codes(response) == [0, 0]
        segment = bench.tier.state.remote_log_segment_metadata(P0, 60)
    assert segment is not None
    spans = by_name(memory)
    assert len({span.context.trace_id for span in spans.values() if span.context is not None}) == 1
    names = {span.context.span_id: name for name, span in spans.items() if span.context is not None}
    assert {
        name: (span.kind.name, None if span.parent is None else names[span.parent.span_id])
        for name, span in spans.items()
    } == {
        "Fetch": ("SERVER", None),
        "forward Fetch": ("CLIENT", "Fetch"),
        "judge": ("INTERNAL", "Fetch"),
        "purgatory": ("INTERNAL", "Fetch"),
        "read orders": ("INTERNAL", "Fetch"),
        "fetch_indexes": ("CLIENT", "read orders"),
        "fetch_log_segment": ("CLIENT", "read orders"),
    }
    sizes = [len(records(response, index)) for index in (0, 1)]
    assert attributes(spans["forward Fetch"]) == {
        "messaging.system": "kafka",
        "tidegate.kafka.node_id": 1,
        "tidegate.fetch.out_of_range_partitions": 1,
        "tidegate.answer.local_bytes": sizes[1],
    }
    partition = {
        "messaging.system": "kafka",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "tidegate.segment.id": str(segment.segment_id.id),
    }
    assert attributes(spans["read orders"]) == {
        **partition,
        "messaging.kafka.offset": 60,
        "tidegate.topic.id": str(P0.topic_id),
        "tidegate.read.max_bytes": 1,
        "tidegate.read.bytes": sizes[0],
        "tidegate.chunk_cache": "miss",
    }
    ((start, end),) = bench.tier.storage.gets
    assert attributes(spans["fetch_log_segment"]) == {
        **partition,
        "tidegate.store.start_position": start,
        "tidegate.store.end_position": end,
        "tidegate.store.bytes": end - start + 1,
    }
    fetch, verdicts = attributes(spans["Fetch"]), attributes(spans["judge"])["tidegate.verdicts"]
    assert (fetch["messaging.client.id"], fetch["tidegate.answer.remote_bytes"]) == ("test", sizes[0])
    assert (verdicts, attributes(spans["purgatory"])["tidegate.completion"]) == (("remote",), "satisfied")
    assert {span.status.status_code.name for span in spans.values()} == {"UNSET"}
    resource = dict(spans["Fetch"].resource.attributes)
    assert (resource["service.name"], resource["service.version"]) == ("tidegate", "1.2")


async def test_an_error_is_on_its_span_and_on_the_whole_fetch(
    memory: InMemorySpanExporter, tracer: Tracer, tmp_path: Path
) -> None:
    async with bench_of(tmp_path, tracer=tracer) as bench:
        bench.tier.storage.failures.append(RemoteStorageError("access denied"))
        await bench.fetch(13, ask(13, 60, max_bytes=1))
    spans = by_name(memory)
    failed = {name: span for name, span in spans.items() if span.status.status_code.name == "ERROR"}
    assert {name: attributes(span)["error.type"] for name, span in failed.items()} == {
        "Fetch": "REPLICA_NOT_AVAILABLE",
        "read orders": "RemoteStorageError",
        "fetch_log_segment": "RemoteStorageError",
    }
    get = failed["fetch_log_segment"]
    assert get.status.description == "access denied"
    assert [event.name for event in get.events] == ["exception"]


async def test_a_chunk_in_memory_needs_no_call_of_the_store(
    memory: InMemorySpanExporter, tracer: Tracer, tmp_path: Path
) -> None:
    """A Fetch of the local tier has no trace."""
    async with bench_of(tmp_path, tracer=tracer) as bench:
        await bench.fetch(13, ask(13, 60, max_bytes=1))
        memory.clear()
        assert records(await bench.fetch(13, ask(13, 60, max_bytes=1)))
        assert records(await bench.fetch(13, ask(13, 150), ask_local(13, 0)))
    spans = by_name(memory)
    assert spans.keys() == {"Fetch", "forward Fetch", "judge", "purgatory", "read orders"}
    assert attributes(spans["read orders"])["tidegate.chunk_cache"] == "hit"


async def test_a_fetch_names_the_trace_whose_slow_read_it_uses(
    memory: InMemorySpanExporter, tracer: Tracer, tmp_path: Path
) -> None:
    settings = FetchSettings(local_poll_ms=20, remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000))
    async with bench_of(tmp_path, settings, tracer=tracer) as bench, asyncio.timeout(60):
        await bench.fetch(13, ask(13, 0))
        memory.clear()
        bench.tier.storage.gate = asyncio.Event()
        assert records(await bench.fetch(13, ask(13, 60), ask_local(13, 0)), 0) == b""
        bench.tier.storage.gate.set()
        assert records(await bench.until_remote(13, ask(13, 60), ask_local(13, 0)), 0)
    spans = memory.get_finished_spans()
    first = next(span.context for span in spans if span.name == "Fetch")
    assert first is not None
    waits = [[link.context.span_id for link in span.links] for span in spans if span.name == "purgatory"]
    assert waits[:2] == [[], [first.span_id]]
    assert [span.parent and span.parent.span_id for span in spans if span.name == "read orders"] == [first.span_id]


async def test_a_foreseen_fetch_that_is_abandoned_ends_its_spans(
    memory: InMemorySpanExporter, tracer: Tracer, tmp_path: Path
) -> None:
    async with bench_of(tmp_path, tracer=tracer) as bench:
        await bench.fetch(13, ask(13, 0))
        memory.clear()
        exchange = FakeExchange(bench.cluster, fetch_frame(13, [ask(13, 0)]))
        bench.handler.on_request(exchange)
        await asyncio.sleep(0)
        assert "Fetch" not in by_name(memory)
        assert exchange.on_abandoned is not None
        exchange.on_abandoned()
        assert exchange.on_sent is not None
        exchange.on_sent()
        assert bench.handler.held_bytes == 0
        spans = by_name(memory)
    assert {attributes(spans[name])["error.type"] for name in ("Fetch", "forward Fetch")} == {ABANDONED}


async def test_a_span_begins_when_the_request_arrived(
    memory: InMemorySpanExporter, tracer: Tracer, tmp_path: Path
) -> None:
    async with bench_of(tmp_path, tracer=tracer) as bench:
        exchange = FakeExchange(bench.cluster, fetch_frame(13, [ask(13, 60)]))
        frame = exchange.request.frame
        parsed = parse_fetch_request(frame, parse_request_header(frame).body_position, 13)
        before_ns = time.time_ns()
        trace = begin_trace(tracer, exchange, parsed, "test", exchange.request.received_at_ms + 600)
        assert trace is not None
        trace.ends_after(lambda: None)()
    for span in by_name(memory).values():
        assert span.start_time is not None
        assert 0 <= span.start_time + 600 * 1_000_000 - before_ns <= time.time_ns() - before_ns


async def test_a_fetch_that_is_not_sampled_has_no_spans(
    memory: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", NONE)
    tracer = tracer_to(SimpleSpanProcessor(memory))
    async with bench_of(tmp_path, tracer=tracer) as bench:
        assert records(await bench.fetch(13, ask(13, 60)))
    assert memory.get_finished_spans() == ()


def test_a_span_continues_in_another_process(
    memory: InMemorySpanExporter, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_memory = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", NONE)  # the process that began the trace has decided
    other = tracer_to(SimpleSpanProcessor(other_memory))
    fetch = tracer.start_span("Fetch")
    other.start_span("read orders", within_named(traceparent(fetch))).end()
    fetch.end()
    (parent,), (child,) = memory.get_finished_spans(), other_memory.get_finished_spans()
    assert parent.context is not None
    assert child.parent is not None
    assert (child.parent.trace_id, child.parent.span_id) == (parent.context.trace_id, parent.context.span_id)


def test_long_texts_are_cut(memory: InMemorySpanExporter, tracer: Tracer) -> None:
    fetch = tracer.start_span("Fetch", attributes={"messaging.client.id": "x" * 30_000})
    fail(fetch, RemoteStorageError("y" * 30_000))
    fetch.end()
    (span,) = memory.get_finished_spans()
    assert (attributes(span)["messaging.client.id"], span.status.description) == ("x" * 1_000, "y" * 1_000)


@pytest.fixture
def quick_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")


@pytest.mark.usefixtures("quick_batches")
async def test_a_collector_that_refuses_costs_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=tiers")
    caplog.set_level(logging.INFO)
    async with running_collector() as collector, asyncio.timeout(60):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.endpoint}/")
        provider = provider_of("1.2", batches_to_collector(monotonic_ms))
        tracer = provider.get_tracer("tidegate")
        collector.status = 401
        for _ in range(3):
            tracer.start_span("Fetch").end()
            await collector.refusals.acquire()
        collector.status = 200
        tracer.start_span("Fetch").end()
        assert (await collector.arrived.get()).name == "Fetch"
        assert collector.headers["x-team"] == "tiers"
        tracer.start_span("Fetch").end()
        await tracing.flush(provider)
        assert len(collector.taken()) == 1
    began, ended = (record for record in caplog.records if record.name == open_telemetry.__name__)
    assert began.message == "the collector takes no traces"
    assert vars(began)["collector"] == f"{collector.endpoint}/"
    assert "401" in vars(began)["error"]
    assert (ended.message, vars(ended)["times"]) == ("the collector takes traces again", 3)
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


@pytest.mark.usefixtures("quick_batches")
@pytest.mark.parametrize(
    "url", ["localhost:4318", "http://user:secret@localhost:4318", "http://localhost?token=secret"]
)
def test_a_collector_without_a_scheme_or_with_a_secret_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log shows the URL."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    with pytest.raises(ValueError, match=r"^OTEL_EXPORTER_OTLP_ENDPOINT must (be|have no)") as refused:
        batches_to_collector(monotonic_ms)
    assert "secret" not in str(refused.value)


async def test_a_dead_collector_holds_up_neither_a_fetch_nor_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_S", 0.01)
    (port,) = free_ports(1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")  # the library gives up at once
    provider = provider_of("1.2", batches_to_collector(monotonic_ms))
    tracer = provider.get_tracer("tidegate")
    async with bench_of(tmp_path, tracer=tracer) as bench, asyncio.timeout(60):
        for offset in (0, 60):
            assert records(await bench.fetch(13, ask(13, offset)))
        await until(lambda: "the collector takes no traces" in caplog.messages)
        await tracing.flush(provider)
    said = [record for record in caplog.records if record.name == open_telemetry.__name__]
    assert [record.message for record in said] == ["the collector takes no traces"]
    assert vars(said[0])["error"]


async def test_an_export_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, reached = threading.Event(), threading.Event()

    class Hangs(SpanProcessor):
        def shutdown(self) -> None:
            reached.set()
            hanging.wait()

    monkeypatch.setattr(tracing, "FLUSH_S", 0.01)
    await tracing.flush(provider_of("1.2", Hangs()))
    assert reached.wait(60)
    hanging.set()


def test_a_proxy_without_traces_imports_no_sdk() -> None:
    program = (
        "import sys, proxy.cli, proxy.process.child\n"
        "print(*(name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))))"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "\n"


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "proxy.process.open_telemetry")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)


@pytest.mark.usefixtures("without_extra")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_proxy_without_the_extra_does_not_start(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tidegate.toml"
    config.write_text(f"workers = {workers}\n{TRACING}")
    assert cli.run(["serve", "--config", str(config)]) == 2
    assert capsys.readouterr().err == f"tidegate: {MISSING}\n"
    cli.run(["check", "--config", str(config)])
    assert f"problem: {MISSING}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        *full(("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"), ("OTEL_TRACES_SAMPLER_ARG", "1.5")),
    ],
)
def test_a_variable_that_opentelemetry_refuses_is_one_line(name: str, value: str, tmp_path: Path) -> None:
    config = tmp_path / "tidegate.toml"
    config.write_text(TRACING)
    command = [sys.executable, "-m", "tidegate", "serve", "--config", str(config)]
    environment = {**os.environ, name: value}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("tidegate: [tracing] OpenTelemetry cannot use its environment variables: ")
    assert ended.returncode == 2
