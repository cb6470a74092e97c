"""Fits the number of client connections to the number of files that the process may open.

A client's connection takes two files: its own socket, and that of its connection to a broker. If a process has no file
left, it accepts no client, and no connection gives way. So `max.connections` must be reached first.
"""

from __future__ import annotations

import logging
import resource
from contextlib import suppress

from proxy.config import LimitsConfig

logger = logging.getLogger(__name__)

_FILES_PER_CONNECTION = 2
_OTHER_FILES = 512
"""The files for everything but clients: the store, the caches, the metadata, the admin port."""
_ENOUGH = 1 << 20
"""The files of a process without a limit of connections."""


def fit_open_files(limits: LimitsConfig) -> LimitsConfig:
    """Raises the soft limit of open files as far as `limits` needs it, and the hard limit lets it.

    If the files do not suffice, logs a warning, and returns a lower limit of connections. Without a limit of
    connections, returns the limit that fits the files."""
    wanted = limits.max_connections
    needed = wanted * _FILES_PER_CONNECTION + _OTHER_FILES if wanted else _ENOUGH
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    # Half of a very low limit must suffice for everything else.
    fitting = max((soft - min(_OTHER_FILES, soft // 2)) // _FILES_PER_CONNECTION, 1)
    if wanted:
        logger.warning(
            "this process may open %d files, but %d connections need %d: it accepts %d connections. Raise the limit of "
            "open files (ulimit -n, or LimitNOFILE of systemd), or lower limits.max.connections",
            *(soft, wanted, needed, fitting),
        )
    return limits.model_copy(update={"max_connections": fitting})


def raise_open_files() -> None:
    """Raises the soft limit of open files as far as the hard limit lets it, for a process without clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
