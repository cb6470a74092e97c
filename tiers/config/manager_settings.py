"""The keys `remote.log.storage.*` and `remote.log.metadata.*` at the top of the file.

A key that `RemoteLogConfig` has is Tidegate's own. Every other one goes to the manager, without the prefix. The manager
declares its keys, and `explain_unknown` names the nearest known one for any other.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from tiers.config.setting_keys import keys_of_field
from tiers.config.settings import METADATA_SETTINGS, TOPIC_BASED, RemoteLogConfig, flatten, text_of
from tiers.storage.settings import UnknownSettingError

STORAGE_PREFIX = "remote.log.storage."
METADATA_PREFIX = "remote.log.metadata."
STORAGE_MANAGER = "remote.log.storage.manager.class.name"
METADATA_MANAGER = "remote.log.metadata.manager.class.name"


def own_keys() -> frozenset[str]:
    """Returns the keys at the top of the file that are Tidegate's own, with all their names."""
    fields = RemoteLogConfig.model_fields.items()
    return frozenset({STORAGE_MANAGER, *(key for name, field in fields for key in keys_of_field(name, field))})


def gathered(values: Mapping[str, Any], storage: object) -> tuple[dict[str, Any], object]:
    """Divides the keys at the top of the file.

    Returns those of `RemoteLogConfig`, and the section `[storage]` with the keys that belong there. Raises `ValueError`
    when both places contradict each other."""
    rest, own = flatten(values), own_keys()
    implementation = rest.pop(STORAGE_MANAGER, None)
    if isinstance(storage, Mapping) or (storage is None and implementation is not None):
        settings = _taken(rest, STORAGE_PREFIX, own)
        if implementation is not None:
            settings["implementation"] = implementation
        storage = _merged(storage or {}, settings)
    metadata_manager = rest.get(METADATA_MANAGER, TOPIC_BASED)
    if isinstance(metadata_manager, str) and metadata_manager != TOPIC_BASED:
        rest[METADATA_SETTINGS] = {key: text_of(value) for key, value in _taken(rest, METADATA_PREFIX, own).items()}
    return rest, storage


def _taken(values: dict[str, Any], prefix: str, own: frozenset[str]) -> dict[str, Any]:
    keys = [key for key in values if key.startswith(prefix) and key not in own]
    return {key.removeprefix(prefix): values.pop(key) for key in keys}


def _merged(section: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    known = flatten({key: value for key, value in section.items() if key != "locations"})
    for key, value in settings.items():
        if known.get(key, value) != value:
            name = STORAGE_MANAGER if key == "implementation" else f"{STORAGE_PREFIX}{key}"
            raise ValueError(f"{name} and [storage] {key} have different values: remove one of them")
    return {**section, **settings}


def explain_unknown(error: UnknownSettingError, prefix: str) -> str:
    """Returns the message for a setting that a manager does not declare.

    It names the nearest key among those of the manager and Tidegate's own with the prefix."""
    own = {key.removeprefix(prefix): key for key in own_keys() if key.startswith(prefix)}
    nearest = difflib.get_close_matches(error.key, [*error.declared, *own], 1)
    return f"{error.what}; did you mean {own.get(nearest[0], nearest[0])}?" if nearest else error.what
