"""`Limits`: the limits of connections."""

from __future__ import annotations

from proxy.config import LimitsConfig
from tiers.config.settings import MIB


class Limits(LimitsConfig):
    """The limits of connections: those of the file, and those that only code sets."""

    connection_setup_timeout_ms: int = 30_000
    """How long a client may stay unknown, from the accept on. PROXY header and TLS handshake are included."""
    max_unauthenticated_request_bytes: int = MIB // 2
    """The maximum size of a request before the client has authenticated, if the brokers ask for SASL."""
    max_held_request_bytes: int = MIB
    """The maximum size of a request of an API that the proxy decodes. A Fetch has about 33 bytes per partition."""
    max_held_response_bytes: int = 128 * MIB
    """The maximum size of a response that the proxy decodes as a whole."""
    max_in_flight: int = 256
    """The number of unanswered requests per connection."""
    connect_timeout_ms: int = 5_000
    """The deadline of one attempt to connect to a broker."""
    connect_deadline_ms: int = 20_000
    """The deadline of all attempts to connect to a broker, while the client waits."""
    idle_timeout_ms: int = 600_000
    """The time after which the proxy closes an idle connection that has no connection to a broker, or whose broker no
    longer reads or answers. The brokers close the others."""
    send_timeout_ms: int = 300_000
    """The time after which the proxy closes the connection of a client that does not receive its responses. The time
    begins again whenever the client has received 256 KiB."""
    half_close_timeout_ms: int = 5_000
    """How long the proxy still answers a client that has stopped sending, and how long a proxy that stops waits for a
    long poll of a share group, and for requests behind the long poll of a Fetch."""

    @classmethod
    def of(cls, config: LimitsConfig) -> Limits:
        return cls(**dict(config))
