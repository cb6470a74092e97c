"""`import tidegate` is cheap, and offers `read` and `__version__` alone."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

import tidegate

IMPORTED = """
import sys
before = set(sys.modules)
import tidegate
print(*{name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)
"""


def test_the_public_names_are_read_and_the_version() -> None:
    assert tidegate.__all__ == ["__version__", "read"]
    assert tidegate.__version__ == version("tidegate")


def test_the_import_loads_the_standard_library_alone() -> None:
    imported = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, timeout=60, check=True)
    assert imported.stdout.split() == ["tidegate"]


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_read_names_the_extra_that_is_missing(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import tidegate; tidegate.read(None, 'orders')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    said = f"ImportError: {missing} is missing: run `pip install '.[pipeline]'` in the clone of Tidegate"
    assert ended.stderr.splitlines()[-1] == said


class Session:
    """A Spark session that notes what is read."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        self.said.append(name)
        return self if name in ("read", "readStream") else self._called

    def _called(self, *given: str, **options: str) -> Any:
        self.said += [*given, *([options] if options else [])]
        return self


@pytest.mark.parametrize(("stream", "reader"), [(False, "read"), (True, "readStream")])
def test_read_passes_topics_columns_and_options_on(stream: bool, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr("pipeline.source.datasource.register_data_sources", registered.append)
    session: Any = Session()
    tidegate.read(session, "orders,bills", "value", stream=stream, config="tidegate.toml")
    assert registered == [session]
    options = {"subscribe": "orders,bills", "columns": "value", "config": "tidegate.toml"}
    assert session.said == [reader, "format", "kafka_tiered", "options", options, "load"]


def test_topics_that_are_named_twice_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.source.datasource.register_data_sources", lambda _: None)
    session: Any = Session()
    with pytest.raises(TypeError, match="subscribe"):
        tidegate.read(session, "orders", config="tidegate.toml", subscribe="bills")
    assert "load" not in session.said
