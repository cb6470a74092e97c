"""The codecs of record batches, and the framings that Kafka's clients wrap around two of them (semantics 4.1).

Snappy comes in xerial's blocks (Java) or raw (others). LZ4 is the frame format, but magic 0 wrappers were written with
a wrong header checksum (KAFKA-3160), so there the blocks are read one by one. Output is bounded: a batch is some
producer's word, and a small one may expand without end.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import cramjam

from protocol.errors import CorruptBatchError
from protocol.primitives import INT32, Buffer
from protocol.records.record_batch import CODEC_GZIP, CODEC_LZ4, CODEC_NONE, CODEC_SNAPPY, CODEC_ZSTD

MAX_UNCOMPRESSED_BYTES = 256 << 20

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_FIRST_GUESS_BYTES = 64 << 10
_OUTPUT_FULL = "failed to write whole buffer"

_LZ4_MAGIC = 0x184D2204
_LZ4_FRAME_HEAD = Struct("<IBB")
_LZ4_BLOCK_SIZE = Struct("<I")
_LZ4_BLOCK_IS_RAW = 1 << 31
_LZ4_INDEPENDENT_BLOCKS = 0x20
_LZ4_BLOCK_CHECKSUMS = 0x10
_LZ4_CONTENT_SIZE = 0x08
_LZ4_DICTIONARY = 0x01
_LZ4_MAX_BLOCK_BYTES = {4: 64 << 10, 5: 256 << 10, 6: 1 << 20, 7: 4 << 20}

_DecompressInto = Callable[[bytes, bytearray], int]
_DECOMPRESS_INTO: dict[int, _DecompressInto] = {
    CODEC_GZIP: cramjam.gzip.decompress_into,
    CODEC_LZ4: cramjam.lz4.decompress_into,
    CODEC_ZSTD: cramjam.zstd.decompress_into,
}


def decompress(
    codec: int, data: Buffer, magic: int = 2, max_bytes: int = MAX_UNCOMPRESSED_BYTES, expected_bytes: int = 0
) -> Buffer:
    """`data` without its compression. Raises `CorruptBatchError`, also for output beyond `max_bytes`.

    `expected_bytes` saves time alone: where the output is larger than guessed, all is done again."""
    if codec == CODEC_NONE:
        return data
    raw = bytes(data)
    try:
        if codec == CODEC_SNAPPY:
            return _decompress_snappy(raw, max_bytes)
        if codec == CODEC_LZ4 and magic == 0:
            return _decompress_lz4_blocks(raw, max_bytes)
        if codec in _DECOMPRESS_INTO:
            return _decompress_bounded(_DECOMPRESS_INTO[codec], raw, max_bytes, expected_bytes)
    except cramjam.DecompressionError as error:
        raise CorruptBatchError(f"codec {codec} cannot read {len(raw)} bytes: {error}") from error
    raise CorruptBatchError(f"unknown codec {codec}")


def _decompress_bounded(decompress_into: _DecompressInto, raw: bytes, max_bytes: int, expected_bytes: int) -> Buffer:
    # The size is not written anywhere that all codecs share: guess, and grow while the output is what failed.
    size = min(max(_FIRST_GUESS_BYTES, 4 * len(raw), expected_bytes), max_bytes)
    while True:
        out = bytearray(size)
        try:
            written = decompress_into(raw, out)
        except cramjam.DecompressionError as error:
            if _OUTPUT_FULL not in str(error):
                raise
            if size >= max_bytes:
                raise CorruptBatchError(f"{len(raw)} bytes expand beyond {max_bytes}") from error
            size = min(size * 4, max_bytes)
        else:
            return memoryview(out)[:written]


def _decompress_snappy(raw: bytes, max_bytes: int) -> Buffer:
    if not raw.startswith(_XERIAL_MAGIC):
        return _decompress_snappy_block(raw, max_bytes)
    out = bytearray()
    pos = _XERIAL_HEADER_BYTES
    while pos < len(raw):
        if pos + INT32.size > len(raw):
            raise CorruptBatchError("a snappy block without its length")
        (length,) = INT32.unpack_from(raw, pos)
        pos += INT32.size
        if length < 0 or pos + length > len(raw):
            raise CorruptBatchError(f"a snappy block of {length} bytes at {pos} of {len(raw)}")
        out += _decompress_snappy_block(raw[pos : pos + length], max_bytes - len(out))
        pos += length
    return out


def _decompress_snappy_block(raw: bytes, max_bytes: int) -> Buffer:
    size = cramjam.snappy.decompress_raw_len(raw)
    if size > max_bytes:
        raise CorruptBatchError(f"{len(raw)} bytes expand to {size}, beyond {max_bytes}")
    out = bytearray(size)
    return memoryview(out)[: cramjam.snappy.decompress_raw_into(raw, out)]


def _decompress_lz4_blocks(raw: bytes, max_bytes: int) -> Buffer:
    if len(raw) < _LZ4_FRAME_HEAD.size:
        raise CorruptBatchError(f"an lz4 frame of {len(raw)} bytes")
    magic, flags, descriptor = _LZ4_FRAME_HEAD.unpack_from(raw)
    block_bytes = _LZ4_MAX_BLOCK_BYTES.get(descriptor >> 4 & 7)
    if magic != _LZ4_MAGIC or block_bytes is None or not flags & _LZ4_INDEPENDENT_BLOCKS:
        raise CorruptBatchError(f"an lz4 frame with magic {magic:#x}, flags {flags:#x}, descriptor {descriptor:#x}")
    pos = _LZ4_FRAME_HEAD.size + 1
    pos += 8 if flags & _LZ4_CONTENT_SIZE else 0
    pos += 4 if flags & _LZ4_DICTIONARY else 0
    out = bytearray()
    while pos + _LZ4_BLOCK_SIZE.size <= len(raw):
        (size,) = _LZ4_BLOCK_SIZE.unpack_from(raw, pos)
        pos += _LZ4_BLOCK_SIZE.size
        if size == 0:
            return out
        end = pos + (size & ~_LZ4_BLOCK_IS_RAW)
        if end > len(raw):
            raise CorruptBatchError(f"an lz4 block up to {end} of {len(raw)} bytes")
        if size & _LZ4_BLOCK_IS_RAW:
            out += raw[pos:end]
        else:
            block = bytearray(block_bytes)
            written = cramjam.lz4.decompress_block_into(raw[pos:end], block, output_len=block_bytes)
            out += memoryview(block)[:written]
        if len(out) > max_bytes:
            raise CorruptBatchError(f"{len(raw)} bytes expand beyond {max_bytes}")
        pos = end + (4 if flags & _LZ4_BLOCK_CHECKSUMS else 0)
    raise CorruptBatchError("an lz4 frame without its end mark")
