"""Maps APIs to handlers. The requests of all other APIs pass through as opaque bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.wire.exchange import Handler, PrefixHandler


@dataclass(frozen=True, slots=True)
class Router:
    """The handlers by API key. An API key is in at most one of the two maps."""

    handlers: Mapping[int, Handler] = field(default_factory=dict)
    prefix_handlers: Mapping[int, PrefixHandler] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if both := self.handlers.keys() & self.prefix_handlers.keys():
            raise ValueError(f"API keys {sorted(both)} have two handlers")
