"""The program `tidegate`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        # The imports take a second. SIGHUP waits until the proxy can read its settings again, and does not end it. The
        # other two wait until the proxy can end as it should.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
    from proxy.cli import main as run

    run()


if __name__ == "__main__":
    main()
