"""Which folders of a server stay after its use."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.servers.tidegate import TidegateProcess


@pytest.mark.parametrize(
    ("error", "is_kept"), [(None, False), (KeyboardInterrupt(), False), (SystemExit(), False), (ValueError(), True)]
)
def test_only_an_error_keeps_the_folder_and_names_it(
    error: BaseException | None,
    is_kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = TidegateProcess("", address=("127.0.0.1", 1), admin=("127.0.0.1", 2))
    process.__exit__(None if error is None else type(error), error, None)
    assert (process.folder.exists(), str(process.folder) in capsys.readouterr().err) == (is_kept, is_kept)
