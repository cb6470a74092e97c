"""The cache counts its bytes, and returns whole extents."""

from __future__ import annotations

import uuid

from tiers.reader.chunk_cache import ChunkCache, ChunkKey, Extent

A, B, C = (uuid.UUID(int=n) for n in range(3))


def extent(segment: uuid.UUID, first: int, *sizes: int) -> Extent:
    chunks = tuple(memoryview(bytes(size)) for size in sizes)
    return Extent(segment, first, chunks, sum(sizes))


def held(cache: ChunkCache) -> set[ChunkKey]:
    return {key for key in (ChunkKey(segment, number) for segment in (A, B, C) for number in range(10)) if key in cache}


def test_every_chunk_of_an_extent_is_found_by_its_number() -> None:
    cache, put = ChunkCache(100), extent(A, 3, 10, 20)
    cache.put(put)
    assert [cache.get(ChunkKey(A, number)) for number in (3, 4, 5)] == [*put.chunks, None]
    assert cache.get(ChunkKey(A, 4)) is put.chunks[1]
    assert cache.get(ChunkKey(B, 3)) is None
    assert (cache.hits, cache.misses, cache.size_bytes) == (3, 2, 30)


def test_the_extent_used_least_recently_goes_first_and_whole() -> None:
    cache = ChunkCache(100)
    cache.put(extent(A, 0, 20, 20))
    cache.put(extent(B, 0, 40))
    cache.get(ChunkKey(A, 1))
    cache.put(extent(C, 0, 30))
    assert held(cache) == {ChunkKey(A, 0), ChunkKey(A, 1), ChunkKey(C, 0)}
    cache.put(extent(B, 7, 90))
    assert (held(cache), cache.size_bytes) == ({ChunkKey(B, 7)}, 90)
    cache.put(extent(A, 0, 101))  # larger than the cache
    assert held(cache) == {ChunkKey(B, 7)}
