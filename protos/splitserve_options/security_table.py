"""Options about who may do what, and over what."""

from __future__ import annotations

from splitserve_options.option import DEFAULT_CLUSTER_ADDRESS, Command, Kind, Option

_SECURITY = "Security"
_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")
_CLUSTER: tuple[Command, ...] = ("scheduler", "executor")
_TLS: tuple[Command, ...] = (*_CLUSTER, "gateway")
_HTTP: tuple[Command, ...] = ("serve", "gateway")

SECURITY_OPTIONS: tuple[Option, ...] = (
    Option(
        "cluster-listen",
        Kind.ADDRESS,
        "address for executors and operators; the same as listen: no address of their own",
        _SECURITY,
        _SCHEDULER,
        DEFAULT_CLUSTER_ADDRESS,
        default_of=(("serve", None),),
        default_text="127.0.0.1:50050; serve: as listen, if that is of this machine alone",
    ),
    Option(
        "tls-cert",
        Kind.TEXT,
        "certificate of this process with its chain, PEM; read again when it changes; gateway: "
        "for schedulers that ask for one",
        _SECURITY,
        _TLS,
        default_text="plain text",
        metavar="FILE",
    ),
    Option(
        "tls-key",
        Kind.TEXT,
        "private key of that certificate, PEM",
        _SECURITY,
        _TLS,
        default_text="plain text",
        metavar="FILE",
    ),
    Option(
        "tls-ca",
        Kind.TEXT,
        "certificates of whom the processes of the cluster believe each other, PEM; gateway: of "
        "whom it believes schedulers",
        _SECURITY,
        _TLS,
        default_text="nobody needs a certificate; gateway: plain text",
        metavar="FILE",
    ),
    Option(
        "tls-client-ca",
        Kind.TEXT,
        "certificates of whom clients need a certificate, PEM",
        _SECURITY,
        ("scheduler",),
        default_text="clients need none",
        metavar="FILE",
    ),
    Option(
        "http-tls-cert",
        Kind.TEXT,
        "certificate that clients of HTTP are shown, with its chain, PEM; read again when it "
        "changes",
        _SECURITY,
        _HTTP,
        default_text="plain HTTP",
        metavar="FILE",
    ),
    Option(
        "http-tls-key",
        Kind.TEXT,
        "private key of that certificate, PEM",
        _SECURITY,
        _HTTP,
        default_text="plain HTTP",
        metavar="FILE",
    ),
    Option(
        "http-tls-client-ca",
        Kind.TEXT,
        "certificates of whom clients of HTTP need a certificate, PEM",
        _SECURITY,
        _HTTP,
        default_text="they need none",
        metavar="FILE",
    ),
    Option(
        "api-key-file",
        Kind.TEXT,
        "file with the gateway's own API key, of the scope gateway; then every request over HTTP "
        "needs a key, too; read again when it changes",
        _SECURITY,
        _HTTP,
        default_text="nobody is asked for a key",
        metavar="FILE",
    ),
    Option(
        "cluster-token-file",
        Kind.TEXT,
        "file with a secret that the processes of a cluster share",
        _SECURITY,
        _CLUSTER,
        default_text="no token is asked for",
        metavar="FILE",
    ),
    Option(
        "executor-addresses",
        Kind.TEXT,
        "where executors may say that they are reached: networks, addresses, names with wildcards",
        _SECURITY,
        ("scheduler",),
        default_text="the address that they register from",
        metavar="10.0.0.0/8,*.example.org",
    ),
    Option(
        "api-keys",
        Kind.TEXT,
        "file of API keys, as splitserve keys writes it; read again when it changes",
        _SECURITY,
        _SCHEDULER,
        default_text="callers need no key",
        metavar="FILE",
    ),
    Option(
        "tenants",
        Kind.TEXT,
        "TOML file: what each tenant of known callers may have; read again when it changes",
        _SECURITY,
        _SCHEDULER,
        default_text="tenants have no limits",
        metavar="FILE",
    ),
    Option(
        "jwt-issuer",
        Kind.TEXT,
        "issuer of tokens (JWT) by which callers are known, as their claim iss has it",
        _SECURITY,
        _SCHEDULER,
        default_text="tokens are not taken",
        metavar="URL",
    ),
    Option(
        "jwt-audience",
        Kind.TEXT,
        "what the claim aud of such a token has, so that it is for this service",
        _SECURITY,
        _SCHEDULER,
        default_text="none; jwt-issuer needs one",
    ),
    Option(
        "jwt-keys",
        Kind.TEXT,
        "keys of the issuer: a JWK set, or its URL; both are looked at again",
        _SECURITY,
        _SCHEDULER,
        default_text="what the issuer says at /.well-known/openid-configuration",
        metavar="FILE|URL",
    ),
    Option(
        "jwt-tenant-claim",
        Kind.TEXT,
        "claim of a token that names the caller's tenant",
        _SECURITY,
        _SCHEDULER,
        "tenant",
        metavar="NAME",
    ),
    Option(
        "audit-log",
        Kind.TEXT,
        "file that says who did what, as lines of JSON, without what was said; may be moved away",
        _SECURITY,
        _SCHEDULER,
        default_text="none is kept",
        metavar="FILE",
    ),
    Option(
        "insecure",
        Kind.SWITCH,
        "listen where others reach it although not everything is encrypted and checked",
        _SECURITY,
        ("serve", "gateway", *_CLUSTER),
        False,
    ),
)
