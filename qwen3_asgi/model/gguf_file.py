"""A checkpoint's weights as a GGUF file, so that llama.cpp computes with the same ones.

Without a tokenizer: it is asked for steps on token ids, never for text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from qwen3_asgi.model.checkpoint import Checkpoint
from qwen3_asgi.model.config import load_model_config
from qwen3_asgi.model.weights import tensor_shapes

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
        ModelLoadError: this is no checkpoint of a dense Qwen3 model.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ValueError("writing GGUF needs a package: pip install gguf") from error
    config, checkpoint = load_model_config(folder), Checkpoint(folder)
    writer: Any = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name in tensor_shapes(config):
        _add(writer, gguf, name, checkpoint.read(name))
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
