"""Finds settings with which no process can work, before it contacts the cluster: also the files that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from proxy.config import TidegateConfig
from proxy.process.admin.access import admin_access
from proxy.process.tracing import require_tracing
from proxy.wire.tls import listener_tls
from tiers.access.open_tier import open_key_ring
from tiers.broker.tls import TlsError
from tiers.config.managers import create_record_log, create_storage
from tiers.config.tier_config import METADATA_MANAGER, ConfigError
from tiers.config.upstream_config import upstream_tls


def settings_mistakes(config: TidegateConfig) -> Iterator[str]:
    """Yields one line per mistake, which names the section, the key and the file."""
    is_one = len(config.listener) == 1
    tried: list[tuple[str, Callable[[], object]]] = [
        *(("" if is_one else f"{each.name}: ", partial(listener_tls, each.tls)) for each in config.listener),
        ("", partial(admin_access, config.admin)),
        ("", partial(upstream_tls, config.upstream)),
        ("", partial(require_tracing, config)),
    ]
    if config.is_tiered and config.storage is not None:
        store = partial(create_storage, config.storage, "unknown")
        tried += [("", partial(open_key_ring, config)), (f"[storage] {config.storage.implementation}: ", store)]
        if not config.remote_log.is_topic_based:
            known = config.remote_log
            record_log = partial(create_record_log, known.metadata_manager, known.plain_metadata_settings())
            tried.append((f"{METADATA_MANAGER}: ", record_log))
        tried.append(("", partial(_require_own_folder, config)))
    for place, read in tried:
        try:
            read()
        except (ConfigError, TlsError, ValueError) as error:
            yield f"{place}{error}"


def _require_own_folder(config: TidegateConfig) -> None:
    """Raises `ConfigError` if the store keeps its objects in the folder of the state."""
    path = "" if config.storage is None else config.storage.plain_settings().get("path", "")
    is_local = config.storage is not None and config.storage.implementation == "local"
    if is_local and Path(path).resolve() == config.state.path.resolve():
        raise ConfigError(f"[state] path: {config.state.path} is the folder of [storage]: change one of them")
