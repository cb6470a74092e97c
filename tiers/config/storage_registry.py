"""Creates storage managers by name, from the entry points of the group `tidegate.remote_storage_manager`.

Third parties may add entry points to that group."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from tiers.config.settings import StorageConfig
from tiers.storage.locations import LocatedRemoteStorageManager, StorageLocation
from tiers.storage.remote_storage_manager import RemoteStorageManager, RemoteStorageManagerFactory

ENTRY_POINT_GROUP = "tidegate.remote_storage_manager"


def remote_storage_manager_names() -> list[str]:
    """Returns the names of the installed storage managers, sorted."""
    return sorted({found.name for found in entry_points(group=ENTRY_POINT_GROUP)})


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
    """Returns a storage manager that is not yet open.

    Raises `ValueError` when no installed storage manager has that name, or when it rejects its settings.
    """
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        known = ", ".join(remote_storage_manager_names()) or "none: is the package itself installed?"
        raise ValueError(f"no remote storage manager is called {name!r}; installed are {known}")
    factories = {entry_point.value for entry_point in found}
    if len(factories) > 1:
        raise ValueError(f"several packages call their remote storage manager {name!r}: {', '.join(sorted(factories))}")
    try:
        factory: RemoteStorageManagerFactory = found[0].load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"remote storage manager {name!r} ({found[0].value}) cannot be imported: {error}") from error
    return factory(settings)
