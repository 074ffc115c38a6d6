"""Checkpoints the demo writes for itself: nothing is downloaded, no tokenizer is needed.

Each is a real model in the format of its architecture with random weights. The weights are not
small noise: a model whose attention is flat answers every prompt with the same few tokens, and
then equal tokens prove nothing. Here attention scores have a spread of about two, so that a
position listens to a handful of others, and a few layers carry a change at the first prompt
token into every output token. ``dependence.py`` checks that on the running engine.

    ==========  ==================  ==============================================================
    name        architecture        what its KV cache is
    ==========  ==================  ==============================================================
    ``llama``   Llama               one group, 2 KV heads shared by 4 query heads
    ``mla``     DeepSeek-V3 (yarn)  one group of latent rows, 512 + 64 numbers a token
    ``hybrid``  Gemma 3             three groups, full and sliding-window, over the same memory
    ``slow``    Llama               one group; slow on purpose, for prompts whose prefill takes long
    ==========  ==================  ==============================================================

A checkpoint is a folder named after its content (recipe version and a digest of the
configuration). It is written beside its final name and renamed, so a folder that exists is whole,
and two processes that make the same one at once both succeed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RECIPE_VERSION = 1
"""Part of every folder's name; goes up when the weights of an unchanged configuration change."""

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """What the demo has to know about one of its models.

    Attributes:
        name: as on the command line.
        label: for the table.
        config: content of ``config.json``.
        dtype: the engine's dtype. float32 for all of them: CPUs without bfloat16 instructions are
            ten times slower in it, and for ``mla`` the engine computes a suffix behind cached
            latent rows by another formula than a whole prompt, so that in bfloat16 the rounding
            alone may change a token.
        block_size: tokens per block asked of the engine; ``None`` leaves it to the engine.
        prompt_tokens: length of the demo's prompts, tokens.
    """

    name: str
    label: str
    config: dict[str, Any]
    dtype: str
    block_size: int | None
    prompt_tokens: int

    @property
    def vocab_size(self) -> int:
        """Token ids are ``0 .. vocab_size - 1``."""
        return int(self.config["vocab_size"])

    @property
    def folder_name(self) -> str:
        """Name of its folder in the cache: changes when anything in the folder would."""
        text = json.dumps([RECIPE_VERSION, self.config], sort_keys=True)
        return f"{self.name}-{RECIPE_VERSION}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _config(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """Return a ``config.json`` of *architecture* with what all of ours share."""
    shared: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    return {**shared, **fields}


CHECKPOINTS: dict[str, Checkpoint] = {
    checkpoint.name: checkpoint
    for checkpoint in (
        Checkpoint(
            name="llama",
            label="Llama (GQA)",
            dtype="float32",
            block_size=32,
            prompt_tokens=1000,
            config=_config(
                "LlamaForCausalLM",
                "llama",
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                hidden_act="silu",
            ),
        ),
        Checkpoint(
            name="mla",
            label="DeepSeek-V3 (MLA)",
            dtype="float32",
            block_size=None,
            prompt_tokens=1000,
            config=_config(
                "DeepseekV3ForCausalLM",
                "deepseek_v3",
                hidden_size=256,
                intermediate_size=512,
                moe_intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                hidden_act="silu",
                q_lora_rank=128,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                n_routed_experts=8,
                n_shared_experts=1,
                num_experts_per_tok=2,
                first_k_dense_replace=2,
                moe_layer_freq=1,
                norm_topk_prob=True,
                routed_scaling_factor=1.0,
                scoring_func="sigmoid",
                topk_method="noaux_tc",
                n_group=2,
                topk_group=1,
                num_nextn_predict_layers=0,
                # The engine's CPU rotary kernel is wrong for this model without a scaling; yarn
                # takes another path.
                rope_scaling={
                    "type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 2048,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 0.707,
                    "mscale_all_dim": 0.707,
                },
            ),
        ),
        Checkpoint(
            name="hybrid",
            label="Gemma 3 (hybrid)",
            dtype="float32",
            block_size=32,
            prompt_tokens=1000,
            config=_config(
                "Gemma3ForCausalLM",
                "gemma3_text",
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=6,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                rms_norm_eps=1e-6,
                rope_theta=1000000.0,
                rope_local_base_freq=10000.0,
                sliding_window=64,
                sliding_window_pattern=3,
                hidden_activation="gelu_pytorch_tanh",
                query_pre_attn_scalar=64,
                tie_word_embeddings=True,
            ),
        ),
        Checkpoint(
            name="slow",
            label="Llama, long prompt",
            dtype="float32",
            block_size=32,
            prompt_tokens=4000,
            config=_config(
                "LlamaForCausalLM",
                "llama",
                hidden_size=512,
                intermediate_size=2048,
                num_hidden_layers=14,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                hidden_act="silu",
            ),
        ),
    )
}


def cache_folder() -> Path:
    """Return where checkpoints are kept: ``$KVFERRY_CACHE_DIR``, else the user's cache folder."""
    own = os.environ.get("KVFERRY_CACHE_DIR")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kvferry"


def ensure_checkpoint(checkpoint: Checkpoint, root: Path | None = None) -> Path:
    """Return the folder of *checkpoint*, writing it first if it is not there.

    Args:
        checkpoint: one of ``CHECKPOINTS``.
        root: folder that holds the checkpoints; ``cache_folder()`` by default.

    Returns:
        A folder that an engine can be given as its model.

    Raises:
        OSError: the folder cannot be written. Nothing half-written is left under the final name.
    """
    base = cache_folder() if root is None else root
    folder = base / checkpoint.folder_name
    if folder.is_dir():
        return folder
    base.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{checkpoint.folder_name}-", dir=base))
    try:
        _write(checkpoint, draft)
        # mkdtemp makes a folder for its owner alone; a cache is readable as the umask allows.
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            # Another process was first; what it published is the same.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(checkpoint: Checkpoint, folder: Path) -> None:
    """Write configuration and weights of *checkpoint* into the existing *folder*."""
    from safetensors.torch import save_file

    from .weights import make_weights

    config = checkpoint.config
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(
        json.dumps({"_from_model_config": True, **ids}, indent=1)
    )
    tensors: dict[str, torch.Tensor] = make_weights(config)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
