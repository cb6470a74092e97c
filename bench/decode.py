"""Measures how many megabytes and records per second one core decodes from record batches into Arrow batches:

    python -m bench.decode [--mib 64] [--headers]

The megabytes are those of the uncompressed batches. The benchmark measures the CPU time of its thread, so that other
load matters less. Other load still takes caches and memory bandwidth, so the benchmark prints the load average and
shows the best of several rounds.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import time
from collections.abc import Iterator

import cramjam

from pipeline.decode.arrow_records import decode_batches, warm
from pipeline.decode.record_columns import ALL_COLUMNS, KAFKA_COLUMNS, RecordColumns
from protocol.records.compression import Decompressor
from protocol.records.record_batch import (
    BATCH_HEADER_BYTES,
    CODEC_LZ4,
    CODEC_NONE,
    CODEC_SNAPPY,
    CODEC_ZSTD,
    crc32c,
    iterate_batches,
    verify_crc,
)
from protocol.records.record_reader import Record
from tests.support.fakes.record_batches import build_batch, record

CODECS = {"none": CODEC_NONE, "zstd": CODEC_ZSTD, "lz4": CODEC_LZ4, "snappy": CODEC_SNAPPY}
SHAPES = {"512 B in 64 KB": (512, 64_000), "100 B in 16 KB": (100, 16_000)}
CHUNK_BYTES = 1 << 20
ROUNDS = 5
_STATES = ("new", "paid", "sent", "returned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=32, help="uncompressed size, per line of the table")
    parser.add_argument("--headers", action="store_true", help="give each record two headers, and decode them")
    options = parser.parse_args()
    columns = ALL_COLUMNS if options.headers else KAFKA_COLUMNS
    is_compiled = warm()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {'numba' if is_compiled else 'no numba'}")
    print(f"{'':16} {'':7} {'':>5} {'':>7} {'':>8} {'without':>8} {'decompress':>10}")
    print(f"{'records':16} {'codec':7} {'ratio':>5} {'MB/s':>7} {'M rec/s':>8} {'numba':>8} {'alone':>10}")
    for shape, (value_bytes, batch_bytes) in SHAPES.items():
        for name, codec in CODECS.items():
            chunks, size, records = runs_of_batches(value_bytes, batch_bytes, codec, options.mib << 20, options.headers)
            seconds = min(_seconds(chunks, columns, True) for _ in range(ROUNDS))
            slow_chunks = chunks[: max(1, len(chunks) // 8)]
            slow = min(_seconds(slow_chunks, columns, False) for _ in range(2)) * len(chunks) / len(slow_chunks)
            alone = min(_decompressing_seconds(chunks) for _ in range(ROUNDS))
            print(
                f"{shape:16} {name:7} {size / sum(map(len, chunks)):5.2f} {size / seconds / 1e6:7.0f} "
                f"{records / seconds / 1e6:8.2f} {size / slow / 1e6:8.0f} {size / alone / 1e6:10.0f}"
            )


def _seconds(chunks: list[bytes], columns: RecordColumns, is_compiled: bool) -> float:
    began = time.thread_time()
    for chunk in chunks:
        for _ in decode_batches(
            chunk,
            topic="orders-of-today",
            partition=3,
            first_offset=0,
            end_offset=(1 << 63) - 1,
            columns=columns,
            is_committed_only=True,
            is_compiled=is_compiled,
        ):
            pass
    return time.thread_time() - began


def _decompressing_seconds(chunks: list[bytes]) -> float:
    """Returns the seconds of CRC check and decompression alone, which no decoder can undercut on this machine."""
    began = time.thread_time()
    decompressor = Decompressor()
    for chunk in chunks:
        for batch in iterate_batches(chunk):
            verify_crc(chunk, batch)
            decompressor.decompress(batch.codec, memoryview(chunk)[batch.start + BATCH_HEADER_BYTES : batch.end])
    return time.thread_time() - began


def runs_of_batches(
    value_bytes: int, batch_bytes: int, codec: int, size_bytes: int, has_headers: bool
) -> tuple[list[bytes], int, int]:
    """Returns runs of whole batches of about `CHUNK_BYTES`, their uncompressed size, and the number of records."""
    chunks, size, count = [], 0, 0
    chunk = bytearray()
    distinct = list(_batches(value_bytes, batch_bytes, codec, has_headers))
    while size < size_bytes:
        for batch, batch_size, records in distinct:
            # The CRC does not cover the base offset.
            chunk += struct.pack(">q", count) + batch[8:]
            size += batch_size
            count += records
            if len(chunk) >= CHUNK_BYTES:
                chunks.append(bytes(chunk))
                chunk.clear()
    return [*chunks, bytes(chunk)], size, count


def _batches(value_bytes: int, batch_bytes: int, codec: int, has_headers: bool) -> Iterator[tuple[bytes, int, int]]:
    rng = random.Random(6)
    headers = [("trace", b"0123456789abcdef"), ("source", b"bench")] if has_headers else []
    for _ in range(64):
        rows: list[Record] = []
        while sum(len(row.value or b"") + 30 for row in rows[:1]) * len(rows) < batch_bytes:
            rows.append(
                record(len(rows), 1_700_000_000_000 + len(rows), b"key-%04d" % rng.randrange(9999),
                       _value(rng, value_bytes), headers)
            )  # fmt: skip
        plain = build_batch(0, rows)
        if codec == CODEC_SNAPPY:
            yield _as_java_does(plain), len(plain), len(rows)
        else:
            yield build_batch(0, rows, codec=codec), len(plain), len(rows)


def _value(rng: random.Random, size: int) -> bytes:
    """Returns typical JSON: the names repeat, the numbers and identifiers do not."""
    fields = [f'{{"id":"{rng.getrandbits(64):016x}","status":"{rng.choice(_STATES)}"']
    while sum(map(len, fields)) < size:
        fields.append(f',"item":{{"sku":"{rng.getrandbits(48):012x}","price":{rng.randrange(10**6)}}}')
    return "".join(fields).encode()[:size]


def _as_java_does(plain: bytes) -> bytes:
    """Compresses a batch as Java does: snappy in xerial's blocks of 32 KiB."""
    body = bytearray(b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1))
    for start in range(61, len(plain), 32 << 10):
        block = bytes(cramjam.snappy.compress_raw(plain[start : start + (32 << 10)]))
        body += struct.pack(">i", len(block)) + block
    after_crc = struct.pack(">h", CODEC_SNAPPY) + plain[23:61] + body
    head = plain[:8] + struct.pack(">i", 9 + len(after_crc)) + plain[12:17]
    return head + struct.pack(">I", crc32c(after_crc, 0, len(after_crc))) + after_crc


if __name__ == "__main__":
    main()
