"""Creates metadata managers by name, from the entry points of the group `tidegate.remote_log_metadata_manager`.

Third parties may add entry points to that group."""

from __future__ import annotations

from collections.abc import Mapping

from tiers.config.class_loading import load_class
from tiers.config.manager_settings import METADATA_PREFIX, explain_unknown
from tiers.metadata.record_log import MetadataManagerContext, MetadataManagerFactory
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.storage.settings import UnknownSettingError

ENTRY_POINT_GROUP = "tidegate.remote_log_metadata_manager"


def metadata_manager_factory(name: str) -> MetadataManagerFactory:
    """Returns the class that `name` names, as in `create_metadata_manager`. Raises `ValueError`."""
    factory: MetadataManagerFactory = load_class(ENTRY_POINT_GROUP, name, "remote log metadata manager")
    if not callable(getattr(factory, "create", None)):
        raise ValueError(f"{name!r} is not a remote log metadata manager: it has no class method `create`")
    return factory


def create_metadata_manager(
    name: str, settings: Mapping[str, str], context: MetadataManagerContext
) -> RemoteLogMetadataManager:
    """Returns a metadata manager that is not yet open. `name` is that of an entry point, or `module:Class`.

    Raises `ValueError` when there is no such metadata manager, or when it rejects its settings."""
    try:
        return metadata_manager_factory(name).create(settings, context)
    except UnknownSettingError as error:
        raise ValueError(explain_unknown(error, METADATA_PREFIX)) from error
