"""The cache counts its bytes, and returns whole extents."""

from __future__ import annotations

import uuid

from tiers.reader.chunk_cache import ChunkCache, ChunkKey, Extent

A, B, C = (uuid.UUID(int=n) for n in range(3))


def extent(segment: uuid.UUID, first: int, *sizes: int) -> Extent:
    data = memoryview(bytes(sum(sizes)))
    chunks, pos = [], 0
    for size in sizes:
        chunks.append(data[pos : pos + size])
        pos += size
    return Extent(segment, first, tuple(chunks), len(data))


def test_every_chunk_of_an_extent_is_found_by_its_number() -> None:
    cache = ChunkCache(100)
    held = extent(A, 3, 10, 20)
    cache.put(held)
    assert cache.get(ChunkKey(A, 3)) is held.chunks[0]
    assert cache.get(ChunkKey(A, 4)) is held.chunks[1]
    assert cache.get(ChunkKey(A, 5)) is None
    assert cache.get(ChunkKey(B, 3)) is None
    assert (cache.hits, cache.misses, cache.size_bytes) == (2, 2, 30)


def test_the_extent_used_least_recently_goes_first_and_whole() -> None:
    cache = ChunkCache(100)
    cache.put(extent(A, 0, 20, 20))
    cache.put(extent(B, 0, 40))
    cache.get(ChunkKey(A, 1))
    cache.put(extent(C, 0, 30))
    assert ChunkKey(B, 0) not in cache
    assert ChunkKey(A, 0) in cache
    assert ChunkKey(A, 1) in cache
    cache.put(extent(B, 7, 90))
    assert ChunkKey(A, 0) not in cache
    assert ChunkKey(A, 1) not in cache
    assert cache.size_bytes == 90


def test_a_chunk_larger_than_the_cache_is_not_kept() -> None:
    cache = ChunkCache(100)
    cache.put(extent(A, 0, 60))
    cache.put(extent(B, 0, 101))
    assert ChunkKey(A, 0) in cache
    assert ChunkKey(B, 0) not in cache
