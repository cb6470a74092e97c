"""Creates storage managers by name, from the entry points of the group `tidegate.remote_storage_manager`.

Third parties may add entry points to that group."""

from __future__ import annotations

from collections.abc import Mapping

from tiers.config.class_loading import load_class
from tiers.config.manager_settings import STORAGE_PREFIX, explain_unknown
from tiers.config.settings import StorageConfig
from tiers.storage.locations import LocatedRemoteStorageManager, StorageLocation
from tiers.storage.remote_storage_manager import RemoteStorageManager, RemoteStorageManagerFactory
from tiers.storage.settings import UnknownSettingError

ENTRY_POINT_GROUP = "tidegate.remote_storage_manager"


def create_storage(config: StorageConfig, cluster_id: str) -> LocatedRemoteStorageManager:
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
    return LocatedRemoteStorageManager(home, locations)


def create_remote_storage_manager(name: str, settings: Mapping[str, str]) -> RemoteStorageManager:
    """Returns a storage manager that is not yet open. `name` is that of an entry point, or `module:Class`.

    Raises `ValueError` when there is no such storage manager, or when it rejects its settings.
    """
    factory: RemoteStorageManagerFactory = load_class(ENTRY_POINT_GROUP, name, "remote storage manager")
    try:
        return factory(settings)
    except UnknownSettingError as error:
        raise ValueError(explain_unknown(error, STORAGE_PREFIX)) from error
    except ValueError:
        raise
    except Exception as error:  # whatever the code of a third party raises
        raise ValueError(f"remote storage manager {name!r} cannot be created: {error!r}") from error
