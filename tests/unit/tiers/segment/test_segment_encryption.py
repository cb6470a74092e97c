from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.errors import CorruptSegmentError, EncryptionKeyError
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.segment.segment_encryption import (
    TAG_BYTES,
    KeyRing,
    SegmentCipher,
    read_key_file,
    seal_segment,
    wrapping_key_id,
)

UUID_A = UUID("01122334455667788899aabbccddeeff")
UUID_B = UUID("f1122334455667788899aabbccddeeff")
RING = KeyRing({"k1": b"1" * 32, "k2": b"2" * 32}, current="k1")
KEY = b"\xff" * 32


@given(st.binary(max_size=300), st.integers(0, 2**31 - 1), st.data())
def test_a_chunk_opens_to_what_was_sealed_or_not_at_all(chunk: bytes, number: int, data: st.DataObject) -> None:
    cipher = SegmentCipher(UUID_A, b"k" * 32)
    sealed = bytearray(cipher.seal(number, chunk))
    assert len(sealed) == len(chunk) + TAG_BYTES
    assert cipher.open(number, bytes(sealed)) == chunk
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptSegmentError, match=f"chunk {number}"):
        cipher.open(number, bytes(sealed))


def test_a_chunk_opens_in_its_own_place_alone() -> None:
    cipher, section = RING.new_cipher(UUID_A)
    sealed = cipher.seal(0, b"batches")
    assert RING.open_chunks(UUID_A, section)(0, sealed) == b"batches"
    for kept in range(len(section)):
        with pytest.raises(CorruptSegmentError):
            RING.open_chunks(UUID_A, section[:kept])
    with pytest.raises(CorruptSegmentError):
        cipher.open(1, sealed)
    with pytest.raises(CorruptSegmentError):
        SegmentCipher(UUID_B, b"k" * 32).open(0, SegmentCipher(UUID_A, b"k" * 32).seal(0, b"batches"))


def test_a_rotated_ring_opens_old_segments_and_seals_with_the_new_key() -> None:
    cipher, old_section = RING.new_cipher(UUID_A)
    sealed = cipher.seal(0, b"batches")
    rotated = replace(RING, current="k2")
    assert rotated.open_chunks(UUID_A, old_section)(0, sealed) == b"batches"
    assert wrapping_key_id(UUID_B, rotated.new_cipher(UUID_B)[1]) == "k2"
    moved = rotated.wrapped_again(UUID_A, old_section)
    assert KeyRing({"k2": b"2" * 32}, current="k2").open_chunks(UUID_A, moved)(0, sealed) == b"batches"


@pytest.mark.parametrize(
    ("ring", "segment", "said"),
    [
        (KeyRing({"k2": b"2" * 32}), UUID_A, r"encrypted with key 'k1': add it to \[encryption.keys\]"),
        (KeyRing({"k1": b"x" * 32}), UUID_A, r"another key than the one that \[encryption.keys\] calls 'k1'"),
        (RING, UUID_B, "k1"),
    ],
    ids=["no key", "another key", "the section of another segment"],
)
def test_a_key_that_cannot_be_unwrapped_is_named(ring: KeyRing, segment: UUID, said: str) -> None:
    with pytest.raises(EncryptionKeyError, match=said):
        ring.open_chunks(segment, RING.new_cipher(UUID_A)[1])


def test_a_sealed_segment_is_read_through_its_remote_log_index(tmp_path: Path) -> None:
    built = build_segment(tmp_path / "plain", [batch_of(10 * n, 10) for n in range(6)], chunk_bytes=400)
    metadata = metadata_of(built)
    sealed = seal_segment(built, metadata.segment_id.id, RING, tmp_path / "sealed")
    stored, plain = sealed.log_segment.read_bytes(), built.log_segment.read_bytes()
    assert len(built.chunks) > 1
    assert len(stored) == len(plain) + TAG_BYTES * len(built.chunks)
    assert plain[61:100] not in stored  # the first batch's records

    decoded = decode_indexes_object(sealed.log_segment_data(metadata).indexes, metadata)
    index = decoded.remote_log_index(RING)
    opened = b"".join(
        index.open_chunk(number, memoryview(stored)[chunk.stored_position : chunk.stored_position + chunk.stored_bytes])
        for number, chunk in enumerate(index.chunks())
    )
    assert opened == plain
    with pytest.raises(EncryptionKeyError, match="there are no keys"):
        decoded.remote_log_index()


def test_a_key_file_holds_32_bytes_or_their_base64_and_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    for content in (KEY, base64.b64encode(KEY), base64.b64encode(KEY) + b"\n"):
        file.write_bytes(content)
        assert read_key_file(file) == KEY
    for content in (b"", b"secret", KEY[:31], base64.b64encode(b"short")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="openssl rand -base64 32") as raised:
            read_key_file(file)
        assert "secret" not in str(raised.value)


def test_a_ring_shows_no_key() -> None:
    assert "1111" not in repr(RING)
