"""The codecs of record batches, and the framings that Kafka's clients wrap around two of them (semantics 4.1).

Snappy comes in xerial's blocks (Java) or raw (others). LZ4 is the frame format, but magic 0 wrappers were written with
a wrong header checksum (KAFKA-3160), so there the blocks are read one by one; so are those of the frames that Java and
librdkafka write, since all that the frame adds to them is a copy. What follows the end mark of such a frame is not
read, as in Java. Output is bounded: a batch is some producer's word, and a small one may expand without end.
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
_MAX_KEPT_BYTES = 8 << 20
_OUTPUT_FULL = "failed to write whole buffer"

_LZ4_MAGIC = 0x184D2204
_LZ4_FRAME_HEAD = Struct("<IBB")
_LZ4_USUAL_HEAD = b"\x04\x22\x4d\x18\x60\x40\x82"
"""Independent blocks of 64 KiB, no checksums, no content size; the last byte is the checksum of the two before."""
_LZ4_BLOCK_SIZE = Struct("<I")
_LZ4_BLOCK_IS_RAW = 1 << 31
_LZ4_INDEPENDENT_BLOCKS = 0x20
_LZ4_BLOCK_CHECKSUMS = 0x10
_LZ4_CONTENT_SIZE = 0x08
_LZ4_DICTIONARY = 0x01
_LZ4_MAX_BLOCK_BYTES = {4: 64 << 10, 5: 256 << 10, 6: 1 << 20, 7: 4 << 20}

_DecompressInto = Callable[[Buffer, Buffer], int]
_DECOMPRESS_INTO: dict[int, _DecompressInto] = {
    CODEC_GZIP: cramjam.gzip.decompress_into,
    CODEC_LZ4: cramjam.lz4.decompress_into,
    CODEC_ZSTD: cramjam.zstd.decompress_into,
}


def decompress(codec: int, data: Buffer, magic: int = 2, max_bytes: int = MAX_UNCOMPRESSED_BYTES) -> Buffer:
    """`data` without its compression. Raises `CorruptBatchError`, also for output beyond `max_bytes`."""
    return Decompressor().decompress(codec, data, magic, max_bytes)


class Decompressor:
    """For one batch after another: what it gives lies in memory that the next call writes to.

    Fresh memory for each batch costs more than most codecs do: it is mapped, zeroed and given back."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept = memoryview(bytearray())

    def decompress(self, codec: int, data: Buffer, magic: int = 2, max_bytes: int = MAX_UNCOMPRESSED_BYTES) -> Buffer:
        """As the function of that name; `data` itself where it is not compressed."""
        if codec == CODEC_NONE:
            return data
        raw = memoryview(data)
        try:
            if codec == CODEC_SNAPPY:
                return self._snappy(raw, max_bytes)
            if codec == CODEC_LZ4 and (magic == 0 or raw[: len(_LZ4_USUAL_HEAD)] == _LZ4_USUAL_HEAD):
                return self._lz4_blocks(raw, max_bytes)
            if codec in _DECOMPRESS_INTO:
                return self._bounded(_DECOMPRESS_INTO[codec], raw, max_bytes)
        except cramjam.DecompressionError as error:
            raise CorruptBatchError(f"codec {codec} cannot read {len(raw)} bytes: {error}") from error
        raise CorruptBatchError(f"unknown codec {codec}")

    def _room(self, size: int) -> memoryview:
        """At least `size` bytes; of what was given before nothing is left."""
        if size > _MAX_KEPT_BYTES:
            return memoryview(bytearray(size))
        if len(self._kept) < size or not self._kept:
            self._kept = memoryview(bytearray(max(size, _FIRST_GUESS_BYTES)))
        return self._kept

    def _bounded(self, decompress_into: _DecompressInto, raw: memoryview, max_bytes: int) -> Buffer:
        # The size is not written anywhere that all codecs share: guess, and grow while the output is what failed.
        size = len(self._kept) if len(self._kept) > len(raw) else 4 * len(raw)
        out = self._room(min(size, max_bytes))[:max_bytes]
        while True:
            try:
                return out[: decompress_into(raw, out)]
            except cramjam.DecompressionError as error:
                if _OUTPUT_FULL not in str(error):
                    raise
                if len(out) >= max_bytes:
                    raise CorruptBatchError(f"{len(raw)} bytes expand beyond {max_bytes}") from error
            out = self._room(min(4 * len(out), max_bytes))[:max_bytes]

    def _snappy(self, raw: memoryview, max_bytes: int) -> Buffer:
        blocks = _xerial_blocks(raw) if raw[: len(_XERIAL_MAGIC)] == _XERIAL_MAGIC else [raw]
        size = 0
        for block in blocks:
            size += cramjam.snappy.decompress_raw_len(block)
        if size > max_bytes:
            raise CorruptBatchError(f"{len(raw)} bytes expand to {size}, beyond {max_bytes}")
        out = self._room(size)
        written = 0
        for block in blocks:
            # Each writes as much as it said, and no further than `size`.
            written += cramjam.snappy.decompress_raw_into(block, out[written:size])
        return out[:written]

    def _lz4_blocks(self, raw: memoryview, max_bytes: int) -> Buffer:
        pos, block_bytes, checksum_bytes = _lz4_first_block(raw)
        out = self._room(max(min(4 * len(raw), max_bytes), block_bytes))
        written = 0
        while pos + _LZ4_BLOCK_SIZE.size <= len(raw):
            (size,) = _LZ4_BLOCK_SIZE.unpack_from(raw, pos)
            pos += _LZ4_BLOCK_SIZE.size
            end = pos + (size & ~_LZ4_BLOCK_IS_RAW)
            if end == pos:  # the end mark, to Java also where it says that it is not compressed
                return out[:written]
            if end > len(raw) or end - pos > block_bytes:
                raise CorruptBatchError(f"an lz4 block up to {end} of {len(raw)} bytes")
            if written + block_bytes > len(out):
                before = out[:written]
                out = self._room(min(2 * written, max_bytes) + block_bytes)
                out[:written] = before
            if size & _LZ4_BLOCK_IS_RAW:
                out[written : written + end - pos] = raw[pos:end]
                written += end - pos
            else:
                # It writes to all that it is given, and no further: `output_len` does not bound it.
                block = out[written : written + block_bytes]
                written += cramjam.lz4.decompress_block_into(raw[pos:end], block, output_len=block_bytes)
            if written > max_bytes:
                raise CorruptBatchError(f"{len(raw)} bytes expand beyond {max_bytes}")
            pos = end + checksum_bytes
        raise CorruptBatchError("an lz4 frame without its end mark")


