"""What starts: `tidegate-pipeline`, `python -m pipeline`, `spark-submit .../pipeline/__main__.py`."""

from __future__ import annotations

import sys

FAILED = 3
EXTRAS = {"pyspark": "pipeline", "py4j": "pipeline", "pyarrow": "pipeline", "numpy": "pipeline", "pyiceberg": "iceberg"}


def main() -> None:
    try:
        from pipeline.cli import run  # may be installed without the extra that this needs
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        extra = EXTRAS.get(package)
        if extra is None:
            raise
        print(f"tidegate-pipeline: {package} is missing: pip install 'tidegate[{extra}]'", file=sys.stderr)  # noqa: T201  # before there is anything else to say it with
        sys.exit(FAILED)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
