"""The settings of a store, and where its storage manager is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import install_example
from tests.support.fakes.copies import segment_to_copy
from tiers.config.managers import create_remote_storage_manager, create_storage
from tiers.config.settings import StorageConfig
from tiers.storage.settings import read_duration_ms, read_flag, read_number, read_settings, read_size_bytes

DEFAULTS = {"bucket": None, "timeout.ms": "30000", "path.style": "false"}


def test_a_given_setting_wins_over_the_default() -> None:
    values = read_settings("s3", {"bucket": "b", "timeout.ms": "5"}, DEFAULTS)
    assert values == {"bucket": "b", "timeout.ms": "5", "path.style": "false"}
    assert read_flag(values, "path.style") is False
    assert read_flag({"path.style": "TRUE"}, "path.style") is True


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "'bucket' of the s3 storage manager is missing"),
        ({"bucket": ""}, "'bucket' of the s3 storage manager is missing"),
        ({"bucket": "b", "timeout.msec": "s3cr3t"}, r"'timeout\.msec'.*did you mean timeout\.ms"),
        ({"bucket": "b", "zzz": "s3cr3t"}, r"unknown setting 'zzz' of the s3 storage manager$"),
    ],
)
def test_a_wrong_setting_is_named_and_its_value_is_not(settings: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named) as raised:
        read_settings("s3", settings, DEFAULTS)
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("30000", 30_000), ("30s", 30_000), ("1.5 s", 1_500), ("1.001s", 1_001), ("250ms", 250), ("2m", 120_000)],
)
def test_a_duration_may_have_a_unit(text: str, milliseconds: int) -> None:
    assert read_duration_ms({"timeout.ms": text}, "timeout.ms", 1) == milliseconds


def test_a_size_may_have_a_unit_and_has_a_minimum() -> None:
    for text in ("16777216", "16MiB", "16 MiB", "0.015625GiB"):
        assert read_size_bytes({"part.size": text}, "part.size", 16 << 20) == 16 << 20
        with pytest.raises(ValueError, match=r"'part\.size': 16777216 is below 16777217"):
            read_size_bytes({"part.size": text}, "part.size", (16 << 20) + 1)


@pytest.mark.parametrize("text", ["true", "", "3 moons", "-1s", "1_000", "1e3", "1.5", "\N{ARABIC-INDIC DIGIT ONE}"])
def test_what_is_no_whole_number_is_refused_and_not_quoted(text: str) -> None:
    for read, expected in ((read_duration_ms, "a .*number of milliseconds"), (read_number, "a whole number")):
        with pytest.raises(ValueError, match=rf"setting 'some\.ms': expected {expected}") as raised:
            read({"some.ms": text}, "some.ms", 1)
        assert not text or repr(text) not in str(raised.value)
    with pytest.raises(ValueError, match="number of milliseconds"):
        read_duration_ms({"some.ms": "1.5ms"}, "some.ms", 1)
    with pytest.raises(ValueError, match="a whole number"):
        read_number({"some.ms": "3s"}, "some.ms", 1)


def test_a_file_can_hold_the_value_of_a_declared_setting(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    declared = {"key": "", "log.file": ""}
    assert read_settings("x", {"key.file": str(secret), "log.file": "a"}, declared) == {
        "key": "s3cret",
        "log.file": "a",
    }
    with pytest.raises(ValueError, match=r"'key' and 'key\.file' are both set"):
        read_settings("x", {"key.file": str(secret), "key": "a"}, declared)
    with pytest.raises(ValueError, match=r"unknown setting 'other\.file'"):
        read_settings("x", {"other.file": str(secret)}, declared)
    secret.unlink()
    with pytest.raises(ValueError, match=r"setting 'key\.file': .*secret: No such file or directory"):
        read_settings("x", {"key.file": str(secret)}, declared)


def install(folder: Path, package: str, entry_point: str) -> None:
    """The files that pip installs of a package with a storage manager."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tidegate.remote_storage_manager]\n{entry_point}\n")


@pytest.mark.parametrize(
    ("entry_point", "named"),
    [
        ("broken = no_such_module:Manager", "cannot be imported: No module named 'no_such_module'"),
        ("local = impostor:Manager", "several packages"),
    ],
)
def test_a_package_that_cannot_be_used_is_named(
    entry_point: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "other", entry_point)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=named):
        create_remote_storage_manager(entry_point.partition(" ")[0], {"path": "/", "cluster.id": "c"})


async def test_a_package_of_a_third_party_is_found_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_example("tape-store", tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    (tmp_path / "tapes").mkdir()
    config = {"implementation": "tape", "folder": str(tmp_path / "tapes")}
    storage = create_storage(StorageConfig.model_validate(config), "c")
    await storage.open()
    await storage.check()
    metadata, data = segment_to_copy(tmp_path)
    await storage.copy_log_segment_data(metadata, data)
    assert await storage.delete_log_segment_data(metadata)
    assert [stored async for stored in storage.list_objects("")] == []
    await storage.close()
    with pytest.raises(ValueError, match="did you mean folder"):
        create_storage(StorageConfig.model_validate({"implementation": "tape", "foldr": "/"}), "c")
