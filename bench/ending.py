"""`run`: runs a main function so that SIGTERM, like Ctrl-C, ends it and all its servers without a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

INTERRUPTED = 130


def run(main: Callable[[], int | None]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
