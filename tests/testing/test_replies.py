"""A fake model that says what the test has written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from qwen3_asgi import GenerationFailed, SamplingParams, create_app
from qwen3_asgi.testing import FakeExecutor, StepGate, assert_idle, fake_engine
from tests.testing.client import client

if TYPE_CHECKING:
    from collections.abc import Sequence

    import httpx

    from qwen3_asgi import Engine

PARIS = "It is Paris! 🗼"
CAPITAL = "What is the capital of France?"


def ask(engine: Engine, question: str, **params: Any) -> Any:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    return engine.generate_sync(messages=messages, params=SamplingParams(**params))


def test_a_map_answers_the_last_user_message_or_the_whole_prompt() -> None:
    with fake_engine(replies={CAPITAL: PARIS, "Once upon": " a time", "": "nothing"}) as engine:
        output = ask(engine, CAPITAL)
        assert (output.text, output.finish_reason) == (PARIS, "stop")
        plain = engine.generate_sync(prompt="Once upon")
        assert (plain.text, plain.finish_reason) == (" a time", "stop")


def test_a_function_gets_the_prompt_as_the_model_sees_it() -> None:
    prompts = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return f"number {len(prompts)}"

    with fake_engine(replies=reply) as engine:
        assert ask(engine, "one").text == "number 1"
        assert ask(engine, "two").text == "number 2"
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompts[0]
    assert "<|im_start|>user\ntwo<|im_end|>" in prompts[1]


def test_a_prompt_without_a_reply_fails_and_names_it() -> None:
    with fake_engine(replies={CAPITAL: PARIS}) as engine:
        with pytest.raises(GenerationFailed, match="no reply to 'And of Spain"):
            ask(engine, "And of Spain?")
        assert ask(engine, CAPITAL).text == PARIS
        assert_idle(engine)


def test_limits_of_the_request_hold_for_replies() -> None:
    with fake_engine(replies={CAPITAL: PARIS}) as engine:
        cut = ask(engine, CAPITAL, max_tokens=3)
        assert PARIS.startswith(cut.text)
        assert (len(cut.token_ids), cut.finish_reason) == (3, "length")
        stopped = ask(engine, CAPITAL, stop=["Paris"])
        assert stopped.text == "It is "
        longer = ask(engine, CAPITAL, min_tokens=len(PARIS) + 20, max_tokens=len(PARIS) + 30)
        assert longer.text.startswith(PARIS)
        assert len(longer.token_ids) >= len(PARIS) + 20
        # An end that is banned is not said: a real sampler could not say it either.
        assert engine.tokenizer.token_id("<|im_end|>") not in longer.token_ids[: len(PARIS) + 20]


def test_nonsense_never_ends_by_itself() -> None:
    executor = FakeExecutor(vocab_size=4, eos=2)
    with fake_engine(executor, eos_token_ids=(2,)) as engine:
        params = SamplingParams(max_tokens=60)
        output = engine.generate_sync(prompt_token_ids=[1, 3], params=params)
        assert (len(output.token_ids), output.finish_reason) == (60, "length")
        assert set(output.token_ids) == {0, 1, 3}


@pytest.mark.anyio
async def test_thinking_and_tool_calls_come_out_of_a_reply_as_out_of_a_model() -> None:
    call = '<tool_call>\n{"name": "time", "arguments": {"zone": "CET"}}\n</tool_call>'
    engine = fake_engine(replies={"hm": "<think>\nwell\n</think>\n\nyes", "now?": call})
    tools = [{"type": "function", "function": {"name": "time", "parameters": {}}}]
    async with engine, client(create_app(engine, metrics=False)) as (http, _):
        said = await chat(http, "hm")
        assert (said["reasoning_content"], said["content"]) == ("well", "yes")
        (called,) = (await chat(http, "now?", tools=tools))["tool_calls"]
        assert called["function"] == {"name": "time", "arguments": '{"zone": "CET"}'}


async def chat(http: httpx.AsyncClient, question: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": question}], **fields}
    reply = await http.post("/v1/chat/completions", json=body)
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def test_replies_belong_to_an_executor_that_is_given() -> None:
    with pytest.raises(ValueError, match="belong to the executor"):
        fake_engine(FakeExecutor(), replies={})


def test_a_request_that_is_preempted_says_its_reply_to_the_end() -> None:
    gate = StepGate(open=False)

    def echo(prompt: Sequence[int]) -> list[int]:
        return list(range(prompt[0], prompt[0] + 12))

    executor = FakeExecutor(num_kv_blocks=6, block_size=4, gate=gate, reply=echo)
    with fake_engine(executor, eos_token_ids=(0,)) as engine:
        handles = [
            engine.submit_sync(prompt_token_ids=[first] * 4, params=SamplingParams(max_tokens=20))
            for first in (100, 200)
        ]
        gate.open()
        said = [[t.token_id for b in h.read_sync() for t in b.text_tokens] for h in handles]
    assert said == [echo([100]), echo([200])]
    prefills = [row for row in executor.rows if row.kind == "prefill"]
    assert len(prefills) > 2  # one of them had to begin again
