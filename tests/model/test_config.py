from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.config import (
    load_generation_defaults,
    load_model_config,
    parse_model_config,
)
from qwen3_asgi.model.rope import RotaryTable, inverse_frequencies
from qwen3_asgi.model.rope_config import RopeConfig

# As the hub has it (transformers 4 spelling).
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def variant(**entries):
    return QWEN3_0_6B | entries


def test_a_hub_config():
    config = parse_model_config(QWEN3_0_6B)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads) == (1024, 16, 8)
    assert config.head_dim == 128
    assert config.tie_word_embeddings
    assert config.rope == RopeConfig(1_000_000.0)
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (151645,)
    assert config.max_context_tokens == 40960
    assert round(config.num_parameters / 1e9, 3) == 0.596


def test_the_new_spelling_says_the_same():
    raw = variant(dtype="bfloat16", rope_parameters={"rope_type": "default", "rope_theta": 1000000})
    for old in ("rope_theta", "rope_scaling", "torch_dtype"):
        del raw[old]
    assert parse_model_config(raw) == parse_model_config(QWEN3_0_6B)


def test_head_dim_may_be_absent():
    raw = variant()
    del raw["head_dim"]
    assert parse_model_config(raw).head_dim == 64


def test_tying_is_honoured_not_inferred():
    assert not parse_model_config(variant(tie_word_embeddings=False)).tie_word_embeddings
    raw = variant()
    del raw["tie_word_embeddings"]
    assert not parse_model_config(raw).tie_word_embeddings


def test_yarn_stretches_the_context_even_when_the_positions_were_left_alone():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = parse_model_config(variant(rope_scaling=scaling))
    assert config.max_context_tokens == 131072
    assert config.rope.yarn.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


YARN_VARIANTS = [
    {},
    {"truncate": False},
    {"beta_fast": 16, "beta_slow": 2},
    {"attention_factor": 1.25},
    {"mscale": 0.7, "mscale_all_dim": 1.3},
    {"factor": 1.0},
    {"beta_fast": 1, "beta_slow": 1},
]


@pytest.mark.parametrize("extra", YARN_VARIANTS, ids=str)
def test_yarn_frequencies_are_those_of_transformers(extra):
    scaling = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 10240,
    } | extra
    raw = variant(rope_parameters=scaling)
    config = parse_model_config(raw)
    reference = Qwen3Config(
        head_dim=128, max_position_embeddings=40960, rope_parameters=dict(scaling)
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](reference, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(config.rope, 128), expected)
    assert config.rope.yarn.attention_factor == pytest.approx(factor)


def test_the_rotary_table_grows_without_changing_what_it_holds():
    table = RotaryTable(RopeConfig(1e6), 16, torch.device("cpu"))
    positions = torch.tensor([0, 7, 2047])
    cos, sin = table.lookup(positions, 2047)
    far_cos, far_sin = table.lookup(torch.tensor([0, 7, 2047, 9999]), 9999)
    assert torch.equal(far_cos[:3], cos)
    assert torch.equal(far_sin[:3], sin)
    assert far_cos.dtype == torch.float32


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "qwen3"}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "llama"}, "llama"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config: .*gptq",
        ),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "four"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 63}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"eos_token_id": "<|im_end|>"}, "eos_token_id"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(entries, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(variant(**entries)))
    with pytest.raises(ModelLoadError, match=words) as caught:
        load_model_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_config_file_is_named(content, tmp_path):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_missing_config_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load_model_config(tmp_path)


def test_generation_defaults(tmp_path):
    config = parse_model_config(QWEN3_0_6B)
    assert load_generation_defaults(tmp_path, config).eos_token_ids == (151645,)
    path = tmp_path / "generation_config.json"
    path.write_text(
        '{"eos_token_id": [151645, 151643], "temperature": 0.6, "top_k": 20, "top_p": 0.95}'
    )
    found = load_generation_defaults(tmp_path, config)
    assert found.eos_token_ids == (151645, 151643)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.6, 20, 0.95, 0.0)
    path.write_text('{"eos_token_id": 5}')
    assert load_generation_defaults(tmp_path, config).eos_token_ids == (5,)
    path.write_text('{"top_p": "most"}')
    with pytest.raises(ModelLoadError, match=r"generation_config\.json.*top_p"):
        load_generation_defaults(tmp_path, config)
