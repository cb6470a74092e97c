from __future__ import annotations

import os
import struct

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lz4 import frame as lz4_frame  # type: ignore[import-untyped]  # there are no types for it

from protocol.errors import CorruptBatchError
from protocol.records import compression
from protocol.records.compression import Decompressor, decompress
from protocol.records.record_batch import CODEC_GZIP, CODEC_LZ4, CODEC_SNAPPY, CODEC_ZSTD
from tests.support.fakes.record_batches import compress

CODECS = [CODEC_GZIP, CODEC_SNAPPY, CODEC_LZ4, CODEC_ZSTD]
BLOCK = 64 << 10

contents = st.builds(lambda unit, times: unit * times, st.binary(min_size=1, max_size=40), st.integers(0, 9000))


def usual_lz4_frame(content: bytes) -> bytes:
    """A block that does not shrink is stored unchanged, as Java's producer and librdkafka do."""
    frame = bytes.fromhex("04224d18604082")
    for start in range(0, len(content), BLOCK):
        plain = content[start : start + BLOCK]
        packed = bytes(cramjam.lz4.compress_block(plain, store_size=False))
        block = plain if len(packed) >= len(plain) else packed
        frame += struct.pack("<I", len(block) | (block is plain) << 31) + block
    return frame + bytes(4)


@given(st.lists(st.tuples(st.sampled_from(CODECS), contents, st.booleans()), min_size=2, max_size=5))
def test_one_batch_after_another_in_the_same_memory(batches: list[tuple[int, bytes, bool]]) -> None:
    decompressor = Decompressor()
    for codec, content, is_xerial in batches:
        packed = usual_lz4_frame(content) if codec == CODEC_LZ4 else compress(codec, content, is_xerial)
        assert bytes(decompressor.decompress(codec, packed)) == content


@pytest.mark.parametrize("codec", CODECS)
def test_a_call_leaves_the_result_of_the_call_before_it_alone(codec: int) -> None:
    first = decompress(codec, compress(codec, b"first" * 100))
    decompress(codec, compress(codec, b"later" * 100))
    assert bytes(first) == b"first" * 100


