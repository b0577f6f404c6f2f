"""An issuer that puts its tokens together by hand, and signs them with `cryptography`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

NAME = "https://issuer.example"
AUDIENCE = "splitserve"

Signer = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def encode(content: bytes) -> str:
    """Encodes in URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def as_json(value: object) -> str:
    """Encodes a part of a token."""
    return encode(json.dumps(value).encode())


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


def ec_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def signature(key: Signer, algorithm: str, content: bytes) -> bytes:
    """Signs `content` in the format of tokens."""
    if isinstance(key, rsa.RSAPrivateKey):
        digest = _DIGESTS[algorithm[2:]]
        form: padding.AsymmetricPadding = padding.PKCS1v15()
        if algorithm.startswith("PS"):
            form = padding.PSS(padding.MGF1(digest), digest.digest_size)
        return key.sign(content, form, digest)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        size = (key.key_size + 7) // 8
        pair = decode_dss_signature(key.sign(content, ec.ECDSA(_DIGESTS[algorithm[2:]])))
        return b"".join(number.to_bytes(size) for number in pair)
    return key.sign(content)


_DIGESTS = {"256": hashes.SHA256(), "384": hashes.SHA384(), "512": hashes.SHA512()}


def jwk(key: Signer, **fields: object) -> dict[str, Any]:
    """The public half of `key`, as a key set has it."""
    public = key.public_key()
    if isinstance(public, rsa.RSAPublicKey):
        numbers = public.public_numbers()
        n, e = (encode(i.to_bytes((i.bit_length() + 7) // 8)) for i in (numbers.n, numbers.e))
        return {"kty": "RSA", "n": n, "e": e, **fields}
    if isinstance(public, ec.EllipticCurvePublicKey):
        size, point = (public.key_size + 7) // 8, public.public_numbers()
        x, y = (encode(i.to_bytes(size)) for i in (point.x, point.y))
        return {"kty": "EC", "crv": f"P-{public.key_size}", "x": x, "y": y, **fields}
    return {"kty": "OKP", "crv": "Ed25519", "x": encode(public.public_bytes_raw()), **fields}


@dataclass
class Issuer:
    """Signs with `keys`, by their ids; `now` is the time of its tokens."""

    keys: dict[str, Signer] = field(default_factory=lambda: {"first": ec_key()})
    name: str = NAME
    now: int = 1_800_000_000

    def key_set(self) -> bytes:
        """Public keys as a JSON key set."""
        return json.dumps({"keys": [jwk(key, kid=kid) for kid, key in self.keys.items()]}).encode()

    def claims(self, **others: object) -> dict[str, Any]:
        """Valid claims, changed by `others`; claims that are None are left out."""
        claims = {
            "iss": self.name,
            "aud": AUDIENCE,
            "sub": "somebody",
            "exp": self.now + 600,
            "tenant": "a",
        }
        return {name: value for name, value in (claims | others).items() if value is not None}

    def token(
        self,
        kid: str = "first",
        algorithm: str = "ES256",
        header: dict[str, object] | None = None,
        **claims: object,
    ) -> str:
        """Token signed with key `kid`. `header`: changes of its header; None removes a field."""
        fields = {"alg": algorithm, "kid": kid, "typ": "JWT"} | (header or {})
        said = {name: value for name, value in fields.items() if value is not None}
        content = f"{as_json(said)}.{as_json(self.claims(**claims))}"
        return f"{content}.{encode(signature(self.keys[kid], algorithm, content.encode()))}"


@contextmanager
def http_server(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """Yields a server's URL. `answer`: status and body by path; a redirect's body is its target."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", body.decode())
                body = b""
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
