"""The program `tidegate`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

INTERRUPTED: Final = 130


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        _fill_standard_streams()
        # The imports take a second. SIGHUP waits until the proxy can read its settings again, and does not end it. The
        # other two wait until the proxy can end as it should.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
    try:
        from proxy.cli import main as run  # imported here so that an interrupt during the import is handled too

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _fill_standard_streams() -> None:
    """Opens what the caller closed of standard input, output and error. libuv aborts when it closes such a number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


if __name__ == "__main__":
    main()
