"""`helm test` runs this: it reads /readyz of each pod until all are ready, and fails after a minute with their answers.

The arguments are `http` or `https`, the name of the headless Service, the admin port, and the number of pods. As in the
probes of the node, the certificates are not verified."""

import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

WITHIN_S = 60


def main(scheme: str, service: str, port: int, pods: int) -> int:
    until_s = time.monotonic() + WITHIN_S
    while reasons := list(not_ready(scheme, service, port, pods)):
        if time.monotonic() >= until_s:
            sys.stderr.write("\n".join(reasons) + "\n")
            return 1
        time.sleep(1)
    sys.stdout.write(f"{pods} pods are ready\n")
    return 0


def not_ready(scheme: str, service: str, port: int, pods: int) -> Iterator[str]:
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
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
            urllib.request.urlopen(f"{scheme}://{host}:{port}/readyz", timeout=5, context=unverified).close()
        except urllib.error.HTTPError as error:
            yield f"{address}: {error.read().decode().strip()}"
        except OSError as error:
            yield f"{address}: {error}"


sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
