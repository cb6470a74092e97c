"""`tidegate-pipeline export`: exports one topic to Parquet files or an Iceberg table; resumable."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from pipeline.commands.common import AsJson, Conf, ConfigFile, Master, findings, job_runner, key_values
from pipeline.config import load_pipeline_config
from pipeline.export import job
from pipeline.export.schema_error import ValueSchemaError
from pipeline.export.target import FORMS, target_settings
from pipeline.export.typed_values import TypedValues, read_value_schema
from tiers.commands.console import say, show_json, show_table

_MIB = 1 << 20


class Format(StrEnum):
    PARQUET = "parquet"
    ICEBERG = "iceberg"


class Isolation(StrEnum):
    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


def export(
    config: ConfigFile,
    topic: Annotated[str, typer.Option("--topic", help="The topic to export.")],
    to: Annotated[str, typer.Option("--to", metavar="URL", help=f"Where to write: {FORMS}.")],
    to_setting: Annotated[
        list[str] | None,
        typer.Option("--to-setting", metavar="KEY=VALUE", help="A setting of the target's store; overrides [storage]."),
    ] = None,
    format: Annotated[Format, typer.Option("--format")] = Format.PARQUET,
    catalog: Annotated[str | None, typer.Option("--catalog", metavar="NAME", help="The pyiceberg catalog.")] = None,
    catalog_property: Annotated[
        list[str] | None,
        typer.Option("--catalog-property", metavar="KEY=VALUE", help="Overrides pyiceberg's own configuration."),
    ] = None,
    table: Annotated[str | None, typer.Option("--table", metavar="DB.NAME", help="Created if missing.")] = None,
    value_schema: Annotated[
        str | None,
        typer.Option("--value-schema", metavar="json:FILE|avro:FILE", help="Decodes values into columns."),
    ] = None,
    confluent_schema_id: Annotated[
        int | None,
        typer.Option("--confluent-schema-id", min=0, help="Values start with Confluent's prefix and this schema id."),
    ] = None,
    headers: Annotated[bool, typer.Option("--headers", help="Adds the column headers.")] = False,
    isolation: Annotated[Isolation, typer.Option("--isolation")] = Isolation.READ_COMMITTED,
    remote_only: Annotated[bool, typer.Option("--remote-only", help="Reads no records from the brokers.")] = False,
    allow_loss: Annotated[
        bool, typer.Option("--allow-loss", help="Skips offsets that expired before they were exported.")
    ] = False,
    file_mib: Annotated[int, typer.Option("--file-mib", min=1, help="MiB of log per file.")] = job.FILE_BYTES // _MIB,
    wave_files: Annotated[int, typer.Option("--wave-files", min=1, help="Files per commit.")] = job.WAVE_FILES,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Exports a topic of both tiers, each record exactly once. Exit code 1: some records are unreadable or lost."""
    settings = load_pipeline_config(config)
    request = job.ExportRequest(
        topic=topic,
        target=target_settings(to, settings, key_values("--to-setting", to_setting)),
        iceberg=_iceberg(format, catalog, table, catalog_property),
        values=_values(value_schema, confluent_schema_id),
        include_headers=headers,
        is_committed_only=isolation is Isolation.READ_COMMITTED,
        tier="remote" if remote_only else "auto",
        is_loss_allowed=allow_loss,
        file_bytes=file_mib * _MIB,
        wave_files=wave_files,
    )
    with job_runner(master, conf, "export") as runner:
        result = job.export(settings, runner, request)
    if as_json:
        show_json(asdict(result))
    else:
        _show(result)
    findings(result.has_findings)


def _iceberg(
    format: Format, catalog: str | None, table: str | None, properties: list[str] | None
) -> job.IcebergTable | None:
    given = {"--catalog": catalog, "--table": table, "--catalog-property": properties}
    if format is Format.PARQUET:
        if any(given.values()):
            raise typer.BadParameter(f"{', '.join(name for name in given if given[name])}: only with --format iceberg")
        return None
    if catalog is None or table is None:
        raise typer.BadParameter("--format iceberg needs --catalog and --table")
    return job.IcebergTable(catalog, table, key_values("--catalog-property", properties))


def _values(schema: str | None, confluent_id: int | None) -> TypedValues | None:
    if schema is None:
        if confluent_id is not None:
            raise typer.BadParameter("--confluent-schema-id: only with --value-schema")
        return None
    try:
        return read_value_schema(schema, confluent_id)
    except ValueSchemaError as error:
        raise typer.BadParameter(f"--value-schema: {error}") from error


def _show(result: job.ExportResult) -> None:
    headings = ("partition", "from", "to", "files", "records", "dead letters", "bytes", "stopped at")
    rows = [
        (
            one.partition,
            one.first_offset,
            one.end_offset,
            one.files,
            one.records,
            one.dead_letters,
            one.file_bytes,
            one.stopped_at,
        )
        for one in result.partitions
    ]
    show_table(headings, rows, numbers=headings)
    for one in result.partitions:
        if one.stopped_at is not None:
            say(f"{result.topic}-{one.partition} stops at offset {one.stopped_at}: {one.reason}")
        for first, end in one.lost:
            say(f"{result.topic}-{one.partition}: the offsets {first} to {end} are lost")
