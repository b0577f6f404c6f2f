"""Options of access control and encryption."""

from __future__ import annotations

from splitserve_options.option import DEFAULT_CLUSTER_ADDRESS, Command, Option, OptionKind

_SECURITY = "Security"
_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")
_CLUSTER: tuple[Command, ...] = ("scheduler", "executor")
_TLS: tuple[Command, ...] = (*_CLUSTER, "gateway")
_HTTP: tuple[Command, ...] = ("serve", "gateway")

SECURITY_OPTIONS: tuple[Option, ...] = (
    Option(
        "cluster-listen",
        OptionKind.ADDRESS,
        "address for executors and operators; equal to listen: they share that address",
        _SECURITY,
        _SCHEDULER,
        DEFAULT_CLUSTER_ADDRESS,
        default_of=(("serve", None),),
        default_text="127.0.0.1:50050; serve: as listen, if that is of this machine alone",
    ),
    Option(
        "tls-cert",
        OptionKind.TEXT,
        "certificate chain of this process, PEM; read again when it changes; gateway: shown "
        "to schedulers that require one",
        _SECURITY,
        _TLS,
        default_text="plain text",
        metavar="FILE",
    ),
    Option(
        "tls-key",
        OptionKind.TEXT,
        "private key of the certificate, PEM",
        _SECURITY,
        _TLS,
        default_text="plain text",
        metavar="FILE",
    ),
    Option(
        "tls-ca",
        OptionKind.TEXT,
        "certificates of the authority that the processes of the cluster trust, PEM; gateway:"
        " of the authority it trusts for schedulers",
        _SECURITY,
        _TLS,
        default_text="nobody needs a certificate; gateway: plain text",
        metavar="FILE",
    ),
    Option(
        "tls-client-ca",
        OptionKind.TEXT,
        "certificates of the authority that client certificates must come from, PEM",
        _SECURITY,
        ("scheduler",),
        default_text="clients need none",
        metavar="FILE",
    ),
    Option(
        "http-tls-cert",
        OptionKind.TEXT,
        "certificate chain shown to HTTP clients, PEM; read again when it changes",
        _SECURITY,
        _HTTP,
        default_text="plain HTTP",
        metavar="FILE",
    ),
    Option(
        "http-tls-key",
        OptionKind.TEXT,
        "private key of that certificate, PEM",
        _SECURITY,
        _HTTP,
        default_text="plain HTTP",
        metavar="FILE",
    ),
    Option(
        "http-tls-client-ca",
        OptionKind.TEXT,
        "certificates of the authority that certificates of HTTP clients must come from, PEM",
        _SECURITY,
        _HTTP,
        default_text="they need none",
        metavar="FILE",
    ),
    Option(
        "gateway-key-file",
        OptionKind.TEXT,
        "file with the gateway's own API key, of the scope gateway; every HTTP request then "
        "needs a key as well; read again when it changes",
        _SECURITY,
        _HTTP,
        default_text="nobody is asked for a key",
        metavar="FILE",
    ),
    Option(
        "cluster-token-file",
        OptionKind.TEXT,
        "file with a secret that the processes of a cluster share",
        _SECURITY,
        ("serve", *_CLUSTER),
        default_text="no token is asked for; serve: one of its own at each start",
        metavar="FILE",
    ),
    Option(
        "no-operator-token",
        OptionKind.SWITCH,
        "ask operators for no cluster token",
        _SECURITY,
        ("scheduler",),
        False,
        hidden=True,
    ),
    Option(
        "executor-addresses",
        OptionKind.TEXT,
        "addresses at which executors may say that they are reached: networks, addresses, "
        "names with wildcards",
        _SECURITY,
        ("scheduler",),
        default_text="the address that they register from",
        metavar="10.0.0.0/8,*.example.org",
    ),
    Option(
        "api-keys",
        OptionKind.TEXT,
        "file of API keys, written by splitserve keys; read again when it changes",
        _SECURITY,
        _SCHEDULER,
        default_text="callers need no key",
        metavar="FILE",
    ),
    Option(
        "tenants",
        OptionKind.TEXT,
        "TOML file with the limits of each tenant of known callers; read again when it changes",
        _SECURITY,
        _SCHEDULER,
        default_text="tenants have no limits",
        metavar="FILE",
    ),
    Option(
        "jwt-issuer",
        OptionKind.TEXT,
        "issuer of tokens (JWT) that identify callers, as in their claim iss",
        _SECURITY,
        _SCHEDULER,
        default_text="tokens are not taken",
        metavar="URL",
    ),
    Option(
        "jwt-audience",
        OptionKind.TEXT,
        "required value of the claim aud: the name of this service",
        _SECURITY,
        _SCHEDULER,
        default_text="none; jwt-issuer needs one",
    ),
    Option(
        "jwt-keys",
        OptionKind.TEXT,
        "keys of the issuer: a JWK set, or its URL; both are read again",
        _SECURITY,
        _SCHEDULER,
        default_text="what the issuer says at /.well-known/openid-configuration",
        metavar="FILE|URL",
    ),
    Option(
        "jwt-tenant-claim",
        OptionKind.TEXT,
        "claim of a token that names the caller's tenant",
        _SECURITY,
        _SCHEDULER,
        "tenant",
        metavar="NAME",
    ),
    Option(
        "audit-log",
        OptionKind.TEXT,
        "file of JSON lines that records callers and their operations, without prompts and "
        "outputs; may be moved away",
        _SECURITY,
        _SCHEDULER,
        default_text="none is kept",
        metavar="FILE",
    ),
    Option(
        "insecure",
        OptionKind.SWITCH,
        "allow others to reach or overhear connections that are not all encrypted and "
        "authenticated",
        _SECURITY,
        ("serve", "gateway", *_CLUSTER),
        False,
    ),
)
