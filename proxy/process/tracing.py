"""Opens the tracer of a process. Without `[tracing]`, nothing of OpenTelemetry is imported."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from proxy.config import TidegateConfig
from proxy.version import installed_version
from tiers.broker.client import monotonic_ms
from tiers.config.tier_config import ConfigError
from tiers.tracing import Tracer


def require_tracing(config: TidegateConfig) -> None:
    """Raises `ConfigError` if the settings ask for traces and the extra that they need is not installed."""
    if config.tracing is None:
        return
    try:
        import proxy.process.open_telemetry  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"[tracing] {error}") from error


def open_tracer(stack: AsyncExitStack, config: TidegateConfig) -> Tracer | None:
    """Opens the tracer, and the stack closes it. None: the settings ask for no traces. Raises `ConfigError`.

    Open it before the parts that it traces. It closes after them, so that their last spans leave."""
    if config.tracing is None:
        return None
    require_tracing(config)
    from proxy.process.open_telemetry import OpenTelemetryTracer, batches_to, provider_of

    version = installed_version()
    provider = provider_of(config.tracing, version, batches_to(config.tracing, monotonic_ms))
    tracer = OpenTelemetryTracer(provider, version, monotonic_ms, time.time_ns)
    stack.push_async_callback(tracer.close)
    return tracer
