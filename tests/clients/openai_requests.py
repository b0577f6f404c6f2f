"""Requests to an OpenAI-compatible server, by name: recorded from vLLM's, repeated to ours.

Both serve the bundled model in float32 with `vllm_recording/chat_template.jinja`, so that greedy
tokens are the same. What is drawn at random has a name with `sampled`: there only shapes are alike.
A name with `stream` asks for events.
"""

from __future__ import annotations

from tests.clients.exchange import MODEL, Request

PROMPT = "Once upon a time"
PROMPT_TOKEN_IDS = [486, 487, 264, 463]
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 6}
SAMPLED = {"model": MODEL, "temperature": 1, "seed": 7, "max_tokens": 4}
STREAM = {"stream": True}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# Against white space without end, which the model likes and JSON allows.
TERSE = {"frequency_penalty": 2}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": CITY,
    "strict": True,
}
TOOLS = [{"type": "function", "function": WEATHER}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLED = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
RESPONSES_TOOLS = [{"type": "function", **WEATHER}]


def completion(**fields: object) -> Request:
    return Request("/v1/completions", {"prompt": PROMPT, **GREEDY, **fields})


def chat(**fields: object) -> Request:
    return Request("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, **fields})


def response(**fields: object) -> Request:
    greedy = {"model": MODEL, "temperature": 0, "max_output_tokens": 6}
    return Request("/v1/responses", {"input": "Tell me a story about a fox.", **greedy, **fields})


def json_schema(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


COMPLETIONS = {
    "completion": completion(),
    "completion_stream": completion(**STREAM),
    "completion_stream_usage": completion(**WITH_USAGE),
    "completion_stream_continuous_usage": completion(
        stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    "completion_default_length_sampled": completion(max_tokens=None, temperature=1, seed=1),
    "completion_token_ids": completion(prompt=PROMPT_TOKEN_IDS),
    "completion_batch": completion(prompt=[PROMPT, "The fox"]),
    "completion_batch_stream": completion(prompt=[PROMPT, "The fox"], **STREAM),
    "completion_batch_token_ids": completion(prompt=[PROMPT_TOKEN_IDS, [486, 487]]),
    "completion_n_sampled": completion(**SAMPLED, n=2),
    "completion_n_stream_sampled": completion(**SAMPLED, n=2, **WITH_USAGE),
    "completion_n_greedy": completion(n=2),
    "completion_batch_n_sampled": completion(prompt=[PROMPT, "The fox"], **SAMPLED, n=2),
    "completion_best_of_sampled": completion(**SAMPLED, n=1, best_of=2),
    "completion_logprobs": completion(logprobs=2),
    "completion_logprobs_0": completion(logprobs=0),
    "completion_logprobs_stream": completion(logprobs=2, **STREAM),
    "completion_echo": completion(echo=True),
    "completion_echo_stream": completion(echo=True, **STREAM),
    "completion_echo_logprobs": completion(echo=True, logprobs=1),
    "completion_echo_only": completion(echo=True, logprobs=1, max_tokens=0),
    "completion_prompt_logprobs": completion(prompt_logprobs=1, max_tokens=2),
    "completion_return_token_ids": completion(return_token_ids=True),
    "completion_return_token_ids_stream": completion(return_token_ids=True, **STREAM),
    "completion_tokens_as_ids": completion(logprobs=1, return_tokens_as_token_ids=True),
    "completion_stop": completion(stop=" named", max_tokens=20),
    "completion_stop_stream": completion(stop=[" named", "zebra"], max_tokens=20, **STREAM),
    "completion_stop_included": completion(
        stop=["amb na"], include_stop_str_in_output=True, max_tokens=20
    ),
    "completion_stop_token": completion(stop_token_ids=[311], max_tokens=20),
    "completion_ends": completion(prompt="And the fox began to teach others", max_tokens=60),
    "completion_ends_stream": completion(
        prompt="And the fox began to teach others", max_tokens=60, **STREAM
    ),
    "completion_ignore_eos": completion(ignore_eos=True, min_tokens=3),
    "completion_special_tokens": completion(
        prompt="And the fox began to teach others",
        max_tokens=60,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    ),
    "completion_parameters_sampled": completion(
        **SAMPLED,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={"5": -1},
        bad_words=["dragon"],
        user="ann",
    ),
    "completion_allowed_token_ids": completion(allowed_token_ids=[486, 487, 264]),
    "completion_priority": completion(priority=-1),
    "completion_cache_salt": completion(cache_salt="only mine"),
    "completion_structured_choice": completion(structured_outputs={"choice": ["yes", "no"]}),
    "completion_structured_regex": completion(
        structured_outputs={"regex": "[a-c]{3}"}, max_tokens=20
    ),
    "completion_structured_json": completion(
        structured_outputs={"json": CITY}, **TERSE, max_tokens=40
    ),
    "completion_truncated_prompt": completion(truncate_prompt_tokens=2, return_token_ids=True),
    "completion_request_id": completion(request_id="mine-1"),
    "completion_without_model": completion(model=None),
}

CHAT = {
    "chat": chat(),
    "chat_stream": chat(**STREAM),
    "chat_stream_usage": chat(**WITH_USAGE),
    "chat_max_completion_tokens": chat(max_tokens=None, max_completion_tokens=3),
    "chat_parts": chat(
        messages=[
            {"role": "system", "content": "You tell stories."},
            {"role": "user", "content": [{"type": "text", "text": "A story of an owl, please."}]},
        ]
    ),
    "chat_n_sampled": chat(**SAMPLED, n=2),
    "chat_n_stream_sampled": chat(**SAMPLED, n=2, **WITH_USAGE),
    "chat_logprobs": chat(logprobs=True, top_logprobs=2, max_tokens=3),
    "chat_logprobs_alone": chat(logprobs=True, max_tokens=2),
    "chat_logprobs_stream": chat(logprobs=True, top_logprobs=1, max_tokens=3, **STREAM),
    "chat_stop": chat(stop=[" there", "zebra"], max_tokens=20),
    "chat_stop_stream": chat(stop=[" there"], max_tokens=20, **STREAM),
    "chat_ends": chat(max_tokens=None, messages=[{"role": "user", "content": "Hello!"}]),
    "chat_return_token_ids": chat(return_token_ids=True, max_tokens=3),
    "chat_return_token_ids_stream": chat(return_token_ids=True, max_tokens=3, **STREAM),
    "chat_continue_final_message": chat(
        messages=[*MESSAGES, {"role": "assistant", "content": "Once upon"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "chat_echo": chat(
        messages=[*MESSAGES, {"role": "assistant", "content": "Once upon"}],
        add_generation_prompt=False,
        continue_final_message=True,
        echo=True,
    ),
    "chat_template_kwargs": chat(chat_template_kwargs={"enable_thinking": False}),
    "chat_json_object": chat(response_format={"type": "json_object"}, max_tokens=8),
    "chat_json_schema": chat(response_format=json_schema(CITY), **TERSE, max_tokens=40),
    "chat_json_schema_stream": chat(
        response_format=json_schema(CITY), **TERSE, max_tokens=40, **STREAM
    ),
    "chat_text_format": chat(response_format={"type": "text"}),
    "chat_structured_regex": chat(structured_outputs={"regex": "(yes|no)"}),
    "chat_structured_grammar": chat(structured_outputs={"grammar": 'root ::= "yes" | "no"'}),
    "chat_priority": chat(priority=3, user="ann"),
    "chat_tools_not_called": chat(tools=TOOLS),
    "chat_tools_none": chat(tools=TOOLS, tool_choice="none"),
    "chat_tools_auto": chat(
        tools=TOOLS, structured_outputs={"choice": [CALL]}, **TERSE, max_tokens=120
    ),
    "chat_tools_auto_stream": chat(
        tools=TOOLS, structured_outputs={"choice": [CALL]}, **TERSE, max_tokens=120, **STREAM
    ),
    "chat_tools_auto_text_first": chat(
        tools=TOOLS, structured_outputs={"choice": ["I look. " + CALL]}, **TERSE, max_tokens=120
    ),
    "chat_tools_named": chat(tools=TOOLS, tool_choice=NAMED, **TERSE, max_tokens=120),
    "chat_tools_named_stream": chat(
        tools=TOOLS, tool_choice=NAMED, **TERSE, max_tokens=120, **STREAM
    ),
    "chat_tools_required": chat(tools=TOOLS, tool_choice="required", **TERSE, max_tokens=120),
    "chat_tools_required_stream": chat(
        tools=TOOLS, tool_choice="required", **TERSE, max_tokens=120, **WITH_USAGE
    ),
    "chat_tools_answered": chat(messages=CALLED, tools=TOOLS),
}

RESPONSES = {
    "response": response(),
    "response_stream": response(**STREAM),
    "response_instructions": response(instructions="You tell stories.", max_output_tokens=3),
    "response_messages": response(
        input=[
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": [{"type": "input_text", "text": "A story of an owl."}]},
        ]
    ),
    "response_ends": response(max_output_tokens=400, input="Hello!"),
    "response_ends_stream": response(max_output_tokens=400, input="Hello!", **STREAM),
    "response_logprobs": response(
        include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=2
    ),
    "response_json_schema": response(
        text={"format": {"type": "json_schema", "name": "answer", "schema": CITY, "strict": True}},
        **TERSE,
        max_output_tokens=40,
    ),
    "response_metadata": response(metadata={"a": "b"}, user="ann", store=False),
    "response_tools_not_called": response(tools=RESPONSES_TOOLS),
    "response_tools_named": response(
        tools=RESPONSES_TOOLS,
        tool_choice={"type": "function", "name": "get_weather"},
        **TERSE,
        max_output_tokens=120,
    ),
    "response_tools_required_stream": response(
        tools=RESPONSES_TOOLS, tool_choice="required", **TERSE, max_output_tokens=120, **STREAM
    ),
    "response_tools_answered": response(
        tools=RESPONSES_TOOLS,
        input=[
            {"role": "user", "content": "How is the weather in Oslo?"},
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "get_weather",
                "arguments": '{"city": "Oslo"}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        ],
    ),
}

OTHERS = {
    "models": Request("/v1/models"),
    "model": Request(f"/v1/models/{MODEL}"),
    "model_unknown": Request("/v1/models/nobody"),
    "tokenize": Request("/tokenize", {"model": MODEL, "prompt": PROMPT}),
    "tokenize_strings": Request(
        "/tokenize", {"model": MODEL, "prompt": PROMPT, "return_token_strs": True}
    ),
    "tokenize_chat": Request("/tokenize", {"model": MODEL, "messages": MESSAGES}),
    "tokenize_unknown_model": Request("/tokenize", {"model": "nobody", "prompt": PROMPT}),
    "detokenize": Request("/detokenize", {"model": MODEL, "tokens": PROMPT_TOKEN_IDS}),
    "detokenize_out_of_range": Request("/detokenize", {"model": MODEL, "tokens": [10**6]}),
    "detokenize_negative": Request("/detokenize", {"model": MODEL, "tokens": [-1]}),
    "health": Request("/health"),
    "version": Request("/version"),
    "metrics_missing_path": Request("/v1/nothing"),
    "method_not_allowed": Request("/v1/chat/completions"),
}

# What is wrong with a request, for both ways to ask.
WRONG_FIELDS: dict[str, dict[str, object]] = {
    "unknown_model": {"model": "nobody"},
    "unknown_field": {"no_such_field": 1},
    "max_tokens_0": {"max_tokens": 0},
    "max_tokens_negative": {"max_tokens": -1},
    "max_tokens_beyond_model": {"max_tokens": 5000},
    "max_tokens_text": {"max_tokens": "many"},
    "max_tokens_fraction": {"max_tokens": 1.5},
    "temperature_negative": {"temperature": -1},
    "temperature_text": {"temperature": "hot"},
    "top_p_0": {"top_p": 0},
    "top_p_above_1": {"top_p": 1.5},
    "top_k_negative": {"top_k": -5},
    "min_p_above_1": {"min_p": 2},
    "presence_penalty_5": {"presence_penalty": 5},
    "repetition_penalty_0": {"repetition_penalty": 0},
    "n_0": {"n": 0},
    "n_text": {"n": "two"},
    "seed_text": {"seed": "x"},
    "seed_huge": {"seed": 2**70},
    "stop_number": {"stop": 5},
    "stop_empty": {"stop": ""},
    "logit_bias_not_a_token": {"logit_bias": {"fox": 1}},
    "logit_bias_out_of_range": {"logit_bias": {"1000000": 1}},
    "allowed_token_ids_empty": {"allowed_token_ids": []},
    "stream_options_without_stream": {"stream_options": {"include_usage": True}},
    "stream_text": {"stream": "maybe"},
    "structured_two_kinds": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "structured_bad_regex": {"structured_outputs": {"regex": "(a"}},
    "structured_bad_schema": {"structured_outputs": {"json": {"type": "nothing"}}},
    "structured_bad_grammar": {"structured_outputs": {"grammar": "root ::= ("}},
    "priority_text": {"priority": "high"},
}

ERRORS = {
    **{f"completion_error_{name}": completion(**wrong) for name, wrong in WRONG_FIELDS.items()},
    **{f"chat_error_{name}": chat(**wrong) for name, wrong in WRONG_FIELDS.items()},
    "completion_error_unknown_model_stream": completion(model="nobody", stream=True),
    "completion_error_prompt_missing": Request("/v1/completions", GREEDY),
    "completion_error_prompt_empty": completion(prompt=""),
    "completion_error_prompt_empty_token_ids": completion(prompt=[]),
    "completion_error_prompt_number": completion(prompt=5),
    "completion_error_prompt_too_long": completion(prompt=[5] * 2100),
    "completion_error_prompt_too_long_stream": completion(prompt=[5] * 2100, stream=True),
    "completion_error_prompt_text_too_long": completion(prompt="fox " * 3000),
    "completion_error_token_out_of_range": completion(prompt=[10**6]),
    "completion_error_token_negative": completion(prompt=[-1]),
    "completion_error_suffix": completion(suffix="the end"),
    "completion_error_logprobs_text": completion(logprobs="all"),
    "completion_error_logprobs_100": completion(logprobs=100),
    "completion_error_echo_stream_prompt_logprobs": completion(prompt_logprobs=1, stream=True),
    "chat_error_messages_missing": Request("/v1/chat/completions", GREEDY),
    "chat_error_messages_empty": chat(messages=[]),
    "chat_error_messages_text": chat(messages="hello"),
    "chat_error_role_missing": chat(messages=[{"content": "hello"}]),
    "chat_error_role_unknown": chat(messages=[{"role": "robot", "content": "hello"}]),
    "chat_error_image": chat(
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
            }
        ]
    ),
    "chat_error_too_long": chat(messages=[{"role": "user", "content": "fox " * 3000}]),
    "chat_error_top_logprobs_without_logprobs": chat(top_logprobs=2),
    "chat_error_top_logprobs_100": chat(logprobs=True, top_logprobs=100),
    "chat_error_tool_choice_without_tools": chat(tool_choice="required"),
    "chat_error_tool_choice_unknown": chat(
        tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nothing"}}
    ),
    "chat_error_tool_choice_text": chat(tools=TOOLS, tool_choice="perhaps"),
    "chat_error_tool_without_name": chat(tools=[{"type": "function", "function": {}}]),
    "chat_error_response_format_unknown": chat(response_format={"type": "yaml"}),
    "chat_error_json_schema_missing": chat(response_format={"type": "json_schema"}),
    "chat_error_json_schema_bad": chat(response_format=json_schema({"type": "nothing"})),
    "chat_error_continue_and_generate": chat(continue_final_message=True),
    "response_error_unknown_model": response(model="nobody"),
    "response_error_input_missing": Request("/v1/responses", {"model": MODEL}),
    "response_error_max_output_tokens": response(max_output_tokens=-1),
    "response_error_previous": response(previous_response_id="resp_1"),
    "response_error_unknown_field": response(no_such_field=1),
    "response_error_too_long": response(input="fox " * 3000),
    "response_error_not_found": Request("/v1/responses/resp_1"),
    "error_not_json": Request("/v1/completions", "{not json"),
    "error_empty_body": Request("/v1/completions", ""),
    "error_array": Request("/v1/completions", "[1]"),
    "error_null": Request("/v1/chat/completions", "null"),
}

# By the file that holds what was recorded.
REQUESTS: dict[str, dict[str, Request]] = {
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "others": OTHERS,
    "errors": ERRORS,
}
