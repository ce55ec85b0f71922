"""Content addresses of full KV blocks: a digest chain over (parent digest, token ids).

The digest finds a candidate; `blocks.BlockPool` still compares the tokens before it shares a block.
Source of the idea: the hash chain of PagedAttention prefix caching (vLLM, nano-vllm); here the hash
is keyed by a salt at the root, so tenants with different salts never share, and it is stable
across processes.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGEST_BYTES = 16


def root_digest(salt: str, adapter: str = "") -> bytes:
    """The parent of a sequence's first block: all that changes the KV, or who may share it.

    `adapter` is the fingerprint of the LoRA weights that the sequence runs with.
    """
    root = blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"qwen3-kv-root").digest()
    if not adapter:
        return root
    return blake2b(root + adapter.encode(), digest_size=DIGEST_BYTES, person=b"qwen3-lora").digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Address of a full block that follows `parent` and holds exactly `token_ids`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def extend_digests(
    digests: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, count: int
) -> None:
    """Grow the chain of a sequence's full blocks to at least `count`; each is hashed once ever."""
    for index in range(len(digests), count):
        parent = digests[-1] if digests else root
        digests.append(
            block_digest(parent, token_ids[index * block_size : (index + 1) * block_size])
        )
