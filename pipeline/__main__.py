"""Runs a command of `tidegate-pipeline` that an interrupt ends at any time, also while libraries are loaded."""

from __future__ import annotations

import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        from pipeline import cli  # imported here so that an interrupt during the import is handled too

        sys.exit(cli.run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _terminated(number: int, frame: FrameType | None) -> None:
    """Handles SIGTERM like Ctrl-C: the job cancels its Spark jobs and gives up its ownership."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores SIGINT for background processes
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
