"""The chat template renders as Qwen3's hybrid one does; only the tools block is worded anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from qwen3_asgi.tiny import tiny_path

if TYPE_CHECKING:
    from collections.abc import Callable

    Render = Callable[..., str]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter, übersetzt",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK = {"role": "user", "content": "Hello"}


def call(arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}


@pytest.fixture(scope="module")
def render() -> Render:
    tokenizer = AutoTokenizer.from_pretrained(tiny_path())

    def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))

    return rendered


def test_a_message_is_a_turn_and_the_prompt_opens_the_answer(render: Render) -> None:
    assert render([ASK], add_generation_prompt=True) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_off_closes_an_empty_think_block(render: Render) -> None:
    prompt = render([ASK], add_generation_prompt=True, enable_thinking=False)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_thinking_on_is_the_default(render: Render) -> None:
    assert render([ASK], add_generation_prompt=True, enable_thinking=True) == render(
        [ASK], add_generation_prompt=True
    )


def test_a_system_message_comes_first_and_later_ones_stay_in_place(render: Render) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert render([system, ASK, system]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>system\nBe brief.<|im_end|>\n"
    )


def test_tools_are_json_lines_after_the_system_text(render: Render) -> None:
    text = render([{"role": "system", "content": "Be brief."}, ASK], tools=[WEATHER, WEATHER])
    head, _, rest = text.partition("<tools>\n")
    assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    body, _, tail = rest.partition("\n</tools>")
    assert body.split("\n")[0] == body.split("\n")[1]
    assert '"name": "get_weather"' in body
    assert "übersetzt" in body
    assert '<tool_call>\n{"name": <' in tail
    assert tail.count("<|im_start|>system") == 0


def test_tools_without_a_system_text_get_a_system_turn(render: Render) -> None:
    assert render([ASK], tools=[WEATHER]).startswith("<|im_start|>system\n# Tools\n\n")


@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'])
def test_calls_are_json_inside_tool_call_tags(render: Render, arguments: object) -> None:
    text = render([ASK, {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}])
    assert text.endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
    )


def test_several_calls_and_text_before_them_are_separated_by_newlines(render: Render) -> None:
    calls = [call({"city": "A"}), call({"city": "B"})]
    text = render([ASK, {"role": "assistant", "content": "Wait.", "tool_calls": calls}])
    assert "Wait.\n<tool_call>\n" in text
    assert "</tool_call>\n<tool_call>\n" in text


def test_tool_results_share_one_user_turn(render: Render) -> None:
    text = render(
        [
            ASK,
            {"role": "assistant", "content": "", "tool_calls": [call({}), call({})]},
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ],
        add_generation_prompt=True,
    )
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_before_the_last_question_is_dropped(render: Render) -> None:
    history = {"role": "assistant", "content": "Hi!", "reasoning_content": "secret"}
    inline = {"role": "assistant", "content": "<think>\nsecret\n</think>\n\nHi!"}
    expected = "<|im_start|>assistant\nHi!<|im_end|>\n"
    assert expected in render([ASK, history, ASK])
    assert expected in render([ASK, inline, ASK])
    assert "secret" not in render([ASK, history, ASK, inline, ASK])


def test_reasoning_since_the_last_question_is_kept_across_tool_results(render: Render) -> None:
    text = render(
        [
            ASK,
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "I look.",
                "tool_calls": [call({})],
            },
            {"role": "tool", "content": "rain"},
        ],
        add_generation_prompt=True,
    )
    assert "<|im_start|>assistant\n<think>\nI look.\n</think>\n\n<tool_call>" in text


def test_the_final_answer_always_carries_a_think_block(render: Render) -> None:
    answer = {"role": "assistant", "content": "Hi!"}
    assert render([ASK, answer]).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\nHi!<|im_end|>\n"
    )
