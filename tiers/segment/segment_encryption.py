"""Encryption at rest: AES-256-GCM per chunk with one key per segment, which a key of the ring wraps.

    stored chunk        the chunk's log bytes, encrypted | tag 16
    ENCRYPTION section  version int8 = 0 | length int16, key id | nonce 12 | the segment's key, encrypted, 32 | tag 16

* Every copy attempt has its own key, so the number of a chunk can be its nonce. The segment's uuid and the chunk's
  number are authenticated with the chunk. So a chunk that was swapped, cut or replaced does not decrypt.
* The position of a chunk, its offsets, timestamps and checksum are no record data and stay readable.
* A new wrapping key applies to new segments only. Each older segment names its wrapping key, which must stay in the
  ring as long as the segment exists.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tiers.errors import CorruptSegmentError, EncryptionKeyError
from tiers.segment.indexes.indexes_object import IndexesObject, SegmentCiphers
from tiers.segment.indexes.segment_index import Chunk, OpenChunk, encode_remote_log_index
from tiers.segment.segment_builder import BuiltSegment

KEY_BYTES = 32
TAG_BYTES = 16
_NONCE_BYTES = 12
_VERSION = 0
_PREFIX = struct.Struct(">bh")
_CHUNK = struct.Struct(">16si")
_MAX_KEY_ID_BYTES = 255


class SegmentCipher:
    """Seals and opens the chunks of one segment."""

    def __init__(self, uuid: UUID, key: bytes) -> None:
        self._uuid = uuid
        self._aead = AESGCM(key)

    def seal(self, number: int, chunk: bytes | memoryview) -> bytes:
        return self._aead.encrypt(number.to_bytes(_NONCE_BYTES, "big"), chunk, _CHUNK.pack(self._uuid.bytes, number))

    def open(self, number: int, stored: bytes | memoryview) -> bytes:
        """Decrypts the chunk. Raises `CorruptSegmentError` unless `stored` was sealed as this chunk of this segment."""
        place = _CHUNK.pack(self._uuid.bytes, number)
        try:
            return self._aead.decrypt(number.to_bytes(_NONCE_BYTES, "big"), stored, place)
        except InvalidTag:
            raise CorruptSegmentError(f"segment {self._uuid}: chunk {number} fails authentication") from None


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The wrapping keys by id, of `KEY_BYTES` each.

    New segments use the key `current`, which is one of them; None leaves new segments unencrypted."""

    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    current: str | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for an invalid key id."""
        for key_id in self.keys:
            if not 0 < len(key_id.encode()) <= _MAX_KEY_ID_BYTES:
                raise ValueError(f"a key's id must have 1 to {_MAX_KEY_ID_BYTES} bytes")

    def new_cipher(self, uuid: UUID) -> tuple[SegmentCipher, bytes]:
        """Returns the cipher of a new segment key, and the ENCRYPTION section that holds that key.

        Raises `ValueError` when there is no `current` key.
        """
        key = secrets.token_bytes(KEY_BYTES)
        return SegmentCipher(uuid, key), self._wrap(uuid, key)

    def open_chunks(self, uuid: UUID, section: bytes | memoryview) -> OpenChunk:
        """Returns what opens the chunks of an encrypted segment.

        Raises `EncryptionKeyError` when no key of the ring opens the section, and `CorruptSegmentError` when the
        section is malformed.
        """
        return SegmentCipher(uuid, self._unwrap(uuid, section)).open

    def wrapped_again(self, uuid: UUID, section: bytes | memoryview) -> bytes:
        """Returns the section with the same segment key, wrapped by `current`.

        The segment no longer needs its old wrapping key once this section is stored. Raises like `open_chunks` and
        `new_cipher`."""
        return self._wrap(uuid, self._unwrap(uuid, section))

    def _wrap(self, uuid: UUID, key: bytes) -> bytes:
        if self.current is None:
            raise ValueError("the key ring has no current key")
        key_id = self.current.encode()
        nonce = secrets.token_bytes(_NONCE_BYTES)
        wrapped = AESGCM(self.keys[self.current]).encrypt(nonce, key, uuid.bytes + key_id)
        return _PREFIX.pack(_VERSION, len(key_id)) + key_id + nonce + wrapped

    def _unwrap(self, uuid: UUID, section: bytes | memoryview) -> bytes:
        key_id, sealed = _split(uuid, section)
        wrapping_key = self.keys.get(key_id)
        if wrapping_key is None:
            raise EncryptionKeyError(f"segment {uuid} is encrypted with key {key_id!r}: add it to [encryption.keys]")
        try:
            nonce, wrapped = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
            return AESGCM(wrapping_key).decrypt(nonce, wrapped, uuid.bytes + key_id.encode())
        except InvalidTag:
            raise EncryptionKeyError(
                f"segment {uuid} is encrypted with another key than the one that [encryption.keys] calls {key_id!r}: "
                "restore the key"
            ) from None


def wrapping_key_id(uuid: UUID, section: bytes | memoryview) -> str:
    """Returns the id of the wrapping key that the segment needs. Raises `CorruptSegmentError`."""
    return _split(uuid, section)[0]


def _split(uuid: UUID, section: bytes | memoryview) -> tuple[str, bytes]:
    raw = bytes(section)
    try:
        version, id_length = _PREFIX.unpack_from(raw)
        key_id, sealed = raw[_PREFIX.size : _PREFIX.size + id_length].decode(), raw[_PREFIX.size + id_length :]
    except (struct.error, ValueError) as error:
        raise CorruptSegmentError(f"segment {uuid}: its encryption section is malformed: {error}") from error
    if version != _VERSION or id_length <= 0 or len(sealed) != _NONCE_BYTES + KEY_BYTES + TAG_BYTES:
        raise CorruptSegmentError(f"segment {uuid}: its encryption section has an unknown format")
    return key_id, sealed


def seal_segment(built: BuiltSegment, uuid: UUID, ring: KeyRing, path: Path) -> BuiltSegment:
    """Encrypts the log of `built` chunk by chunk into the new file `path`, and returns the encrypted segment.

    Blocks on the disk, which then holds the segment twice.
    """
    cipher, section = ring.new_cipher(uuid)
    sealed_chunks = []
    position = 0
    with built.log_segment.open("rb") as log, path.open("xb") as sealed_log:
        for number, chunk in enumerate(built.chunks):
            sealed = cipher.seal(number, log.read(chunk.log_bytes))
            sealed_log.write(sealed)
            sealed_chunks.append(replace(chunk, stored_position=position, stored_bytes=len(sealed)))
            position += len(sealed)
    indexes = replace(built.indexes, remote_log_index=encode_remote_log_index(sealed_chunks), encryption=section)
    return replace(built, log_segment=path, indexes=indexes)


def unsealed_segment(sealed: IndexesObject, log: Path, ciphers: SegmentCiphers, path: Path) -> BuiltSegment:
    """Writes the log bytes of a segment, whose stored bytes are in `log`, into the new file `path`.

    The result can be stored with another uuid. Blocks on the disk.

    Raises `CorruptSegmentError` and `EncryptionKeyError`."""
    index, opened, position = sealed.remote_log_index(ciphers), list[Chunk](), 0
    with log.open("rb") as stored, path.open("xb") as file:
        for number, chunk in enumerate(index.chunks()):
            stored.seek(chunk.stored_position)
            log_bytes = index.open_chunk(number, memoryview(stored.read(chunk.stored_bytes)))
            file.write(log_bytes)
            opened.append(replace(chunk, stored_position=position, stored_bytes=len(log_bytes)))
            position += len(log_bytes)
        file.flush()
        os.fsync(file.fileno())
    metadata, remote_log_index = sealed.metadata, encode_remote_log_index(opened)
    return BuiltSegment(
        log_segment=path,
        start_offset=metadata.start_offset,
        end_offset=metadata.end_offset,
        size_bytes=metadata.segment_size_bytes,
        max_timestamp_ms=metadata.max_timestamp_ms,
        missing_offsets=0,
        indexes=replace(sealed.indexes, remote_log_index=remote_log_index, encryption=None),
    )


def read_key_file(path: Path) -> bytes:
    """Reads a key file, which holds 32 bytes or their base64. Raises `ValueError`, which never shows the content."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if len(raw) == KEY_BYTES:
        return raw
    try:
        key = base64.b64decode(raw.strip(), validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"{path}: expected {KEY_BYTES} bytes or their base64; create it by `openssl rand -base64 32`")
    return key
