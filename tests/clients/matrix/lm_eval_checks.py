"""Checks of lm-evaluation-harness with completions, tokenized by the gateway."""

from __future__ import annotations

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from tests.clients.matrix.checks import BASE_URL, MODEL, TEXT, run, says


def completions() -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        model=MODEL,
        base_url=f"{BASE_URL}/completions",
        tokenizer_backend="remote",
        num_concurrent=1,
        max_retries=1,
    )


def instance(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def generate_until() -> None:
    asked = instance("generate_until", says(TEXT), {"until": ["°"], "max_gen_toks": 200})
    assert completions().generate_until([asked]) == [TEXT.partition("°")[0]]


def loglikelihood() -> None:
    (result,) = completions().loglikelihood([instance("loglikelihood", "The fox", " jumps")])
    sum_of_logprobs, is_greedy = result
    assert sum_of_logprobs < 0
    assert isinstance(is_greedy, bool)


def chat() -> None:
    model = LocalChatCompletion(
        model=MODEL, base_url=f"{BASE_URL}/chat/completions", num_concurrent=1, max_retries=1
    )
    message = [{"role": "user", "content": says(TEXT)}]
    prompt = model.apply_chat_template(message)
    asked = instance("generate_until", prompt, {"until": ["§"], "max_gen_toks": 200})
    assert model.generate_until([asked]) == [TEXT]


if __name__ == "__main__":
    run("lm_eval", generate_until, loglikelihood, chat)
