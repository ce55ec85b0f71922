"""A checkpoint's weights as a GGUF file, so that llama.cpp computes with the same ones.

Without a tokenizer: it is asked for steps on token ids, never for text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, path: Path) -> None:
    """Write the weights of a checkpoint folder, in bfloat16, to `path`; norms in float32.

    Raises:
        ValueError: the package `gguf` is missing, or the weights are in another type.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ValueError("writing GGUF needs a package: pip install gguf") from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer: Any = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - the file is no mapping
                _add(writer, gguf, name, tensors.get_tensor(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, gguf: Any, name: str, tensor: Any) -> None:
    if tensor.dtype != torch.bfloat16:
        raise ValueError(f"{name} is {tensor.dtype}; only checkpoints in bfloat16 are written")
    if tensor.dim() == 1:
        writer.add_tensor(_named(name), tensor.float().numpy())
        return
    raw = tensor.contiguous().view(torch.uint8).numpy()
    writer.add_tensor(_named(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _named(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, inner = name.split(".", 3)
    return f"blk.{layer}.{INNER[inner.removesuffix('.weight')]}.weight"


def _rope_theta(config: dict[str, Any]) -> float:
    return float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
