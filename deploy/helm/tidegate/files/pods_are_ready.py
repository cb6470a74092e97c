"""`helm test` runs this: it reads /readyz of each pod until all are ready, and fails after a minute with their answers.

The arguments are the name of the headless Service, the admin port, and the number of pods."""

import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

WITHIN_S = 60


def main(service: str, port: int, pods: int) -> int:
    until_s = time.monotonic() + WITHIN_S
    while reasons := list(not_ready(service, port, pods)):
        if time.monotonic() >= until_s:
            sys.stderr.write("\n".join(reasons) + "\n")
            return 1
        time.sleep(1)
    sys.stdout.write(f"{pods} pods are ready\n")
    return 0


def not_ready(service: str, port: int, pods: int) -> Iterator[str]:
    try:
        found = socket.getaddrinfo(service, port, type=socket.SOCK_STREAM)
    except OSError as error:
        found = []
        yield f"{service}: {error}"
    addresses = sorted({str(each[4][0]) for each in found})
    if len(addresses) < pods:
        yield f"{service}: {len(addresses)} of {pods} pods have an address"
    for address in addresses:
        host = f"[{address}]" if ":" in address else address
        try:
            urllib.request.urlopen(f"http://{host}:{port}/readyz", timeout=5).close()
        except urllib.error.HTTPError as error:
            yield f"{address}: {error.read().decode().strip()}"
        except OSError as error:
            yield f"{address}: {error}"


sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
