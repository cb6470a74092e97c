"""A worker of a proxy in the process of a test."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

from proxy.config import TidegateConfig
from proxy.process.app import Proxy
from proxy.process.remote_tier import WorkerPlace
from proxy.process.start.port_claims import PortClaims


def one_worker(config: TidegateConfig, stack: AsyncExitStack) -> Proxy:
    """Returns a worker that is not open. No other process reads the remote tier for it, or makes its changes."""
    claims = os.memfd_create("claims")
    stack.callback(os.close, claims)
    return Proxy(config, CollectorRegistry(), WorkerPlace("worker-1", b"", b""), PortClaims(claims))
