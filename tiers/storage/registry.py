"""Storage managers by name: entry points of the group `tidegate.remote_storage_manager`, ours and third parties'."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from tiers.storage.remote_storage_manager import RemoteStorageManager, RemoteStorageManagerFactory

ENTRY_POINT_GROUP = "tidegate.remote_storage_manager"


def remote_storage_manager_names() -> list[str]:
    """What is installed, in order."""
    return sorted({found.name for found in entry_points(group=ENTRY_POINT_GROUP)})


def create_remote_storage_manager(name: str, settings: Mapping[str, str]) -> RemoteStorageManager:
    """Not yet open. Raises `ValueError` for a name that is not installed, or settings that it refuses."""
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
