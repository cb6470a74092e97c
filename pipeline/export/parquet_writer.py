"""`write_parquet`: writes Arrow batches to one Parquet file. `write_parts` divides them into several.

The row groups have a bounded size. Columns with repeated values use a dictionary, and columns that readers filter by
have statistics. Keys and values have neither, because both would only cost time. No column uses delta encodings, which
some readers of Iceberg tables lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_BYTES = 64 << 20
"""Size in Arrow's memory. A call holds about this much while it writes, whatever the number of files."""
MAX_OPEN_FILES = 500

_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4")
_REPEATED = ("topic", "partition", "timestampType")
_FILTERED_BY = ("partition", "offset", "timestamp", "timestampType", "topic")


class Part(NamedTuple):
    """A written file. `values` are those that its records have in common."""

    values: tuple[Any, ...]
    path: Path
    records: int


PartsOf = Callable[[pa.RecordBatch], Iterable[tuple[tuple[Any, ...], pa.RecordBatch]]]
"""Divides a batch by the values that its records have in common."""


class _OpenFile:
    def __init__(self, values: tuple[Any, ...], path: Path, schema: pa.Schema) -> None:
        self._values = values
        self._path = path
        self._writer = pq.ParquetWriter(
            path,
            schema,
            compression="zstd",
            use_dictionary=[name for name in _REPEATED if name in schema.names],
            write_statistics=[name for name in _FILTERED_BY if name in schema.names],
            store_schema=True,
        )
        self._group: list[pa.RecordBatch] = []
        self._records = 0
        self.held_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if self._group and self.held_bytes + batch.nbytes > ROW_GROUP_BYTES:
            self.flush()
        self._group.append(batch)
        self.held_bytes += batch.nbytes

    def flush(self) -> None:
        """Writes what is held as one row group."""
        if self._group:
            table = pa.Table.from_batches(self._group)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
            self._records += table.num_rows
            self._group, self.held_bytes = [], 0

    def finish(self) -> Part:
        self.flush()
        self.close()
        return Part(self._values, self._path, self._records)

    def close(self) -> None:
        self._writer.close()


def write_parquet(path: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> int:
    """Writes the file and returns the number of rows."""
    with ExitStack() as stack:
        file = _OpenFile((), path, schema)
        stack.callback(file.close)
        for batch in batches:
            file.add(batch)
        return file.finish().records


def write_parts(folder: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema, parts_of: PartsOf) -> list[Part]:
    """Writes a file to `folder` for each combination of values, and returns the files.

    If too many files are open, the records of all further values wait in one more file. They are divided after the open
    files are finished."""
    parts: list[Part] = []
    while True:
        later = folder / f"later-{len(parts)}.arrow"
        with ExitStack() as stack:
            parts += _write_first_parts(folder, len(parts), batches, schema, parts_of, later, stack)
        if not later.exists():
            return parts
        batches = _taken(later)


def _write_first_parts(
    folder: Path,
    number: int,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    parts_of: PartsOf,
    later: Path,
    stack: ExitStack,
) -> list[Part]:
    """Writes files with `number` and the next numbers, and the records for which no file could be opened to `later`."""
    opened: dict[tuple[Any, ...], _OpenFile] = {}
    waiting: pa.RecordBatchStreamWriter | None = None
    for batch in batches:
        rest: list[pa.RecordBatch] = []
        for values, part in parts_of(batch):
            file = opened.get(values)
            if file is None and len(opened) < MAX_OPEN_FILES:
                file = opened[values] = _OpenFile(values, folder / f"{number + len(opened)}.parquet", schema)
                stack.callback(file.close)
            if file is None:
                rest.append(part)
                continue
            file.add(part)
            if sum(one.held_bytes for one in opened.values()) > ROW_GROUP_BYTES:
                max(opened.values(), key=lambda one: one.held_bytes).flush()
        if rest:
            waiting = waiting or stack.enter_context(pa.ipc.new_stream(later, schema, options=_COMPRESSED))
            waiting.write_batch(pa.concat_batches(rest))
    return [file.finish() for file in opened.values()]


def _taken(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        path.unlink()
        yield from stream
