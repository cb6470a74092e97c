"""Creates the storage manager and the log of the remote log metadata, by the names in the settings.

A name is that of an entry point of `STORAGE_GROUP` or `METADATA_GROUP`, or `module:Class`. Third parties may add entry
points to both groups.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

from tiers.broker.client import BrokerClient
from tiers.config.settings import TOPIC_BASED, StorageConfig
from tiers.config.tier_config import METADATA_PREFIX, STORAGE_PREFIX, TierConfig
from tiers.metadata.metadata_log import MetadataLog
from tiers.metadata.record_log import MetadataRecordLog, MetadataRecordLogFactory
from tiers.metadata.single_writer_log import SingleWriterLog
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.storage.locations import LocatedRemoteStorageManager, StorageLocation
from tiers.storage.metrics import RemoteStorageMetrics
from tiers.storage.remote_storage_manager import RemoteStorageManager, RemoteStorageManagerFactory
from tiers.storage.settings import UnknownSettingError

STORAGE_GROUP: Final = "tidegate.remote_storage_manager"
METADATA_GROUP: Final = "tidegate.remote_log_metadata_manager"


def create_storage(
    config: StorageConfig, cluster_id: str, metrics: RemoteStorageMetrics | None = None
) -> LocatedRemoteStorageManager:
    """Returns the store of `[storage]` with its locations, not yet open. Raises `ValueError`."""
    made: dict[tuple[str, frozenset[tuple[str, str]]], RemoteStorageManager] = {}

    def make(implementation: str, settings: Mapping[str, str]) -> RemoteStorageManager:
        place = implementation, frozenset(settings.items())
        if place not in made:
            made[place] = create_remote_storage_manager(implementation, {"cluster.id": cluster_id, **settings})
        return made[place]

    home = make(config.implementation, config.plain_settings())
    locations = []
    for one in config.locations:
        implementation, settings = config.place_of(one)
        try:
            storage = make(implementation, settings)
        except ValueError as error:
            raise ValueError(f"location {one.name!r}: {error}") from error
        locations.append(StorageLocation(one.name, storage, one.weight, one.topics))
    return LocatedRemoteStorageManager(home, locations, metrics)


def create_remote_storage_manager(name: str, settings: Mapping[str, str]) -> RemoteStorageManager:
    """Returns a storage manager that is not yet open. `name` is that of an entry point, or `module:Class`.

    Raises `ValueError` when there is no such storage manager, or when it rejects its settings.
    """
    factory: RemoteStorageManagerFactory = _load_class(STORAGE_GROUP, name, "remote storage manager")
    try:
        return factory(settings)
    except UnknownSettingError as error:
        raise ValueError(_explain_unknown(error, STORAGE_PREFIX)) from error
    except ValueError:
        raise
    except Exception as error:  # whatever the code of a third party raises
        raise ValueError(f"remote storage manager {name!r} cannot be created: {error!r}") from error


def create_record_log(name: str, settings: Mapping[str, str]) -> MetadataRecordLog:
    """Returns a log that is not yet open. `name` is that of an entry point, or `module:Class`.

    Raises `ValueError` when there is no such log, or when it rejects its settings."""
    factory: MetadataRecordLogFactory = _load_class(METADATA_GROUP, name, "remote log metadata manager", TOPIC_BASED)
    if not callable(getattr(factory, "create", None)):
        raise ValueError(f"{name!r} is not a remote log metadata manager: it has no class method `create`")
    try:
        return factory.create(settings)
    except UnknownSettingError as error:
        raise ValueError(_explain_unknown(error, METADATA_PREFIX)) from error


def create_metadata_log(
    name: str, settings: Mapping[str, str], common: TopicBasedSettings, client: BrokerClient, cluster_id: str
) -> MetadataLog:
    """Returns a log that is not yet open. `name` is `topic_based`, or as in `create_record_log`.

    `settings` are those of the named log, and `common` those that Tidegate knows. The caller keeps and closes the
    client. Metadata of another cluster than `cluster_id` is not used. Raises `ValueError` as `create_record_log`."""
    if name == TOPIC_BASED:
        return TopicBasedMetadataLog(client, common)
    return SingleWriterLog(create_record_log(name, settings), common.state_folder, cluster_id, common.refusal_to_create)


def installed_names(group: str) -> list[str]:
    """Returns the names of the entry points of the group, sorted."""
    return sorted({found.name for found in entry_points(group=group)})


def _explain_unknown(error: UnknownSettingError, prefix: str) -> str:
    """Returns the message for a setting that a manager does not declare.

    It names the nearest key among those of the manager and Tidegate's own with the prefix."""
    own = {key.removeprefix(prefix): key for key in TierConfig.keys_of("") if key.startswith(prefix)}
    nearest = difflib.get_close_matches(error.key, [*error.declared, *own], 1)
    return f"{error.what}; did you mean {own.get(nearest[0], nearest[0])}?" if nearest else error.what


def _load_class(group: str, name: str, kind: str, *built_in: str) -> Any:
    """Returns the class that `name` names; `kind` and the names that are `built_in` are for messages.

    Raises `ValueError` when there is no such class, or when it cannot be imported."""
    if ":" in name:
        return _imported(name, name, kind)
    found = {entry_point.value for entry_point in entry_points(group=group, name=name)}
    if not found:
        known = (
            ", ".join(dict.fromkeys([*built_in, *installed_names(group)])) or "none: is the package itself installed?"
        )
        raise ValueError(f"no {kind} is called {name!r}; installed are {known}; module:Class names any other")
    if len(found) > 1:
        raise ValueError(f"several packages call their {kind} {name!r}: {', '.join(sorted(found))}")
    return _imported(found.pop(), name, kind)


def _imported(value: str, name: str, kind: str) -> Any:
    module, _, attribute = value.partition(":")
    what = f"{kind} {name!r}" if name == value else f"{kind} {name!r} ({value})"
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever the code of a third party raises
        raise ValueError(f"{what} cannot be imported: {error}") from error