@pytest.mark.parametrize("codec", CODECS)
def test_no_more_memory_is_made_than_output_may_have(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(size: int = 0) -> bytearray:
        made.append(size)
        return bytearray(size)

    monkeypatch.setattr(compression, "bytearray", make, raising=False)
    content = os.urandom(30_000) + bytes(970_000)
    packed = usual_lz4_frame(content) if codec == CODEC_LZ4 else compress(codec, content)
    assert len(decompress(codec, packed, max_bytes=1_000_000)) == 1_000_000
    with pytest.raises(CorruptBatchError, match="beyond"):
        decompress(codec, packed, max_bytes=999_999)
    assert max(made) <= 1_000_000 + BLOCK


def test_a_snappy_block_that_announces_too_much_reserves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = b"\x80\x80\x80\x40" + bytes(100)  # 128 MiB in 100 bytes
    decompressor = Decompressor()
    monkeypatch.setattr(compression, "bytearray", None, raising=False)  # none is made
    with pytest.raises(CorruptBatchError, match="a snappy block of 104 bytes announces 134217728 bytes"):
        decompressor.decompress(CODEC_SNAPPY, packed)


@given(st.integers(0, 3 * BLOCK), st.integers(0, 2 * BLOCK))
def test_an_lz4_frame_as_most_clients_write_it(shrinking: int, other: int) -> None:
    content = os.urandom(other) + b"ab" * (shrinking // 2)
    frame = usual_lz4_frame(content)
    assert lz4_frame.decompress(frame) == content
    assert bytes(decompress(CODEC_LZ4, frame)) == content
    assert bytes(decompress(CODEC_LZ4, frame, max_bytes=len(content))) == content
    if content:
        with pytest.raises(CorruptBatchError, match="beyond"):
            decompress(CODEC_LZ4, frame, max_bytes=len(content) - 1)


@pytest.mark.parametrize("block_size", [lz4_frame.BLOCKSIZE_MAX64KB, lz4_frame.BLOCKSIZE_MAX4MB])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_any_other_lz4_frame_that_kafka_reads(block_size: int, has_checksums: bool) -> None:
    content = b"0123456789" * 20_000
    frame = lz4_frame.compress(
        content,
        block_size=block_size,
        block_linked=False,
        content_checksum=has_checksums,
        block_checksum=has_checksums,
        store_size=has_checksums,
    )
    assert bytes(decompress(CODEC_LZ4, frame)) == content


GZIP, XERIAL, LZ4, ZSTD = (compress(codec, b"whole", xerial=True) for codec in CODECS)
USUAL_LZ4 = usual_lz4_frame(b"ab" * BLOCK)
OTHER_LZ4 = lz4_frame.compress(b"whole", content_checksum=True)
PADDED = {
    "gzip, one byte": (CODEC_GZIP, GZIP + bytes(1)),
    "gzip, zeros": (CODEC_GZIP, GZIP + bytes(100)),
    "gzip, more than one read": (CODEC_GZIP, GZIP + b"\x7f" * 100_000),
    "gzip, fewer bytes than a member has": (CODEC_GZIP, GZIP + GZIP[:18]),
    "gzip, behind two members": (CODEC_GZIP, compress(CODEC_GZIP, b"wh") + compress(CODEC_GZIP, b"ole") + bytes(100)),
    "xerial, half a length": (CODEC_SNAPPY, XERIAL + b"\x7f" * 3),
    "xerial, one more header": (CODEC_SNAPPY, XERIAL + XERIAL[:16]),
    "lz4, zeros": (CODEC_LZ4, LZ4 + bytes(100)),
    "lz4, one more frame": (CODEC_LZ4, LZ4 + LZ4),
    "lz4 with a checksum, one byte": (CODEC_LZ4, OTHER_LZ4 + bytes(1)),
    "lz4 with a checksum, one more frame": (CODEC_LZ4, OTHER_LZ4 + OTHER_LZ4),
}
UNREADABLE = {
    "gzip, no member": (CODEC_GZIP, bytes(100)),
    "gzip, cut in the deflate stream": (CODEC_GZIP, GZIP[:-9]),
    "gzip, cut in the trailer": (CODEC_GZIP, GZIP[:-1]),
    "gzip, wrong trailer": (CODEC_GZIP, GZIP[:-8] + bytes(8)),
    "gzip, one more member without an end": (CODEC_GZIP, GZIP + GZIP[:19]),
    "gzip, one more member with damage": (CODEC_GZIP, GZIP + GZIP[:10] + b"\xff" * 20),
    "raw snappy, padding": (CODEC_SNAPPY, compress(CODEC_SNAPPY, b"whole") + bytes(1)),
    "xerial, cut": (CODEC_SNAPPY, XERIAL[:-1]),
    "xerial, an empty block": (CODEC_SNAPPY, XERIAL + bytes(4)),
    "xerial, too long a block": (CODEC_SNAPPY, XERIAL + b"\x7f" * 100),
    "lz4, cut in its header": (CODEC_LZ4, USUAL_LZ4[:5]),
    "lz4, cut in a block": (CODEC_LZ4, USUAL_LZ4[:40]),
    "lz4, no end mark": (CODEC_LZ4, USUAL_LZ4[:-4]),
    "lz4, a block too large": (
        CODEC_LZ4,
        USUAL_LZ4[:7] + struct.pack("<I", 1 << 31 | BLOCK + 1) + bytes(BLOCK + 1) + bytes(4),
    ),
    "lz4, a block that is none": (CODEC_LZ4, USUAL_LZ4[:7] + struct.pack("<I", 4) + b"\xff" * 4 + bytes(4)),
    "zstd, padding": (CODEC_ZSTD, ZSTD + bytes(1)),
    "zstd, cut": (CODEC_ZSTD, ZSTD[:-1]),
}
"""Kafka's own reader refuses these."""


@pytest.mark.parametrize("case", PADDED)
def test_padding_behind_a_whole_stream_is_ignored(case: str) -> None:
    codec, stream = PADDED[case]
    assert bytes(decompress(codec, stream)) == b"whole"


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_stream_that_kafka_refuses_is_damaged(case: str) -> None:
    codec, stream = UNREADABLE[case]
    with pytest.raises(CorruptBatchError):
        decompress(codec, stream)


@pytest.mark.parametrize("codec", [CODEC_GZIP, CODEC_SNAPPY, CODEC_ZSTD])
@pytest.mark.parametrize("count", [2, 3000])
def test_one_stream_behind_another_is_read(codec: int, count: int) -> None:
    assert bytes(decompress(codec, compress(codec, b"whole", xerial=True) * count)) == b"whole" * count


@pytest.mark.parametrize("codec", CODECS)
def test_memory_for_a_large_batch_is_not_kept(codec: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_MAX_KEPT_BYTES", 200_000)
    decompressor = Decompressor()
    large = decompressor.decompress(codec, compress(codec, b"large" * 100_000))
    decompressor.decompress(codec, compress(codec, b"small" * 100))
    assert bytes(large) == b"large" * 100_000  # so it lay in memory of its own
