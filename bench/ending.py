"""`run`: what was started here, servers above all, ends with it: by SIGTERM as by Ctrl-C, and without a traceback."""

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
