"""Memory and time to load a GGUF file on a CPU, up to the model that serves.

The file is made first, of random blocks, unless `--model` names one. A process of its own loads it.
Its memory is that above what the imports take, as the kernel counts it: `anonymous` is its own,
`file` is pages of mapped files, which the kernel can take back at any time, `resident` is the
largest sum of both. `ratio`: to the size of the file.
"""

from __future__ import annotations

import argparse
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from benchmarks.report import emit

_PERIOD_S = 0.002
# Bytes of a block that hold float16 numbers: the scales of all its weights.
_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
_SCALE = {"Q4_0": 3e-3, "Q8_0": 2e-4, "Q4_K": 1e-4, "Q6_K": 2e-5}
_EXPONENT = 120  # of MXFP4: weights up to 6 * 2**-7


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a random model. `num_experts`: 0 for a Llama, else a Qwen3-MoE, 8 of them used."""

    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0

    def settings(self) -> Iterator[tuple[str, int]]:
        """Yields the metadata, with keys of the architecture."""
        yield "block_count", self.num_layers
        yield "context_length", 4096
        yield "embedding_length", self.width
        yield "feed_forward_length", self.mlp_width
        yield "attention.head_count", self.num_heads
        yield "attention.head_count_kv", self.num_kv_heads
        yield "attention.key_length", self.head_dim
        if self.num_experts:
            yield "expert_count", self.num_experts
            yield "expert_used_count", 8
            yield "expert_feed_forward_length", self.mlp_width

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields names and shapes of the tensors."""
        yield "token_embd.weight", (self.vocab_size, self.width)
        yield "output_norm.weight", (self.width,)
        experts = (self.num_experts,) if self.num_experts else ()
        for layer in range(self.num_layers):
            own = {
                "attn_norm": (self.width,),
                "ffn_norm": (self.width,),
                "attn_q": (self.num_heads * self.head_dim, self.width),
                "attn_k": (self.num_kv_heads * self.head_dim, self.width),
                "attn_v": (self.num_kv_heads * self.head_dim, self.width),
                "attn_output": (self.width, self.num_heads * self.head_dim),
            }
            ending = "_exps" if experts else ""
            own |= {
                f"ffn_gate{ending}": (*experts, self.mlp_width, self.width),
                f"ffn_up{ending}": (*experts, self.mlp_width, self.width),
                f"ffn_down{ending}": (*experts, self.width, self.mlp_width),
            }
            if experts:
                own |= {
                    "ffn_gate_inp": (*experts, self.width),
                    "attn_q_norm": (self.head_dim,),
                    "attn_k_norm": (self.head_dim,),
                }
            for name, shape in own.items():
                yield f"blk.{layer}.{name}.weight", shape


SIZES = {
    "llama": Size(16, 2048, 6144, 32, 8, 64, 128256),
    "small": Size(2, 256, 512, 4, 4, 64, 512),
    "mixture": Size(12, 1024, 384, 16, 4, 64, 32000, num_experts=64),
}


def random_blocks(
    generator: np.random.Generator, shape: tuple[int, ...], type_name: str
) -> npt.NDArray[np.uint8]:
    """Returns blocks of random codes, [..., bytes of a row]."""
    num_elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    blocks = generator.integers(
        0, 256, (*shape[:-1], shape[-1] // num_elements, num_bytes), dtype=np.uint8
    )
    if type_name == "MXFP4":
        blocks[..., 0] = _EXPONENT
    for start in _SCALES[type_name]:
        blocks[..., start : start + 2] = np.frombuffer(
            np.float16(_SCALE[type_name]).tobytes(), np.uint8
        )
    return blocks.reshape(*shape[:-1], -1)


def write_random(path: Path, size: Size, type_name: str, embedding_type: str) -> None:
    """Writes a model of random blocks."""
    architecture = "qwen3moe" if size.num_experts else "llama"
    writer = GGUFWriter(path, architecture)
    for key, value in size.settings():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    generator = np.random.default_rng(0)
    for name, shape in size.shapes():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        elif "_inp" in name:
            writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32))
        else:
            kind = embedding_type if name.startswith("token_embd") else type_name
            blocks = random_blocks(generator, shape, kind)
            writer.add_tensor(name, blocks, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_when_told(path: str) -> None:
    """Loads the model as an executor does, after a line on standard input."""
    from executor_service.backends import AUTO, choose_compute
    from executor_service.checkpoint import ModelConfig, load_model

    def load_one(each: str) -> object:
        config = ModelConfig(each, keeps_packed=True)
        return choose_compute(lambda: load_model(config), AUTO, 16)

    # Imports are late, and allocators are slow to begin: a small model is loaded first.
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.gguf"
        write_random(small, Size(1, 256, 256, 4, 4, 64, 512), "Q4_0", "Q4_0")
        load_one(str(small))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    started_s = time.perf_counter()
    compute = load_one(path)
    seconds = time.perf_counter() - started_s
    description = getattr(compute, "description", "")
    sys.stdout.write(f"{seconds:.2f} {description}\n")
    sys.stdout.flush()
    sys.stdin.readline()


def memory_of(pid: int) -> dict[str, int]:
    """Returns resident bytes of a process by kind."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    anonymous, file = (1024 * int(found[name].split()[0]) for name in ("RssAnon", "RssFile"))
    return {"anonymous": anonymous, "file": file, "resident": anonymous + file}


def measure(path: Path) -> None:
    """Loads a file in another process and prints its largest memory."""
    command = [sys.executable, "-m", "benchmarks.load_memory", "--load", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as loading:
        assert loading.stdin is not None
        assert loading.stdout is not None
        loading.stdout.readline()
        before = memory_of(loading.pid)
        most = dict.fromkeys(before, 0)
        loading.stdin.write(b"go\n")
        loading.stdin.flush()
        while not select.select([loading.stdout], [], [], _PERIOD_S)[0]:
            now = memory_of(loading.pid)
            most = {kind: max(most[kind], num - before[kind]) for kind, num in now.items()}
        seconds, _, description = loading.stdout.readline().decode().strip().partition(" ")
        after = memory_of(loading.pid)
        loading.stdin.write(b"end\n")
    size = path.stat().st_size
    emit(
        "load_memory",
        compute=description,
        seconds=float(seconds),
        size_mb=round(size / 1e6),
        **{f"{kind}_mb": round(num / 1e6) for kind, num in most.items()},
        **{f"{kind}_ratio": round(num / size, 3) for kind, num in most.items()},
        left_ratio=round((after["anonymous"] - before["anonymous"]) / size, 3),
    )


def main() -> None:
    """Loads one file in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file; None for a random one")
    parser.add_argument("--size", choices=SIZES, default="llama", help="of the random model")
    parser.add_argument("--type", choices=_SCALES, default="Q4_0", help="of its matrices")
    parser.add_argument("--embedding-type", choices=_SCALES, help="None for that of the matrices")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load_when_told(options.load)
    elif options.model:
        measure(options.model)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "random.gguf"
            kind = options.embedding_type or options.type
            write_random(path, SIZES[options.size], options.type, kind)
            measure(path)


if __name__ == "__main__":
    main()
