"""One answer, byte by byte: what counts as a token, when, and what is an error of which kind."""

from __future__ import annotations

import json

import pytest

from qwen3_asgi.bench.serve_wire import Answer, Reader, WireError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(words, **more):
    return event(choices=[{"text": words}], **more)


DONE = b"data: [DONE]\n\n"


def read(*parts, asked=8):
    """The answer, whose parts come at the moments 1, 2, …"""
    answer = Answer(0.0, asked)
    reader = Reader(answer)
    moment = 0
    for moment, part in enumerate(parts, 1):
        if reader.feed(part, float(moment)):
            break
    reader.close(float(moment))
    return answer


def test_a_token_for_each_event_without_usage():
    answer = read(HEAD, text("a"), text("b") + text(""), DONE)
    assert (answer.output_tokens, answer.reported, answer.ttft) == (2, False, 2)
    assert answer.gaps() == [1]
    assert answer.end == 4


def test_an_event_with_several_tokens_counts_so():
    answer = read(
        HEAD,
        text("a", usage={"completion_tokens": 1, "prompt_tokens": 5}),
        text("bcd", usage={"completion_tokens": 4, "prompt_tokens": 5}),
        text("e", usage={"completion_tokens": 5, "prompt_tokens": 5}),
        event(choices=[], usage={"completion_tokens": 5, "prompt_tokens": 5}) + DONE,
    )
    assert answer.gaps() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert (answer.output_tokens, answer.prompt_tokens) == (5, 5)
    assert sum(tokens for _, tokens in answer.chunks) == 5


def test_usage_at_the_end_is_spread_over_the_events():
    usage = event(choices=[], usage={"completion_tokens": 4})
    answer = read(HEAD, text("ab"), text("cd"), usage + DONE)
    assert answer.chunks == [(2, 2), (3, 2)]
    assert answer.gaps() == [0.5, 0.5]


def test_usage_in_the_last_event_with_a_choice_is_of_the_whole_answer():
    last = event(choices=[{"text": "", "finish_reason": "length"}], usage={"completion_tokens": 4})
    answer = read(HEAD, text("ab"), text("cd"), last)
    assert answer.chunks == [(2, 2), (3, 2)]
    assert answer.output_tokens == 4
    assert answer.gaps() == [0.5, 0.5]


def test_a_token_without_text_is_a_token():
    answer = read(
        HEAD,
        text("", usage={"completion_tokens": 1}),
        text("é", usage={"completion_tokens": 2}),
        DONE,
    )
    assert [tokens for _, tokens in answer.chunks] == [1, 1]
    assert answer.ttft == 2


@pytest.mark.parametrize("name", ["content", "reasoning", "reasoning_content"])
def test_text_of_a_chat_is_in_the_delta(name):
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    answer = read(HEAD, role, event(choices=[{"delta": {name: "x"}}]), DONE)
    assert (answer.ttft, answer.output_tokens) == (3, 1)


def test_chunks_may_be_cut_anywhere():
    body = text("a") + text("b") + DONE
    pieces = [body[:7], body[7:30], body[30:]]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    whole = CHUNKED + framed
    answer = read(*(whole[i : i + 1] for i in range(len(whole))))
    assert answer.output_tokens == 2


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([], "dropped"),
        ([HEAD[:9]], "dropped"),
        ([HEAD, text("a")], "dropped"),
        ([HEAD, DONE], "empty"),
        ([b"SSH-2.0-x\r\n"], "malformed"),
        ([b"HTTP/1.1 fine\r\n\r\n"], "malformed"),
        ([HEAD, b"data: {\n\n"], "malformed"),
        ([HEAD, b"data: [1]\n\n"], "malformed"),
        ([HEAD, event(choices=[7])], "malformed"),
        ([HEAD, b"<html>\n"], "malformed"),
        ([HEAD, text("a", usage={"completion_tokens": "many"})], "malformed"),
        ([CHUNKED, b"zz\r\n"], "malformed"),
        ([HEAD, text("a"), event(error={"message": "no memory"})], "error event"),
        ([HEAD, text("a"), event(choices=[], usage={"completion_tokens": 9}), DONE], "wrong usage"),
        ([HEAD, text("a"), event(choices=[], usage={"completion_tokens": 0}), DONE], "wrong usage"),
        ([b"HTTP/1.1 503 Busy\r\n\r\n", b"try later"], "http 503"),
    ],
)
def test_what_is_no_answer_has_a_kind(parts, kind):
    with pytest.raises(WireError) as caught:
        read(*parts)
    assert caught.value.kind == kind


def test_a_refusal_says_why():
    with pytest.raises(WireError, match="http 422: no such field"):
        read(b"HTTP/1.1 422 No\r\nTransfer-Encoding: chunked\r\n\r\nd\r\nno such field\r\n")


def test_an_end_is_an_end_without_done():
    answer = read(HEAD, event(choices=[{"text": "a", "finish_reason": "length"}]))
    assert answer.output_tokens == 1
