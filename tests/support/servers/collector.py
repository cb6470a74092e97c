"""A collector of traces on the test's event loop: it takes OTLP over HTTP, and keeps the spans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from tests.support.servers.ports import free_ports


@dataclass(frozen=True)
class TakenSpan:
    """`parent` is empty for the root of a trace. `resource` has the attributes of the process."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    attributes: dict[str, str | int]
    resource: dict[str, str | int]


class Collector:
    """Answers with `status`. `arrived` has each span that it took, in order."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.status = 200
        self.arrived: asyncio.Queue[TakenSpan] = asyncio.Queue()
        self.refusals = asyncio.Semaphore(0)
        self.headers: dict[str, str] = {}
        """Those of the last request."""

    def taken(self) -> list[TakenSpan]:
        """Removes and returns the spans that have arrived."""
        return [self.arrived.get_nowait() for _ in range(self.arrived.qsize())]

    async def take(self, request: web.Request) -> web.Response:
        self.headers = dict(request.headers)
        body = await request.read()
        if self.status != 200:
            self.refusals.release()
            return web.Response(status=self.status)
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(sent.resource.attributes)
            for span in (span for scope in sent.scope_spans for span in scope.spans):
                self.arrived.put_nowait(
                    TakenSpan(
                        span.name, span.trace_id, span.span_id, span.parent_span_id, _values(span.attributes), resource
                    )
                )
        return web.Response()


@asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    (port,) = free_ports(1)
    collector = Collector(port)
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield collector
    finally:
        await runner.cleanup()


def _values(attributes: list[KeyValue]) -> dict[str, str | int]:
    """Returns the attributes whose values are texts or integers."""
    found: dict[str, str | int] = {}
    for each in attributes:
        match each.value.WhichOneof("value"):
            case "string_value":
                found[each.key] = each.value.string_value
            case "int_value":
                found[each.key] = each.value.int_value
    return found
