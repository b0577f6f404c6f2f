"""What a step of a model cannot do without: bytes to read, operations to compute."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_check.attention_times import Layer
from benchmarks.gpu_check.machine import Rates
from benchmarks.gpu_check.sizes import ModelShape, Rows


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds: of a step's bytes, and of its arithmetic."""

    bytes_s: float
    arithmetic_s: float

    @property
    def seconds(self) -> float:
        """What no step is faster than."""
        return max(self.bytes_s, self.arithmetic_s)

    def note(self, measured_s: float) -> str:
        """What the measured time is beside it."""
        return (
            f"{self.seconds / measured_s:.0%} of the least ({self.bytes_s * 1e3:.2f} ms of bytes,"
            f" {self.arithmetic_s * 1e3:.2f} ms of arithmetic)"
        )


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Of a model of the Llama kind. Weights: of its layers, and of its head, which rows share.

    `itemsize`: bytes of keys and values. `weight_bytes`: bytes that all these weights take.
    """

    layer: Layer
    num_layers: int
    num_body_weights: int
    num_head_weights: int
    itemsize: int
    weight_bytes: int

    @classmethod
    def of(cls, shape: ModelShape, itemsize: int) -> ModelWork:
        """By the shape alone, with plain weights."""
        options = shape.options
        hidden, heads = options["hidden_size"], options["num_attention_heads"]
        kv_heads, num_layers = options["num_key_value_heads"], options["num_hidden_layers"]
        head_dim = options.get("head_dim") or hidden // heads
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        body = num_layers * (attention + 3 * hidden * options["intermediate_size"])
        layer = Layer(heads, kv_heads, head_dim, head_dim)
        head = hidden * options["vocab_size"]
        return cls(layer, num_layers, body, head, itemsize, (body + head) * itemsize)

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token."""
        layer = self.layer
        per_layer = layer.num_kv_heads * (layer.key_dim + layer.value_dim)
        return self.num_layers * per_layer * self.itemsize

    def floor(self, rows: Rows, rates: Rates) -> Floor:
        """Of a step in which each row gets logits of its last token."""
        num_tokens = sum(new for _, new in rows)
        cached = sum(computed + new for computed, new in rows) * self.token_bytes
        products = 2 * (num_tokens * self.num_body_weights + len(rows) * self.num_head_weights)
        attention = self.num_layers * self.layer.num_operations(rows)
        return Floor(
            (self.weight_bytes + cached) / rates.bandwidth,
            (products + attention) / rates.flops,
        )
