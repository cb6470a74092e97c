"""`EncryptionConfig`: the settings of the encryption of remote segments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, model_validator

from tiers.config.settings import CheckedModel
from tiers.segment.segment_encryption import KeyRing, read_key_file


class EncryptionConfig(CheckedModel):
    """Encryption at rest: AES-256-GCM per chunk with one key per segment, which one of these keys wraps. Without
    `current`, new segments are not encrypted. Encrypted segments are read with the key that they name.
    """

    current: str | None = Field(
        default=None, min_length=1, description="The name, in `keys`, of the key for new segments."
    )
    keys: Mapping[str, Path] = Field(
        default_factory=dict,
        description=(
            'A name and a file for every key in use: `keys.k2026 = "/etc/tidegate/k2026"`. The file holds 32 bytes or '
            "their base64. Keep a key as long as any segment names it; without the key, the segment is lost."
        ),
    )

    @model_validator(mode="after")
    def _check_current(self) -> EncryptionConfig:
        if self.current is not None and self.current not in self.keys:
            raise ValueError(f"current: there is no key {self.current!r} in keys")
        return self

    def key_ring(self) -> KeyRing:
        """Reads the key files. Raises `ValueError`, which names the file to correct."""
        return KeyRing({key_id: read_key_file(path) for key_id, path in self.keys.items()}, self.current)
