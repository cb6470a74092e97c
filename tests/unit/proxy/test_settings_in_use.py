"""A settings file is in use while a process serves by it."""

from __future__ import annotations

from pathlib import Path

from proxy.process.start.settings_in_use import is_in_use, settings_in_use


def test_a_file_is_in_use_while_a_process_serves_by_it(tmp_path: Path) -> None:
    file, other = tmp_path / "tidegate.toml", tmp_path / "other.toml"
    with settings_in_use(file):
        assert (is_in_use(file), is_in_use(other)) == (True, False)
        file.write_text("replaced by an editor")
        assert is_in_use(tmp_path / "." / "tidegate.toml")
    assert not is_in_use(file)


def test_a_second_process_with_the_file_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    with settings_in_use(file):
        with settings_in_use(file):
            assert is_in_use(file)
        assert is_in_use(file)
