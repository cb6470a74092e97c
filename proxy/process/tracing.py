"""Opens the tracer of a process. Without traces, nothing of OpenTelemetry is imported."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from proxy.config import TidegateConfig
from proxy.version import installed_version
from tiers.broker.client import monotonic_ms
from tiers.config.tier_config import ConfigError
from tiers.tracing import Tracer

if TYPE_CHECKING:
    from proxy.process.open_telemetry import OpenTelemetryTracer


def require_tracing(config: TidegateConfig) -> None:
    """Raises `ConfigError` if the settings ask for traces and `open_tracer` would fail."""
    if config.tracing.enabled:
        _tracer().discard()


def open_tracer(stack: AsyncExitStack, config: TidegateConfig) -> Tracer | None:
    """Opens the tracer, and the stack closes it. None: the settings ask for no traces. Raises `ConfigError`.

    Open it before the parts that it traces. It closes after them, so that their last spans leave."""
    if not config.tracing.enabled:
        return None
    tracer = _tracer()
    stack.push_async_callback(tracer.close)
    return tracer


def _tracer() -> OpenTelemetryTracer:
    """Raises `ConfigError` if the extra is not installed, or if OpenTelemetry cannot use its variables."""
    try:
        from proxy.process.open_telemetry import tracer_to_collector

        return tracer_to_collector(installed_version(), monotonic_ms, time.time_ns)
    except ImportError as error:
        raise ConfigError(f"[tracing] {error}") from error
    except ValueError as error:
        raise ConfigError(f"[tracing] OpenTelemetry cannot use its environment variables: {error}") from error
