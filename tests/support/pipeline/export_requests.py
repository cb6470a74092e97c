"""Exports of a stage's topic: to files, and to an Iceberg table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.config import PipelineConfig, load_pipeline_config
from pipeline.export.job import ExportRequest, IcebergTable
from pipeline.export.target import target_settings
from tests.support.pipeline.read_stage import ReadStage

TABLE = "db.orders"


def config_of(stage: ReadStage) -> PipelineConfig:
    return load_pipeline_config(stage.proxy.config)


def to_files(stage: ReadStage, home: Path) -> ExportRequest:
    """A request with small files, a few per wave."""
    target = target_settings(str(home / "lake"), config_of(stage), {})
    return ExportRequest(stage.topic, target, file_bytes=150_000, wave_files=3)


def to_table(stage: ReadStage, home: Path) -> ExportRequest:
    warehouse = home / "warehouse"
    warehouse.mkdir(exist_ok=True)
    properties = {"type": "sql", "uri": f"sqlite:///{home}/catalog.db", "warehouse": warehouse.as_uri()}
    return replace(to_files(stage, home), iceberg=IcebergTable("lake", TABLE, properties))
