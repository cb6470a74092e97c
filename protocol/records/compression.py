"""The codecs of record batches, and the framings that Kafka's clients put around snappy and LZ4.

See docs/semantics.md 4.1.

Java writes snappy in xerial's blocks; other clients write it raw. LZ4 uses the frame format. But wrappers of magic 0
have a wrong header checksum (KAFKA-3160), and Kafka reads no frame behind the first one. So this module reads the
blocks of a frame one by one.

Brokers accept a batch that Kafka's own reader can read. So the same bytes behind a whole stream are ignored here.

The output is bounded, because any producer can write a small batch that expands to a huge one.
"""

from __future__ import annotations

import zlib
from struct import Struct

import cramjam

from protocol.errors import CorruptBatchError
from protocol.primitives import INT32, Buffer
from protocol.records.record_batch import CODEC_GZIP, CODEC_LZ4, CODEC_NONE, CODEC_SNAPPY, CODEC_ZSTD

MAX_UNCOMPRESSED_BYTES = 256 << 20

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_SNAPPY_MAX_EXPANSION = 22
"""The densest element of snappy's format copies 64 bytes and has 3 bytes itself.

A block's header announces the size of its output. Without this limit, a few bytes would reserve `max_bytes`."""
_FIRST_GUESS_BYTES = 64 << 10
_MAX_KEPT_BYTES = 8 << 20
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

_GZIP_HEAD = b"\x1f\x8b\x08"
_GZIP_OVERHEAD_BYTES = 18
"""The header without optional fields, and the trailer."""
_GZIP_INPUT_BYTES = 16 << 10
"""zlib copies what it leaves of its input. So it gets the input in pieces."""


def decompress(codec: int, data: Buffer, max_bytes: int = MAX_UNCOMPRESSED_BYTES) -> Buffer:
    """Returns the decompressed `data`. Raises `CorruptBatchError`, also when the output would exceed `max_bytes`."""
    return Decompressor().decompress(codec, data, max_bytes)


