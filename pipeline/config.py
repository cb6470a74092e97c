"""`PipelineConfig`: the proxies' TOML file as a job reads it: the cluster, the store, the keys and the topics.

Jobs and proxies read the same file, so they always agree on what is tiered and where it is stored. The configuration
travels to the executors with each task. Its `repr` shows no secrets.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from tiers.config.tier_config import TierConfig, load_config_file, parse_config_text


class PipelineConfig(TierConfig):
    """The shared settings. Sections that only a proxy reads are accepted without validation."""

    listener: object = Field(default=None, repr=False, exclude=True)
    admin: object = Field(default=None, repr=False, exclude=True)
    log: object = Field(default=None, repr=False, exclude=True)
    limits: object = Field(default=None, repr=False, exclude=True)
    tracing: object = Field(default=None, repr=False, exclude=True)
    workers: object = Field(default=None, repr=False, exclude=True)

    @classmethod
    def foreign_sections(cls) -> list[str]:
        return [name for name in cls.model_fields if name not in TierConfig.model_fields]


def load_pipeline_config(path: Path) -> PipelineConfig:
    """Raises `ConfigError`."""
    return load_config_file(path, PipelineConfig)


def parse_pipeline_config(text: str, name: str = "configuration") -> PipelineConfig:
    """Raises `ConfigError`."""
    return parse_config_text(text, PipelineConfig, name)
