from __future__ import annotations

from pathlib import Path

import pytest

from tiers.storage.settings import read_duration_ms, read_flag, read_number, read_settings, read_size_bytes

DEFAULTS = {"bucket": None, "timeout.ms": "30000", "path.style": "false"}


def test_a_given_setting_wins_over_the_default() -> None:
    values = read_settings("s3", {"bucket": "b", "timeout.ms": "5"}, DEFAULTS)
    assert values == {"bucket": "b", "timeout.ms": "5", "path.style": "false"}
    assert read_number(values, "timeout.ms", 1) == 5
    assert read_flag(values, "path.style") is False
    assert read_flag({"path.style": "TRUE"}, "path.style") is True


@pytest.mark.parametrize("settings", [{}, {"bucket": ""}])
def test_a_missing_required_setting_is_named(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="'bucket' of the s3 storage manager is missing"):
        read_settings("s3", settings, DEFAULTS)


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'timeout\.msec'.*did you mean timeout\.ms"):
        read_settings("s3", {"bucket": "b", "timeout.msec": "5"}, DEFAULTS)
    with pytest.raises(ValueError, match=r"unknown setting 'zzz' of the s3 storage manager$"):
        read_settings("s3", {"bucket": "b", "zzz": "5"}, DEFAULTS)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("30000", 30_000), ("30s", 30_000), ("1.5 s", 1_500), ("1.001s", 1_001), ("250ms", 250), ("2m", 120_000)],
)
def test_a_duration_may_have_a_unit(text: str, milliseconds: int) -> None:
    assert read_duration_ms({"timeout.ms": text}, "timeout.ms", 1) == milliseconds


def test_a_size_may_have_a_unit() -> None:
    for text in ("16777216", "16MiB", "16 MiB", "0.015625GiB"):
        assert read_size_bytes({"part.size": text}, "part.size", 1) == 16 << 20


@pytest.mark.parametrize(
    "text", ["true", "", "3 moons", "-1s", "1_000", "1e3", "1.5", "1.5ms", "\N{ARABIC-INDIC DIGIT ONE}"]
)
def test_what_is_no_whole_number_of_milliseconds_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"setting 'timeout\.ms': expected a .*number"):
        read_duration_ms({"timeout.ms": text}, "timeout.ms", 1)


def test_a_count_has_no_unit_and_no_underscore() -> None:
    for text in ("3s", "1_0", "1.0", "true", "\N{ARABIC-INDIC DIGIT ONE}"):
        with pytest.raises(ValueError, match="'threads': expected a whole number"):
            read_number({"threads": text}, "threads", 1)


def test_the_minimum_counts_what_the_unit_means() -> None:
    with pytest.raises(ValueError, match=r"'part\.size': 4194304 is below 5242880"):
        read_size_bytes({"part.size": "4MiB"}, "part.size", 5 << 20)


def test_values_are_never_quoted() -> None:
    for wrong in ({"bucket": "b", "unknown": "s3cr3t"}, {"unknown": "s3cr3t"}):
        with pytest.raises(ValueError, match="unknown") as raised:
            read_settings("s3", wrong, DEFAULTS)
        assert "s3cr3t" not in str(raised.value)
    with pytest.raises(ValueError, match="number of") as raised:
        read_duration_ms({"timeout.ms": "s3cr3t"}, "timeout.ms", 1)
    assert "s3cr3t" not in str(raised.value)


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
