"""`VersionedStorage`: a local store that also has conditional writes of small objects, as S3 has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiers.errors import ObjectChangedError
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.remote_storage_manager import ABSENT, StoreFeatures, Version, VersionedObject


class VersionedStorage(LocalRemoteStorageManager):
    """Gives versions from the first `probe` on, as a real store does. No two writes are concurrent."""

    def __init__(self, root: Path) -> None:
        super().__init__({"path": str(root), "cluster.id": "cluster"})
        self.proves = True
        """What the next probe finds."""
        self._is_proved = False
        self._writes = 0
        self._versions: dict[str, Version] = {}

    async def probe(self) -> Sequence[StoreFeatures]:
        self._is_proved = self.proves
        return [StoreFeatures(self.proves, self.proves, "a fake with versions")]

    async def put_object(self, key: str, data: bytes, if_match: Version | None = None) -> Version | None:
        known = self._versions.get(key, ABSENT)
        if if_match is not None and if_match != known:
            found = await self.get_versioned(key)
            if found.data != data:
                raise ObjectChangedError(f"{key} has version {known!r}, not {if_match!r}")
            return found.version
        await super().put_object(key, data)
        self._writes += 1
        self._versions[key] = str(self._writes)
        return self._versions[key] if self._is_proved else None

    async def get_versioned(self, key: str) -> VersionedObject:
        found = await super().get_versioned(key)
        return VersionedObject(found.data, self._versions.get(key, ABSENT) if self._is_proved else None)

    async def delete_object(self, key: str) -> None:
        await super().delete_object(key)
        self._versions.pop(key, None)
