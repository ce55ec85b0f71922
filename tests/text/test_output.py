"""Generated tokens become content, reasoning and tool calls, as a client should see them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3_asgi.text.output import Chunk, OutputAssembler
from qwen3_asgi.text.sections import starts_in_reasoning
from qwen3_asgi.text.stop import StopStringCheck
from tests.text.toy import TAGS, byte_ids, token, toy_tokenizer

CALL = '\n{"name": "f", "arguments": {"a": 1}}\n'


def ids_of(text: str) -> list[int]:
    """Tags as their one token, the rest byte by byte."""
    for tag in TAGS:
        head, found, tail = text.partition(tag)
        if found:
            return [*ids_of(head), token(tag), *ids_of(tail)]
    return byte_ids(text)


def merged(chunks: list[Chunk]) -> list[tuple[str, str]]:
    """Neighbours of one section joined, tool calls kept apart."""
    result: list[tuple[str, str]] = []
    for section, text in chunks:
        if result and result[-1][0] == section != "tool_call":
            result[-1] = (section, result[-1][1] + text)
        else:
            result.append((section, text))
    return result


def assembled(
    ids: list[int],
    *,
    stop: tuple[str, ...] = (),
    split: bool = True,
    start_in_reasoning: bool = False,
    tool_calls: bool = True,
) -> list[tuple[str, str]]:
    """The output, which must be the same token by token and all at once."""
    outputs = []
    for size in (1, max(1, len(ids))):
        assembler = OutputAssembler(
            toy_tokenizer(),
            stop=stop,
            split=split,
            start_in_reasoning=start_in_reasoning,
            tool_calls=tool_calls,
        )
        chunks: list[Chunk] = []
        for i in range(0, len(ids), size):
            chunks += assembler.push(ids[i : i + size])
        chunks += assembler.finish()
        outputs.append(merged(chunks))
    assert outputs[0] == outputs[1]
    return outputs[0]


C, R, T = "content", "reasoning", "tool_call"


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("hello", [(C, "hello")]),
        ("\nhello\n", [(C, "\nhello\n")]),
        ("<think>\nwhy\n</think>\n\nso", [(R, "why"), (C, "so")]),
        ("<think>\na\n\nb\n</think>\n\nx\n\ny\n", [(R, "a\n\nb"), (C, "x\n\ny\n")]),
        ("<think>\n\n</think>\n\nso", [(C, "so")]),
        ("<think>\nwhy", [(R, "why")]),
        (f"<tool_call>{CALL}</tool_call>", [(T, CALL)]),
        (f"ok\n<tool_call>{CALL}</tool_call>", [(C, "ok"), (T, CALL)]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", [(T, CALL), (T, CALL)]),
        (f"<tool_call>{CALL}</tool_call>\nmore", [(T, CALL), (C, "more")]),
        ("<tool_call>oops</tool_call>", [(C, "<tool_call>oops</tool_call>")]),
        ('<tool_call>{"name": "f', [(C, '<tool_call>{"name": "f')]),
        (f"<tool_call>{CALL}", [(T, CALL)]),
        ("<think>a<tool_call>b</think>c", [(R, "a<tool_call>b"), (C, "c")]),
        ("a</think>b", [(C, "a</think>b")]),
        ("a</tool_call>b", [(C, "a</tool_call>b")]),
        ("<tool_call><think></tool_call>", [(C, "<tool_call><think></tool_call>")]),
        ("", []),
    ],
)
def test_sections(text: str, sections: list[tuple[str, str]]) -> None:
    assert assembled(ids_of(text)) == sections


def test_a_prompt_may_have_opened_the_think_block() -> None:
    assert assembled(ids_of("why\n</think>\n\nso"), start_in_reasoning=True) == [
        (R, "why"),
        (C, "so"),
    ]


def test_without_split_everything_is_content() -> None:
    text = f"<think>\na\n</think>\n\nb<tool_call>{CALL}</tool_call>\n"
    assert assembled(ids_of(text), split=False) == [(C, text)]


def test_without_tools_a_call_is_text() -> None:
    text = f"a<tool_call>{CALL}</tool_call>"
    assert assembled(ids_of(text), tool_calls=False) == [(C, text)]


def test_tags_spelled_in_several_tokens_are_text() -> None:
    assert assembled(byte_ids("<think>a</think>")) == [(C, "<think>a</think>")]


def test_an_unfinished_character_stays_in_its_section() -> None:
    ids = [token("<think>"), *byte_ids("a€")[:-1], token("</think>"), *byte_ids("€")[:1]]
    assert assembled(ids) == [(R, "a�"), (C, "�")]


@pytest.mark.parametrize(
    ("text", "stop", "sections"),
    [
        ("hello END more", "END", [(C, "hello ")]),
        ("<think>a END</think>b", "END", [(R, "a ")]),
        ("<think>a</think>b END", "END", [(R, "a"), (C, "b ")]),
        ("<think>a</think>b", "</think>", [(R, "a")]),
        ("<think>a</think>b", "a</th", []),
        ("<think>a</think>b", "k>b", [(R, "a")]),
        ("<think>a</think>\n\nb", "\n\n", [(R, "a")]),
        ("<think>a</think>b<", "<x", [(R, "a"), (C, "b<")]),
        (f"<tool_call>{CALL}</tool_call>x", "x", [(T, CALL)]),
        (f"<tool_call>{CALL}</tool_call>", "l>z", [(T, CALL)]),
        ("a\n###b", "###", [(C, "a\n")]),
    ],
)
def test_stop_strings_match_the_raw_text(
    text: str, stop: str, sections: list[tuple[str, str]]
) -> None:
    assert assembled(ids_of(text), stop=(stop,)) == sections


def test_reasoning_tokens_are_counted_without_tags() -> None:
    assembler = OutputAssembler(toy_tokenizer(), split=True)
    assembler.push(ids_of("<think>abc</think>defg"))
    assert assembler.reasoning_tokens == 3


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    assembler = OutputAssembler(toy_tokenizer(), stop=("END",), split=True)
    shown = [[c.text for c in assembler.push(byte_ids(char))] for char in "aENb\nc"]
    assert shown == [["a"], [], [], ["ENb"], [], ["\nc"]]


TOKENS = st.lists(st.integers(0, 255) | st.sampled_from([token(tag) for tag in TAGS[:4]]))


@given(TOKENS, st.lists(st.sampled_from(["</think>", "k>", "a", "<t", "\n"]), max_size=2))
def test_chunking_changes_nothing_and_the_check_agrees(ids: list[int], stops: list[str]) -> None:
    check = StopStringCheck(toy_tokenizer(), stops)
    stopped_at = next((i for i, token_id in enumerate(ids) if check(token_id)), None)
    assembler = OutputAssembler(toy_tokenizer(), stop=stops, split=True)
    assembler.push(ids)
    assert (assembler.matched_stop is not None) == (stopped_at is not None)
    assembled(ids, stop=tuple(stops))


@given(TOKENS)
def test_unsplit_output_is_the_decoded_text(ids: list[int]) -> None:
    text = toy_tokenizer().decode(ids)
    assert assembled(ids, split=False) == ([(C, text)] if text else [])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>a\n<think>\nx<|im_end|>\n<|im_start|>assistant\n", False),
        ("no tokens at all", False),
        ("<think>", True),
        ("", False),
    ],
)
def test_the_prompt_says_where_the_output_starts(prompt: str, expected: bool) -> None:
    ids = toy_tokenizer().encode(prompt)
    assert starts_in_reasoning(ids, toy_tokenizer()) is expected
