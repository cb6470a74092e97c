"""What starts: `tidegate-pipeline`, `python -m pipeline`, `spark-submit .../pipeline/__main__.py`."""

from __future__ import annotations

import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        from pipeline import cli  # here, for who interrupts this already

        sys.exit(cli.run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _terminated(number: int, frame: FrameType | None) -> None:
    """As by Ctrl-C: Spark's jobs are cancelled, and what is owned is given back."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
