"""Inputs of vectors: the ids of transformers, whole and cut, pairs, and prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from splitserve_text import InvalidRequest, Tokenizer
from tests.support.models import tiny_tokenizers

SPECIAL = [("[CLS]", 20), ("[SEP]", 21)]
FIRST = "t1 t2 t3 t4 t5"
SECOND = "t6 t7 t8 t9 t10 t11 t12 t13"
TEMPLATES = {
    "bert": ("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"),
    "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
    "qwen": ("$A [SEP]", "$A $B [SEP]"),
}


def library(template: str) -> tokenizers.Tokenizer:
    made = tiny_tokenizers.words(20)
    made.add_special_tokens([name for name, _ in SPECIAL])
    single, pair = TEMPLATES[template]
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=SPECIAL
    )
    return made


def make(template: str = "bert", **files: object) -> Tokenizer:
    named = {f"{name}.json": json.dumps(content).encode() for name, content in files.items()}
    return Tokenizer.from_files({"tokenizer.json": library(template).to_str().encode(), **named})


def reference(template: str, side: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=library(template), truncation_side=side, pad_token="[SEP]"
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("max_tokens", [None, 3, 4, 7, 8, 9, 12, 40])
def test_ids_are_those_of_transformers_when_cut_or_whole(
    template: str, side: str, max_tokens: int | None
) -> None:
    ours = make(template, tokenizer_config={"truncation_side": side}).vector_texts
    theirs: Any = reference(template, side)
    cut = {"truncation": max_tokens is not None, "max_length": max_tokens}

    assert ours.encode(SECOND, max_tokens=max_tokens) == theirs(SECOND, **cut)["input_ids"]
    bare = ours.encode(SECOND, max_tokens=max_tokens, add_special_tokens=False)
    assert bare == theirs(SECOND, add_special_tokens=False, **cut)["input_ids"]
    if max_tokens is None or max_tokens >= 4:
        for first, second in ((FIRST, SECOND), (SECOND, FIRST), (FIRST, FIRST)):
            pair = ours.encode_pair(first, second, max_tokens=max_tokens)
            expected = theirs(first, second, return_token_type_ids=True, **cut)
            assert pair.token_ids == expected["input_ids"]
            types = expected["token_type_ids"]
            assert pair.second_text_start == (types.index(1) if 1 in types else 0)


def test_pair_has_the_beginning_of_the_second_text_when_that_is_bounded() -> None:
    ours = make().vector_texts
    pair = ours.encode_pair(FIRST, SECOND, max_second_tokens=2)
    assert pair == ours.encode_pair(FIRST, "t6 t7")
    assert ours.encode_pair(FIRST, SECOND, max_second_tokens=2, max_tokens=8).token_ids == [
        20, 1, 2, 3, 21, 6, 7, 21,
    ]  # fmt: skip


def test_pair_has_no_second_text_when_the_model_reads_no_token_types() -> None:
    config = {"model_input_names": ["input_ids", "attention_mask"]}
    assert make().vector_texts.encode_pair(FIRST, SECOND).second_text_start == 7
    texts = make(tokenizer_config=config).vector_texts
    assert texts.encode_pair(FIRST, SECOND).second_text_start == 0


def test_prompts_are_those_of_the_files() -> None:
    prompts = {"query": "t1 ", "passage": "t2 ", "broken": None}
    config = {"prompts": prompts, "default_prompt_name": "passage"}
    texts = make(config_sentence_transformers=config).vector_texts

    assert (texts.prompt("query"), texts.prompt(None)) == ("t1 ", "t2 ")
    assert (texts.query_prompt, texts.document_prompt) == ("t1 ", "t2 ")
    with pytest.raises(InvalidRequest, match="prompt_name is 'x'; allowed: 'query', 'passage'"):
        texts.prompt("x")
    with pytest.raises(InvalidRequest, match="allowed: none, as the model has no prompts"):
        make().vector_texts.prompt("query")


@pytest.mark.parametrize("config", [[], {"prompts": 1, "default_prompt_name": []}, {"prompts": []}])
def test_odd_files_have_no_prompts(config: object) -> None:
    texts = make(config_sentence_transformers=config, sentence_bert_config=config).vector_texts
    assert (texts.prompt(None), texts.query_prompt, texts.document_prompt) == ("", "", "")


def test_texts_are_in_lower_case_when_the_files_say_so() -> None:
    lower = make(sentence_bert_config={"do_lower_case": True})
    assert lower.encode("T1 T2") == lower.encode("t1 t2") == make().encode("t1 t2")
    assert make().encode("T1") != make().encode("t1")


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        make().vector_texts.encode_pair("\ud800", "t1")