class Decompressor:
    """Decompresses one batch after another into the same memory; each call overwrites the output of the one before.

    Fresh memory for each batch would cost more time than most codecs: it is mapped, zeroed and released each time."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept = memoryview(bytearray())

    def decompress(self, codec: int, data: Buffer, max_bytes: int = MAX_UNCOMPRESSED_BYTES) -> Buffer:
        """Returns the decompressed `data`; `data` itself when the codec is `CODEC_NONE`.

        The output is valid until the next call. Raises `CorruptBatchError`, also when it would exceed `max_bytes`.
        """
        if codec == CODEC_NONE:
            return data
        raw = memoryview(data)
        try:
            if codec == CODEC_SNAPPY:
                return self._snappy(raw, max_bytes)
            if codec == CODEC_LZ4:
                return self._lz4_blocks(raw, max_bytes)
            if codec == CODEC_GZIP:
                return self._gzip(raw, max_bytes)
            if codec == CODEC_ZSTD:
                return self._zstd(raw, max_bytes)
        except (cramjam.DecompressionError, zlib.error) as error:
            raise CorruptBatchError(f"codec {codec} cannot read {len(raw)} bytes: {error}") from error
        raise CorruptBatchError(f"unknown codec {codec}")

    def _room(self, size: int) -> memoryview:
        """Returns a buffer of at least `size` bytes. It may share memory with the buffers returned before."""
        if size > _MAX_KEPT_BYTES:
            return memoryview(bytearray(size))
        if len(self._kept) < size or not self._kept:
            self._kept = memoryview(bytearray(max(size, _FIRST_GUESS_BYTES)))
        return self._kept

    def _zstd(self, raw: memoryview, max_bytes: int) -> Buffer:
        # A frame need not have the size of its output. So this guesses, and grows while the output does not fit.
        size = len(self._kept) if len(self._kept) > len(raw) else 4 * len(raw)
        out = self._room(min(size, max_bytes))[:max_bytes]
        while True:
            try:
                return out[: cramjam.zstd.decompress_into(raw, out)]
            except cramjam.DecompressionError as error:
                if _OUTPUT_FULL not in str(error):
                    raise
                if len(out) >= max_bytes:
                    raise CorruptBatchError(f"{len(raw)} compressed bytes expand beyond {max_bytes}") from error
            out = self._room(min(4 * len(out), max_bytes))[:max_bytes]

    def _gzip(self, raw: memoryview, max_bytes: int) -> Buffer:
        out = self._room(min(4 * len(raw), max_bytes))
        written = pos = 0
        while pos == 0 or (len(raw) - pos > _GZIP_OVERHEAD_BYTES and raw[pos : pos + len(_GZIP_HEAD)] == _GZIP_HEAD):
            member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            while not member.eof:
                if pos >= len(raw):
                    raise CorruptBatchError(f"a gzip member exceeds the {len(raw)} bytes present")
                piece = member.decompress(raw[pos : pos + _GZIP_INPUT_BYTES], max_bytes + 1 - written)
                pos = min(pos + _GZIP_INPUT_BYTES, len(raw)) - len(member.unused_data)
                if written + len(piece) > max_bytes:
                    raise CorruptBatchError(f"{len(raw)} compressed bytes expand beyond {max_bytes}")
                if written + len(piece) > len(out):
                    before = out[:written]
                    out = self._room(min(max(4 * written, written + len(piece)), max_bytes))
                    out[:written] = before
                out[written : written + len(piece)] = piece
                written += len(piece)
        return out[:written]

    def _snappy(self, raw: memoryview, max_bytes: int) -> Buffer:
        blocks = _xerial_blocks(raw) if raw[: len(_XERIAL_MAGIC)] == _XERIAL_MAGIC else [raw]
        size = 0
        for block in blocks:
            block_bytes = cramjam.snappy.decompress_raw_len(block)
            if block_bytes > _SNAPPY_MAX_EXPANSION * len(block):
                raise CorruptBatchError(f"a snappy block of {len(block)} bytes announces {block_bytes} bytes")
            size += block_bytes
        if size > max_bytes:
            raise CorruptBatchError(f"{len(raw)} compressed bytes expand to {size}, beyond {max_bytes}")
        out = self._room(size)
        written = 0
        for block in blocks:
            # Each block writes as many bytes as its header announced, and never beyond `size`.
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
            if end == pos:  # the end mark; like Java, this accepts it with and without the bit for a raw block
                return out[:written]
            if end > len(raw) or end - pos > block_bytes:
                raise CorruptBatchError(f"an lz4 block up to {end} is too large or exceeds {len(raw)} bytes")
            if written + block_bytes > len(out):
                before = out[:written]
                out = self._room(min(2 * written, max_bytes) + block_bytes)
                out[:written] = before
            if size & _LZ4_BLOCK_IS_RAW:
                out[written : written + end - pos] = raw[pos:end]
                written += end - pos
            else:
                # The decoder may write to the whole slice, because `output_len` does not limit it. The slice does.
                block = out[written : written + block_bytes]
                written += cramjam.lz4.decompress_block_into(raw[pos:end], block, output_len=block_bytes)
            if written > max_bytes:
                raise CorruptBatchError(f"{len(raw)} compressed bytes expand beyond {max_bytes}")
            pos = end + checksum_bytes
        raise CorruptBatchError("an lz4 frame has no end mark")


def _xerial_blocks(raw: memoryview) -> list[memoryview]:
    blocks = []
    pos = 0
    end = len(raw)
    while pos + INT32.size <= end:  # like Java, this ignores less than a length
        if raw[pos : pos + len(_XERIAL_MAGIC)] == _XERIAL_MAGIC:
            pos += _XERIAL_HEADER_BYTES
            continue
        (length,) = INT32.unpack_from(raw, pos)
        pos += INT32.size
        if length < 0 or pos + length > end:
            raise CorruptBatchError(f"a snappy block of {length} bytes at {pos} exceeds the {end} bytes present")
        blocks.append(raw[pos : pos + length])
        pos += length
    return blocks


def _lz4_first_block(raw: memoryview) -> tuple[int, int, int]:
    """Returns the position of the first block, the maximum size of a block, and the size of a block's checksum."""
    if len(raw) < _LZ4_FRAME_HEAD.size:
        raise CorruptBatchError(f"an lz4 frame of {len(raw)} bytes is shorter than its header")
    magic, flags, descriptor = _LZ4_FRAME_HEAD.unpack_from(raw)
    block_bytes = _LZ4_MAX_BLOCK_BYTES.get(descriptor >> 4 & 7)
    if magic != _LZ4_MAGIC or block_bytes is None or not flags & _LZ4_INDEPENDENT_BLOCKS:
        raise CorruptBatchError(
            f"cannot read an lz4 frame with magic {magic:#x}, flags {flags:#x}, descriptor {descriptor:#x}"
        )
    pos = _LZ4_FRAME_HEAD.size + 1
    pos += 8 if flags & _LZ4_CONTENT_SIZE else 0
    pos += 4 if flags & _LZ4_DICTIONARY else 0
    return pos, block_bytes, 4 if flags & _LZ4_BLOCK_CHECKSUMS else 0
