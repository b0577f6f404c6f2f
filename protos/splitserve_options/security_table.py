"""Options about who may do what, and over what."""

from __future__ import annotations

from splitserve_options.option import DEFAULT_CLUSTER_ADDRESS, Command, Kind, Option

_SECURITY = "Security"
_SCHEDULER: tuple[Command, ...] = ("serve", "scheduler")
_CLUSTER: tuple[Command, ...] = ("scheduler", "executor")
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
        "certificate of this process with its chain, PEM; read again when it changes",
        _SECURITY,
        _CLUSTER,
        default_text="plain text",
        metavar="FILE",
    ),
    Option(
        "tls-key",
        Kind.TEXT,
        "private key of that certificate, PEM",
        _SECURITY,
        _CLUSTER,
        default_text="plain text",
        metavar="FILE",
    ),
    Option(
        "tls-ca",
        Kind.TEXT,
        "certificates of whom the processes of the cluster believe each other, PEM",
        _SECURITY,
        _CLUSTER,
        default_text="nobody needs a certificate",
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
