"""Whether the files that options of a process name are of use to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from splitserve_cli.checks.finding import Finding, ok, wrong
from splitserve_cli.checks.tls_files import check_authority, check_readable, check_tls_files
from splitserve_options.model_folder import NoCheckpoint, find_checkpoint
from splitserve_options.option import BUNDLED_MODEL, Command
from splitserve_options.options import Value
from splitserve_rpc.cluster_identity import Role
from splitserve_rpc.secret_files import is_readable_by_others
from splitserve_rpc.tls import TlsFiles

_ROLES: Mapping[Command, Role] = MappingProxyType(
    {"scheduler": Role.SCHEDULER, "executor": Role.EXECUTOR}
)
_NO_START = "splitserve {} does not start"
# Of these, others on this machine are to read none.
_SECRETS = ("cluster_token_file", "gateway_key_file")
_READ = ("api_keys", "tenants")


def check_process_files(command: Command, values: Mapping[str, Value]) -> Iterator[Finding]:
    """Certificates, keys, tokens and the model. `values`: what its options say."""
    yield from _check_own_tls(command, values)
    http = _files(values, "http_tls_cert", "http_tls_key", "http_tls_client_ca")
    yield from check_tls_files(http, prefix="http-tls", is_of_authority=False)
    if (client_ca := _path(values, "tls_client_ca")) is not None:
        unreadable = check_readable(client_ca)
        yield from check_authority(client_ca, time.time()) if unreadable is None else [unreadable]
    for name in (*_SECRETS, *_READ):
        if (path := _path(values, name)) is not None:
            yield _check_file(command, path, is_secret=name in _SECRETS)
    if command in ("serve", "executor") and values.get("model") is not None:
        yield _check_model(command, str(values["model"]))


def _check_own_tls(command: Command, values: Mapping[str, Value]) -> list[Finding]:
    own = _files(values, "tls_cert", "tls_key", "tls_ca")
    role = _ROLES.get(command)
    if role is not None and own.cert is None and own.key is None and own.ca is not None:
        meaning = f"{_NO_START.format(command)}: it would know others, and nobody would know it"
        remedy = "give --tls-cert and --tls-key, too"
        return [wrong("TLS", f"only {own.ca}", meaning, remedy)]
    names = () if role is None or own.ca is None else (role.dns_name,)
    return check_tls_files(own, names)


def _check_file(command: Command, path: Path, *, is_secret: bool) -> Finding:
    if (unreadable := check_readable(path, _NO_START.format(command))) is not None:
        return unreadable
    status = path.stat()
    mode = f"mode {status.st_mode & 0o7777:04o}"
    if is_secret and is_readable_by_others(status):
        meaning = "others on this machine can read it, and be whoever it is of"
        return wrong(f"file {path}", mode, meaning, f"chmod 600 {path}")
    return ok(f"file {path}", mode)


def _check_model(command: Command, model: str) -> Finding:
    if model == BUNDLED_MODEL:
        return ok("checkpoint", model)
    try:
        folder = find_checkpoint(model)
    except NoCheckpoint as problem:
        remedy = "a folder with a checkpoint (config.json, *.safetensors), or its id on the hub"
        return wrong("checkpoint", str(problem), _NO_START.format(command), remedy)
    return ok("checkpoint", f"{folder or model}{'' if folder else ', of the Hugging Face hub'}")


def _files(values: Mapping[str, Value], *names: str) -> TlsFiles:
    return TlsFiles(*(_path(values, name) for name in names))


def _path(values: Mapping[str, Value], name: str) -> Path | None:
    value = values.get(name)
    return Path(str(value)) if value else None
