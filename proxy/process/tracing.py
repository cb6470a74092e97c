"""Opens the tracer of a process. Without traces, nothing of OpenTelemetry's SDK is imported."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import Tracer

from proxy.config import TidegateConfig
from proxy.version import installed_version
from tiers.broker.client import monotonic_ms
from tiers.config.tier_config import ConfigError
from tiers.storage.activity import BlockingCalls

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

FLUSH_S: Final = 2.0
"""How long the end of the process waits for the last spans to leave."""


def require_tracing(config: TidegateConfig) -> None:
    """Raises `ConfigError` if the settings ask for traces and `open_tracer` would fail."""
    if config.tracing.enabled:
        _provider().shutdown()


def open_tracer(stack: AsyncExitStack, config: TidegateConfig) -> Tracer | None:
    """Opens the tracer, and the stack closes it. None: the settings ask for no traces. Raises `ConfigError`.

    Open it before the parts that it traces. It closes after them, so that their last spans leave."""
    if not config.tracing.enabled:
        return None
    provider = _provider()
    stack.push_async_callback(flush, provider)
    return provider.get_tracer("tidegate", installed_version())


async def flush(provider: TracerProvider) -> None:
    """Sends the spans in the queue, for at most `FLUSH_S`. The rest is dropped."""
    calls = BlockingCalls("tracing", 1)
    with suppress(TimeoutError):
        await calls.run(lambda _: provider.shutdown(), FLUSH_S)
    calls.close()


def _provider() -> TracerProvider:
    """Raises `ConfigError` if the extra is not installed, or if OpenTelemetry cannot use its variables."""
    try:
        from proxy.process.open_telemetry import batches_to_collector, provider_of

        return provider_of(installed_version(), batches_to_collector(monotonic_ms))
    except ImportError as error:
        raise ConfigError(f"[tracing] {error}") from error
    except ValueError as error:
        raise ConfigError(f"[tracing] OpenTelemetry cannot use its environment variables: {error}") from error
