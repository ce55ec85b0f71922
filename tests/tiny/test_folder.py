"""The bundled folder is a normal, small Hugging Face model folder."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qwen3_asgi.tiny import tiny_path
from qwen3_asgi.tiny.evaluate import answer
from qwen3_asgi.tiny.heldout import heldout_items

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_BYTES = 6 * 1024 * 1024


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_path())


@pytest.fixture(scope="module")
def model() -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    return loaded.eval()


def config(name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((tiny_path() / name).read_text(encoding="utf-8"))
    return content


def test_the_path_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from qwen3_asgi.tiny import tiny_path; assert tiny_path().is_dir(); "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_zipped_folder_is_small_enough_for_a_wheel(tmp_path: Path) -> None:
    archive = tmp_path / "weights.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for file in tiny_path().iterdir():
            target.write(file, file.name)
    assert archive.stat().st_size <= LARGEST_BYTES


def test_transformers_loads_a_tied_bfloat16_qwen3() -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_path())
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_the_shape_has_the_traits_of_the_big_models() -> None:
    shape = config()
    assert shape["architectures"] == ["Qwen3ForCausalLM"]
    assert shape["model_type"] == "qwen3"
    assert shape["num_attention_heads"] * shape["head_dim"] != shape["hidden_size"]
    assert shape["num_key_value_heads"] < shape["num_attention_heads"]
    assert shape["rms_norm_eps"] == 1e-6
    assert shape["tie_word_embeddings"] is True


def test_some_rows_of_the_head_own_no_token(tokenizer: Any) -> None:
    shape = config()
    assert shape["vocab_size"] % 64 == 0
    assert shape["vocab_size"] - len(tokenizer) >= 20
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_both_ends_stop_generation(tokenizer: Any) -> None:
    end, stop = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    generation = config("generation_config.json")
    assert config()["eos_token_id"] == end
    assert generation["eos_token_id"] == [end, stop]
    assert (generation["temperature"], generation["top_p"], generation["top_k"]) == (0.6, 0.95, 20)


def test_only_the_control_tokens_are_special(tokenizer: Any) -> None:
    flags = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    assert flags == {
        "<|endoftext|>": True,
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<think>": False,
        "</think>": False,
        "<tool_call>": False,
        "</tool_call>": False,
        "<tool_response>": False,
        "</tool_response>": False,
    }
    ids = tokenizer("<|im_start|><think></think><tool_call></tool_call><|im_end|>")["input_ids"]
    assert len(ids) == 6
    kept = tokenizer.decode(ids, skip_special_tokens=True)
    assert kept == "<think></think><tool_call></tool_call>"


def test_nothing_is_prepended(tokenizer: Any) -> None:
    assert (
        tokenizer("Hello")["input_ids"] == tokenizer("Hello", add_special_tokens=False)["input_ids"]
    )


def test_the_empty_think_block_is_four_tokens(tokenizer: Any) -> None:
    assert len(tokenizer("<think>\n\n</think>\n\n")["input_ids"]) == 4


def test_digits_are_tokens_of_their_own(tokenizer: Any) -> None:
    assert len(tokenizer("2026")["input_ids"]) == 4


@pytest.mark.parametrize(
    "text",
    [
        "plain words, and 12 numbers.",
        "  leading, trailing  \n\n\t mixed \r\n white space ",
        "Größe naïve ñandú ½ €",
        "привет мир 你好世界 こんにちは 안녕 नमस्ते سلام",
        "👩‍👩‍👧‍👦 🏳️‍🌈 🙂🚀",
        "e\u0301 is not \u00e9, \u200b\ufeff\u0000\u007f",
        "".join(map(chr, range(0x20, 0x180))),
        "don't won't I'LL {\"a\": [1, 2]} <b>&amp;</b>",
    ],
)
def test_any_text_comes_back_unchanged(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_training_record_is_complete() -> None:
    record = config("training.json")
    assert {"seed", "steps", "tokens", "training_seconds", "loss", "held_out", "versions"} <= set(
        record
    )
    assert record["held_out"]["score"] >= 0.9


def test_a_sample_of_held_out_questions_is_answered(model: Any, tokenizer: Any) -> None:
    items = [item for item in heldout_items() if item.category != "counting"][::17]
    right = sum(
        item.check(given.text, given.tool_calls)
        for item in items
        for given in [answer(model, tokenizer, item, longest_tokens=96)]
    )
    assert len(items) >= 20
    assert right >= 0.9 * len(items)
