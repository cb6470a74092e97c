"""`PipelineConfig`: the proxies' own TOML file, as a job reads it: the cluster, the store, the keys, the topics.

The same file serves both, so that a job and the proxies never differ about what is tiered and where it lies. It travels
to the executors with the task; secrets show in no `repr`.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tiers.tier_config import TierConfig, load_config_file, parse_config_text


class PipelineConfig(TierConfig):
    """Sections that only a proxy reads are accepted as they are."""

    listener: object = Field(None, repr=False, exclude=True)
    admin: object = Field(None, repr=False, exclude=True)
    log: object = Field(None, repr=False, exclude=True)
    limits: object = Field(None, repr=False, exclude=True)
    workers: object = Field(None, repr=False, exclude=True)


def load_pipeline_config(path: Path) -> PipelineConfig:
    """Raises `ConfigError`."""
    return load_config_file(path, PipelineConfig)


def parse_pipeline_config(text: str, name: str = "configuration") -> PipelineConfig:
    """Raises `ConfigError`."""
    return parse_config_text(text, PipelineConfig, name)
