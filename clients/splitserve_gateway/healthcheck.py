"""Health check of the local gateway: `python -m splitserve_gateway.healthcheck`, exit code 0 or 1.

For HEALTHCHECK and probes. Reads the address from the gateway's own options: flags,
`SPLITSERVE_HTTP`, a file. Ignores proxies of the environment.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping, Sequence

from splitserve_common import local_http
from splitserve_options import options
from splitserve_rpc.healthcheck import local_address

_PATH = "/health/live"
_TIMEOUT_S = 3.0


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Asks the gateway once. Returns 0 if it lives, else 1 with the reason on stderr."""
    values = options.parse("gateway", arguments, environ)
    address = local_address(str(values["http"]))
    connection = local_http(address, _TIMEOUT_S, is_tls=bool(values["http_tls_cert"]))
    try:
        connection.connect()
        if values["http_tls_client_ca"]:
            # No answer without a client certificate, but a completed handshake shows life.
            return 0
        connection.request("GET", _PATH)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        sys.stderr.write(f"{address}: {error}\n")
        return 1
    finally:
        connection.close()
    if status != http.client.OK:
        sys.stderr.write(f"{address}: {_PATH} answers {status}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
