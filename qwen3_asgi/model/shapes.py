"""The six dense Qwen3 models by name: their configuration, without a folder or a download.

Sizes are those of the `config.json` files that Qwen published with the weights.
"""

from __future__ import annotations

from typing import NamedTuple

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.config import GenerationDefaults, ModelConfig
from qwen3_asgi.model.rope_config import RopeConfig

EOS_TOKEN_IDS = (151645, 151643)
# Of the hybrid models' generation_config.json: sampling costs what it costs with real weights.
DEFAULTS = GenerationDefaults(EOS_TOKEN_IDS, temperature=0.6, top_k=20, top_p=0.95)


class _Size(NamedTuple):
    hidden: int
    layers: int
    heads: int
    intermediate: int
    tied: bool


_SIZES = {
    "Qwen3-0.6B": _Size(1024, 28, 16, 3072, True),
    "Qwen3-1.7B": _Size(2048, 28, 16, 6144, True),
    "Qwen3-4B": _Size(2560, 36, 32, 9728, True),
    "Qwen3-8B": _Size(4096, 36, 32, 12288, False),
    "Qwen3-14B": _Size(5120, 40, 40, 17408, False),
    "Qwen3-32B": _Size(5120, 64, 64, 25600, False),
}


def named_shape(name: str) -> ModelConfig:
    """Return the configuration of `"Qwen3-0.6B"` and the like; `"Qwen/"` in front may be there.

    Raises:
        ModelLoadError: there is no such model; the message lists those there are.
    """
    size = _SIZES.get(name.removeprefix("Qwen/"))
    if size is None:
        raise ModelLoadError(
            f"load_format='dummy': {name!r} is neither a folder nor one of {', '.join(_SIZES)}"
        )
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_layers=size.layers,
        num_heads=size.heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40_960,
        tie_word_embeddings=size.tied,
        rope=RopeConfig(1_000_000.0),
        dtype="bfloat16",
        eos_token_ids=EOS_TOKEN_IDS,
    )