def _xerial_blocks(raw: memoryview) -> list[memoryview]:
    blocks = []
    pos = _XERIAL_HEADER_BYTES
    end = len(raw)
    while pos < end:
        if pos + INT32.size > end:
            raise CorruptBatchError("a snappy block without its length")
        (length,) = INT32.unpack_from(raw, pos)
        pos += INT32.size
        if length < 0 or pos + length > end:
            raise CorruptBatchError(f"a snappy block of {length} bytes at {pos} of {end}")
        blocks.append(raw[pos : pos + length])
        pos += length
    return blocks


def _lz4_first_block(raw: memoryview) -> tuple[int, int, int]:
    """Where it is, how large a block is at most, and how many bytes of checksum follow each."""
    if len(raw) < _LZ4_FRAME_HEAD.size:
        raise CorruptBatchError(f"an lz4 frame of {len(raw)} bytes")
    magic, flags, descriptor = _LZ4_FRAME_HEAD.unpack_from(raw)
    block_bytes = _LZ4_MAX_BLOCK_BYTES.get(descriptor >> 4 & 7)
    if magic != _LZ4_MAGIC or block_bytes is None or not flags & _LZ4_INDEPENDENT_BLOCKS:
        raise CorruptBatchError(f"an lz4 frame with magic {magic:#x}, flags {flags:#x}, descriptor {descriptor:#x}")
    pos = _LZ4_FRAME_HEAD.size + 1
    pos += 8 if flags & _LZ4_CONTENT_SIZE else 0
    pos += 4 if flags & _LZ4_DICTIONARY else 0
    return pos, block_bytes, 4 if flags & _LZ4_BLOCK_CHECKSUMS else 0
