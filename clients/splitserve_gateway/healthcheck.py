"""`python -m splitserve_gateway.healthcheck`: exit code 0 if the gateway of this machine lives.

For HEALTHCHECK and probes. It listens where the same options as the gateway's own say: flags,
`SPLITSERVE_HTTP`, a file. No proxy is between, whatever the environment has.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping, Sequence

from splitserve_options import options
from splitserve_rpc.healthcheck import local_address
from splitserve_rpc.local_http import local_http

_PATH = "/health/live"
_TIMEOUT_S = 3.0


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Asks once. Returns 0 if it lives, 1 if not; the reason goes to stderr."""
    values = options.parse("gateway", arguments, environ)
    address = local_address(str(values["http"]))
    connection = local_http(address, _TIMEOUT_S, is_tls=bool(values["http_tls_cert"]))
    try:
        connection.connect()
        if values["http_tls_client_ca"]:
            # It answers nobody without a certificate, but it has done its part of the handshake.
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
