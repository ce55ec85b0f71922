"""`quantization="int8"`: what it costs in accuracy, and where it is refused."""

from __future__ import annotations

import pytest
import torch

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.loading import load_model
from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.executor import load_executor
from qwen3_asgi.model.quantization import choose_linear
from qwen3_asgi.scheduler.plan import RequestId, Row
from tests.model.checkpoints import VOCAB, write_checkpoint

TEXT = (
    "Why it exists: under a disconnect storm ordinary servers find out that a client is gone only "
    "when they try to send it a token. By then whole prefills have been burnt, the queue is full "
    "of dead requests, and the load gauges that routers and autoscalers read are wrong. "
)


def tiny_logits(dtype, quantization):
    config = EngineConfig(device="cpu", dtype=dtype, quantization=quantization, num_kv_blocks=64)
    loaded = load_model("tiny", config)
    try:
        ids = list(loaded.tokenizer.encode(TEXT))
        row = Row(RequestId("a"), "prefill", ids, 0, list(range(-(-len(ids) // 16))), None)
        return loaded.executor.forward_logits([row])
    finally:
        loaded.executor.close()


def divergence(expected, found):
    """Kullback-Leibler, nats per token."""
    wanted = torch.log_softmax(expected, -1)
    return float((wanted.exp() * (wanted - torch.log_softmax(found, -1))).sum(-1).mean())


def test_eight_bits_cost_a_trained_model_about_what_bfloat16_does():
    exact = tiny_logits("float32", None)
    quantized, halved = tiny_logits("float32", "int8"), tiny_logits("bfloat16", None)
    assert not torch.equal(exact, quantized)
    assert 0 < divergence(exact, quantized) < 3 * divergence(exact, halved)
    assert float((exact.argmax(-1) == quantized.argmax(-1)).float().mean()) > 0.9


def test_other_devices_are_refused_and_told_what_there_is():
    with pytest.raises(ModelLoadError, match=r"CPU only, the device is cuda:0; .* fp8"):
        choose_linear("int8", torch.device("cuda:0"))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="quantization must be 'int8' or None, got 'int4'"):
        EngineConfig(quantization="int4")  # type: ignore[arg-type]


def test_kept_blocks_are_not_those_of_the_whole_weights(tmp_path):
    """A file of KV blocks that was written with other weights would be taken for one's own."""
    folder = write_checkpoint(tmp_path / "model", "tied")
    found = []
    for number, quantization in enumerate((None, None, "int8")):
        path = tmp_path / f"kv-{number}"
        config = EngineConfig(
            device="cpu",
            num_kv_blocks=8,
            kv_file=str(path),
            kv_file_gib=0.001,
            quantization=quantization,
        )
        executor = load_executor(folder, config, owned_token_ids=VOCAB)
        executor.close()
        found.append(path.read_bytes())
    assert found[0] == found[1] != found[2]
