"""`Role`: the work of one process, with the defaults of a process that serves no clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from proxy.admin.facts import ProcessState
from proxy.config import TidegateConfig
from proxy.metrics import ProxyMetrics
from proxy.process.admin.process_state import SERVES_NO_CLIENTS
from proxy.process.admin.process_view import ProcessView
from proxy.process.checks.open_files import raise_open_files
from proxy.process.live_settings import LiveSettings
from proxy.wire.error_log import Incident
from tiers.config.upstream_config import broker_client


class Role(ABC):
    """Each method opens its parts on a stack, and the stack closes them."""

    def __init__(
        self, config: TidegateConfig, registry: CollectorRegistry, metrics: ProxyMetrics | None = None
    ) -> None:
        self.client = broker_client(config.upstream)
        self.view = ProcessView(registry, metrics)
        self._live = LiveSettings(config)
        self._registry = registry
        self._stops = False

    @property
    def state(self) -> ProcessState:
        if self._stops:
            return ProcessState.DRAINING
        return ProcessState.SERVING if self._has_begun() else ProcessState.INITIALIZING

    @abstractmethod
    def _has_begun(self) -> bool:
        """Returns whether everything is open that the process works with."""

    def not_serving(self) -> list[str]:
        """Returns why the process can serve no client at all, one line each."""
        return [SERVES_NO_CLIENTS]

    @abstractmethod
    def not_ready(self) -> list[str]:
        """Returns the reasons of `not_serving`, and the problems of a process that serves."""

    def errors(self) -> Sequence[Incident]:
        """Returns the last incidents of connections, the oldest first."""
        return ()

    async def open(self, stack: AsyncExitStack) -> None:
        """Binds ports, and opens the parts that do not need the remote tier. Changes neither cluster nor store.

        Raises `BrokerRefusedError`, and `OSError` if a port cannot be bound."""
        raise_open_files()
        stack.push_async_callback(self.client.close)

    @abstractmethod
    async def open_tier(self, stack: AsyncExitStack) -> None:
        """Opens the remote tier. Has no deadline, but the caller may cancel it.

        Raises `RemoteTierError` and `BrokerRefusedError`."""

    @abstractmethod
    def serve(self, stack: AsyncExitStack) -> None:
        """Starts to serve. Raises `OSError` if a port cannot be bound."""

    def change(self, config: TidegateConfig) -> None:
        """Applies settings that need no restart, also to parts that open later. All others are as before."""
        self._live.change(config)

    async def drain(self) -> None:
        self._stops = True
