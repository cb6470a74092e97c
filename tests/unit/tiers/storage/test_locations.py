"""The locations of new segments, and that a segment is found after any later change of the settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.copies import opened, segment_to_copy
from tiers.config.managers import create_storage
from tiers.config.settings import StorageConfig
from tiers.errors import (
    CircuitOpenError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.locations import HOME, LocatedRemoteStorageManager, StorageLocation, decode_location, encode_location

KAFKAS_LIMIT_BYTES = 128


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("home", "east", "west"):
        (tmp_path / name).mkdir()
    return tmp_path


def made(root: Path, *locations: Mapping[str, Any]) -> LocatedRemoteStorageManager:
    """Home, and what is listed: names of folders, with whatever else is said of them."""
    sections = [{"path": str(root / one["name"]), **one} for one in locations]
    config = {"implementation": "local", "path": str(root / "home"), "locations": sections}
    return create_storage(StorageConfig.model_validate(config), "c")


def stores(root: Path, *locations: Mapping[str, Any]) -> AbstractAsyncContextManager[LocatedRemoteStorageManager]:
    return opened(made(root, *locations))


EAST, WEST = {"name": "east"}, {"name": "west"}


async def copied(storage: LocatedRemoteStorageManager, root: Path) -> RemoteLogSegmentMetadata:
    metadata, data = segment_to_copy(root)
    return replace(metadata, custom_metadata=await storage.copy_log_segment_data(metadata, data))


def objects(root: Path, name: str) -> list[str]:
    return [path.suffix for path in (root / name).rglob("*.*") if path.is_file()]


async def test_a_segment_is_found_where_it_was_put_whatever_is_current_later(root: Path) -> None:
    async with stores(root) as storage:
        at_home = await copied(storage, root)
        assert at_home.custom_metadata is None
    async with stores(root, EAST) as storage:
        in_the_east = await copied(storage, root)
    assert decode_location(in_the_east.custom_metadata) == ("east", None)
    assert sorted(objects(root, "east")) == [".indexes", ".log"]

    async with stores(root, EAST | {"weight": 0}, WEST) as storage:
        in_the_west = await copied(storage, root)
        assert decode_location(in_the_west.custom_metadata)[0] == "west"
        for metadata in (at_home, in_the_east, in_the_west):
            assert len(await storage.fetch_log_segment(metadata, 0, 9)) == 10
            assert await storage.fetch_indexes(metadata)
            assert await storage.delete_log_segment_data(metadata)
    assert [objects(root, name) for name in ("home", "east", "west")] == [[], [], []]


async def test_a_removed_location_is_named_and_is_no_missing_object(root: Path) -> None:
    async with stores(root, EAST) as storage:
        metadata = await copied(storage, root)
    for locations in ((), (WEST,)):
        async with stores(root, *locations) as storage:
            for call in (
                storage.fetch_log_segment(metadata, 0, 9),
                storage.fetch_indexes(metadata),
                storage.delete_log_segment_data(metadata),
            ):
                with pytest.raises(RemoteStorageError, match="location 'east', which is not configured") as raised:
                    await call
                assert not isinstance(raised.value, RemoteResourceNotFoundError)
                assert not raised.value.retriable
    assert sorted(objects(root, "east")) == [".indexes", ".log"]


async def test_new_segments_are_placed_by_weight_and_a_retry_keeps_its_place(root: Path) -> None:
    async with stores(root, EAST, WEST | {"weight": 3}) as storage:
        names: Counter[str] = Counter()
        for _ in range(200):
            metadata, data = segment_to_copy(root)
            first = await storage.copy_log_segment_data(metadata, data)
            assert await storage.copy_log_segment_data(metadata, data) == first
            names[decode_location(first)[0]] += 1
    assert set(names) == {"east", "west"}
    assert names["west"] > names["east"]


async def test_topics_have_locations_of_their_own_and_home_takes_the_others(root: Path) -> None:
    metadata, data = segment_to_copy(root)
    topic = metadata.topic_id_partition.topic
    async with stores(root, EAST | {"topics": f"{topic[:2]}*"}, WEST | {"topics": "other"}) as storage:
        assert decode_location(await storage.copy_log_segment_data(metadata, data))[0] == "east"
    async with stores(root, WEST | {"topics": "other"}) as storage:
        recorded = (await copied(storage, root)).custom_metadata
        assert recorded is not None
        assert decode_location(recorded) == (HOME, None)


def at(metadata: RemoteLogSegmentMetadata, location: str) -> RemoteLogSegmentMetadata:
    return replace(metadata, custom_metadata=encode_location(location, None))


class Failing:
    """Each call of a method of one location fails."""

    def __init__(self, patch: pytest.MonkeyPatch, place: object, method: str, error: Exception) -> None:
        self.calls = 0
        self._error = error
        patch.setattr(place, method, self._fail)

    async def _fail(self, *arguments: object) -> None:
        self.calls += 1
        raise self._error


@pytest.mark.parametrize("error", [RetriableRemoteStorageError("503"), RemoteStorageError("403")])
async def test_the_leftovers_of_a_copy_are_deleted_at_each_reachable_location(
    root: Path, error: RemoteStorageError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores(root, EAST, WEST) as storage:
        metadata, data = segment_to_copy(root)
        await storage.place_of(at(metadata, "west")).copy_log_segment_data(metadata, data)
        Failing(monkeypatch, storage.place_of(at(metadata, "east")), "delete_log_segment_data", error)
        with pytest.raises(RemoteStorageError, match=r"'east'.*(503|403)") as caught:
            await storage.delete_log_segment_data(metadata)
        assert type(caught.value) is type(error)
        assert objects(root, "west") == []


async def test_a_listing_says_where_each_object_lies(root: Path) -> None:
    other_name = {"name": "levant", "path": str(root / "east"), "weight": 0}
    async with stores(root, EAST, other_name) as storage:
        await storage.put_object("manifest.json", b"{}")
        metadata = await copied(storage, root)
        listed = [stored async for stored in storage.list_objects("")]
        assert [decode_location(stored.custom_metadata)[0] for stored in listed] == [HOME, "east", "east"]
        (indexes,) = [stored for stored in listed if stored.key.endswith(".indexes")]
        assert indexes.custom_metadata == metadata.custom_metadata
        assert await storage.get_object(indexes.key) == await storage.fetch_indexes(metadata)
        with pytest.raises(RemoteResourceNotFoundError):
            await storage.get_object("no/such/object")


async def test_a_check_names_the_location_that_fails(root: Path) -> None:
    async with stores(root, EAST) as storage:
        await storage.check()
        (root / "east" / ".tmp").rmdir()
        (root / "east").rmdir()
        with pytest.raises(RemoteStorageError, match=r"location 'east': .*Is it mounted"):
            await storage.check()
    with pytest.raises(RemoteStorageError, match=r"location 'east': .*not a directory"):
        async with stores(root, EAST):
            pass


@pytest.mark.parametrize(
    ("locations", "named"),
    [
        ([{"name": "a b"}], "location 'a b'"),
        ([{"name": "x" * 65}], "up to 64"),
        ([{"name": "east", "implementation": "s3"}], "location 'east': setting 'bucket'"),
        ([{"name": "east", "patth": "/"}], "location 'east': unknown setting 'patth'"),
        ([EAST, EAST], "two locations are called 'east'"),
    ],
)
def test_impossible_settings_are_named(root: Path, locations: list[dict[str, str]], named: str) -> None:
    config = {"implementation": "local", "path": str(root), "locations": locations}
    with pytest.raises(ValueError, match=named):
        create_storage(StorageConfig.model_validate(config), "c")


def test_a_location_of_the_same_kind_takes_the_sections_settings() -> None:
    locations = [{"name": "east", "bucket": "east"}, {"name": "disk", "implementation": "local", "path": "/disk"}]
    section = {"implementation": "s3", "bucket": "home", "secret.access.key": "hush", "locations": locations}
    config = StorageConfig.model_validate(section)
    east, disk = config.locations
    assert config.place_of(east) == ("s3", {"bucket": "east", "secret.access.key": "hush"})
    assert config.place_of(disk) == ("local", {"path": "/disk"})
    assert "hush" not in repr(config)


OF_A_STORE = st.none() | st.binary(max_size=40).filter(lambda data: not data.startswith(b"TGL\x01"))


@given(st.text("abc.-_", min_size=1, max_size=64), OF_A_STORE)
def test_a_recorded_choice_reads_back(name: str, inner: bytes | None) -> None:
    encoded = encode_location(name, inner)
    assert decode_location(encoded) == (name, inner)
    assert len(encode_location("x" * 64, None)) < KAFKAS_LIMIT_BYTES
    assert decode_location(inner) == (HOME, inner)  # of a store without locations
    for cut in range(4, 6 + len(name.encode())):
        with pytest.raises(RemoteStorageError, match="cut off"):
            decode_location(encoded[:cut])


async def test_writes_to_a_location_in_trouble_fail_at_once_and_the_others_go_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores(root, EAST, WEST) as storage:
        one, _ = segment_to_copy(root)
        place = storage.place_of(at(one, "east"))
        east = Failing(monkeypatch, place, "copy_log_segment_data", RetriableRemoteStorageError("503"))
        failed: list[type[Exception]] = []
        while CircuitOpenError not in failed:
            try:
                await copied(storage, root)
            except RetriableRemoteStorageError as error:
                failed.append(type(error))
        assert east.calls == len(failed) - 1
        assert storage.write_breakers.open_locations == ["east"]
        assert await storage.delete_log_segment_data(at(one, "west"))
        with pytest.raises(CircuitOpenError):
            await storage.delete_log_segment_data(at(one, "east"))


async def test_a_store_that_is_down_at_the_start_is_opened_when_it_is_needed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0]
    monkeypatch.setattr("tiers.storage.locations.loop_ms", lambda: now[0])
    home, east = (LocalRemoteStorageManager({"path": str(root / name), "cluster.id": "c"}) for name in ("home", "east"))
    storage = LocatedRemoteStorageManager(home, [StorageLocation("east", east)])
    in_east = at(segment_to_copy(root)[0], "east")
    with monkeypatch.context() as patch:
        opening = Failing(patch, storage.place_of(in_east), "open", RetriableRemoteStorageError("503"))
        await storage.open_or_later()
        await storage.put_object("manifest.json", b"{}")
        for now[0], attempts in ((0, 1), (0, 1), (999, 1), (1000, 2)):  # one attempt a second
            with pytest.raises(RetriableRemoteStorageError, match="503"):
                await storage.fetch_indexes(in_east)
            assert opening.calls == attempts
    now[0] = 2000
    assert await storage.fetch_indexes(await copied(storage, root))
    await storage.close()


async def test_a_store_that_refuses_ends_the_start(root: Path) -> None:
    (root / "east").rmdir()
    storage = made(root, EAST)
    with pytest.raises(RemoteStorageError, match=r"location 'east': .*not a directory"):
        await storage.open_or_later()
    await storage.close()
