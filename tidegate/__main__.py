"""The programs `tidegate`, also `python -m tidegate`, and `tidegate-pipeline`.

Each of them first checks whose packages Python would import, and then imports them.
"""

from __future__ import annotations

import sys
from typing import Final

from tidegate.own_packages import check_packages

MISUSED: Final = 2
"""The exit code of wrong usage, the same in all commands."""


def tidegate() -> None:
    _check_packages("tidegate", "protocol", "tiers", "proxy")
    from proxy.__main__ import main

    main()


def tidegate_pipeline() -> None:
    _check_packages("tidegate-pipeline", "protocol", "tiers", "pipeline")
    from pipeline.__main__ import main

    main()


def _check_packages(program: str, *names: str) -> None:
    try:
        check_packages(*names)
    except ImportError as hidden:
        sys.stderr.write(f"{program}: {hidden}\n")
        sys.exit(MISUSED)


if __name__ == "__main__":
    tidegate()
