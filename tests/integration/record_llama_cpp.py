"""Records what llama.cpp answers greedily with SmolLM2 in float32, into a file beside this one.

`python tests/integration/record_llama_cpp.py MODEL.gguf`, with the packages `llama-cpp-python` and
`gguf`. The weights are written as float32 first: with quantised ones llama.cpp also rounds the
activations to 8 bits. Keys and values are float32, too.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

RECORDING = Path(__file__).with_name("llama_cpp_recording.json")
NUM_TOKENS = 64
NUM_CHAT_TOKENS = 48
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colours are",
    "Q: What is 17 + 25?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "import numpy as np\n\nx = np.zeros((3, 4))\nprint(",
    "Dear Sir or Madam,\n\n",
    "La capitale de l'Espagne est",
    "Die Straße führt über die Brücke und",
    "你好世界",
    "🦊 The fox said: “",
    "# Shopping list\n\n- 2 apples\n- 12 eggs\n-",
    '{"name": "Ada", "age": 36, "languages": [',
    "   Leading spaces, a tab\tand\r\n\r\n\r\ntwo empty lines",
    "SELECT name, COUNT(*) FROM users WHERE year >= 2024 GROUP BY",
    "It's what they've said, and we'll see: I'd rather not.",
    "A",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
)
MESSAGES = [{"role": "user", "content": "What is the capital of Italy? Answer in one sentence."}]


def write_float32(source: Path, target: Path) -> None:
    """Writes the model of a GGUF file with all tensors in float32, and its metadata."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, *rest = field.types
        writer.add_key_value(name, field.contents(), kind, rest[-1] if rest else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, numbers.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def answer(model: llama_cpp.Llama, prompt: str) -> dict[str, Any]:
    """Returns the greedy answer to a prompt, which nothing ends early, with its logprobs.

    `smallest_margin`: by which the logit of a token of the answer exceeds the next.
    """
    prompt_token_ids = model.tokenize(prompt.encode(), add_bos=True, special=True)
    token_ids: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    model.reset()
    model.eval(prompt_token_ids)
    for _ in range(NUM_TOKENS):
        logits = model.scores[model.n_tokens - 1].astype(np.float64)
        second, first = np.argsort(logits)[-2:].tolist()
        margins.append(logits[first] - logits[second])
        token_ids.append(first)
        logprobs.append(round(-np.log(np.exp(logits - logits[first]).sum()), 4))
        model.eval([first])
    return {
        "prompt": prompt,
        "prompt_token_ids": prompt_token_ids,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "smallest_margin": round(min(margins), 5),
    }


def main(source: Path) -> None:
    """Writes the recording."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "float32.gguf"
        write_float32(source, target)
        options = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        model = llama_cpp.Llama(
            str(target), n_ctx=256, logits_all=True, flash_attn=False, verbose=False, **options
        )
        answers = [answer(model, prompt) for prompt in PROMPTS]
        chat = model.create_chat_completion(
            MESSAGES, temperature=0.0, repeat_penalty=1.0, max_tokens=NUM_CHAT_TOKENS
        )
    recording = {
        "recorded_with": f"llama-cpp-python {llama_cpp.__version__}",
        "file": source.name,
        "chat": {
            "messages": MESSAGES,
            "max_tokens": NUM_CHAT_TOKENS,
            "content": chat["choices"][0]["message"]["content"],
            "finish_reason": chat["choices"][0]["finish_reason"],
            "usage": chat["usage"],
        },
        "answers": answers,
    }
    RECORDING.write_text(dumps(recording))


def dumps(recording: dict[str, Any]) -> str:
    """Returns JSON with a line for each field of each answer, so that a diff can be read."""
    text = json.dumps(recording, indent=1)
    # Lists of numbers take one line.
    text = re.sub(r"(?<=[\[,])\n\s+(?=-?\d)", " ", text)
    return re.sub(r"(?<=\d)\n\s+\]", " ]", text) + "\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
