"""Random weights for the demo's checkpoints, by architecture: same configuration, same bytes.

Scales are chosen per matrix so that activations neither vanish nor blow up: a matrix with *n*
inputs gets ``gain / sqrt(n)``, which keeps the size of a normalised input times ``gain``.
``_ATTENTION_GAIN`` sets how sharp attention is: scores have a spread of about its square.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_SEED = 20_260_101

# Spread of attention scores about 2: of 1,000 positions a head listens to some ten or twenty.
_ATTENTION_GAIN = 1.5

# Each half of a layer (attention, MLP) writes up to twice what the residual stream holds by then.
# So the last layers decide the logits, and a small difference grows from layer to layer instead of
# being diluted. A deep model grows more slowly: 4096 in all is well inside bfloat16.
_GROWTH = 2.0
_TOTAL_GROWTH = 4096.0


class _Weights:
    """Tensors by name, drawn one after the other from one generator."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.is_gemma = config["model_type"] == "gemma3_text"
        self.tensors: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator().manual_seed(_SEED)
        halves = 2 * config["num_hidden_layers"]
        self._growth = min(_GROWTH, _TOTAL_GROWTH ** (1 / halves))
        self._output_gain = 1.0

    def random(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Add a matrix that maps *columns* unit inputs to *rows* outputs of size *gain*."""
        values = torch.randn(rows, columns, generator=self._generator)
        values *= gain / math.sqrt(columns)
        self.tensors[name] = values.to(torch.bfloat16)

    def output_gain(self) -> float:
        """Return the gain of the next matrix that writes into the residual stream.

        One for Gemma, which normalises what a half-layer writes: there a norm has the gain.
        """
        return 1.0 if self.is_gemma else self.next_gain()

    def next_gain(self) -> float:
        """Return the size of what the next half-layer writes."""
        self._output_gain *= self._growth
        return self._output_gain

    def constant(self, name: str, size: int, value: float, dtype: torch.dtype) -> None:
        """Add a vector of *size* times *value*."""
        self.tensors[name] = torch.full((size,), value, dtype=dtype)

    def norm(self, name: str, size: int, gain: float = 1.0) -> None:
        """Add the weight of a norm that scales by *gain* (Gemma stores the weight minus one)."""
        offset = 1.0 if self.is_gemma else 0.0
        self.constant(name, size, gain - offset, torch.bfloat16)

    def mlp(self, prefix: str, inner: int, gain: float) -> None:
        """Add a gated MLP with *inner* features that writes with *gain*."""
        hidden = self.config["hidden_size"]
        self.random(f"{prefix}gate_proj.weight", inner, hidden, 1.5)
        self.random(f"{prefix}up_proj.weight", inner, hidden, 1.5)
        self.random(f"{prefix}down_proj.weight", hidden, inner, gain)


def make_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return every weight that a model of *config* has, in bfloat16 (router bias: float32).

    Args:
        config: content of ``config.json``; ``model_type`` is ``llama``, ``gemma3_text`` or
            ``deepseek_v3``.

    Returns:
        Tensors by the names of the architecture's checkpoints. The same *config* gives the same
        bytes.

    Raises:
        ValueError: *config* is of another model type.
    """
    makers = {
        "llama": _attention,
        "gemma3_text": _attention,
        "deepseek_v3": _latent_attention,
    }
    kind = config["model_type"]
    if kind not in makers:
        raise ValueError(f"model_type must be one of {', '.join(makers)}; got {kind}")
    weights = _Weights(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    # Gemma multiplies embeddings by sqrt(hidden) and uses the same matrix for its logits.
    weights.random("model.embed_tokens.weight", vocab, hidden, 1.0)
    if not config["tie_word_embeddings"]:
        weights.random("lm_head.weight", vocab, hidden, 4.0)
    weights.norm("model.norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        makers[kind](weights, f"{prefix}self_attn.")
        if layer >= config.get("first_k_dense_replace", config["num_hidden_layers"]):
            _experts(weights, f"{prefix}mlp.")
        else:
            weights.mlp(f"{prefix}mlp.", config["intermediate_size"], weights.output_gain())
        weights.norm(f"{prefix}input_layernorm.weight", hidden)
        if weights.is_gemma:
            weights.norm(f"{prefix}post_attention_layernorm.weight", hidden, weights.next_gain())
            weights.norm(f"{prefix}pre_feedforward_layernorm.weight", hidden)
            weights.norm(f"{prefix}post_feedforward_layernorm.weight", hidden, weights.next_gain())
        else:
            weights.norm(f"{prefix}post_attention_layernorm.weight", hidden)
    return weights.tensors


def _attention(weights: _Weights, prefix: str) -> None:
    """Add grouped-query attention."""
    config = weights.config
    hidden, head = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    weights.random(f"{prefix}q_proj.weight", queries, hidden, _ATTENTION_GAIN)
    weights.random(f"{prefix}k_proj.weight", keys, hidden, _ATTENTION_GAIN)
    weights.random(f"{prefix}v_proj.weight", keys, hidden)
    weights.random(f"{prefix}o_proj.weight", hidden, queries, weights.output_gain())
    if weights.is_gemma:
        # Queries and keys are normalised: the norms carry the gain.
        for name in ("q_norm", "k_norm"):
            weights.norm(f"{prefix}{name}.weight", head, _ATTENTION_GAIN)


def _latent_attention(weights: _Weights, prefix: str) -> None:
    """Add DeepSeek's attention over latent rows."""
    config = weights.config
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query_rank, rank = config["q_lora_rank"], config["kv_lora_rank"]
    rope, plain, value = (
        config["qk_rope_head_dim"],
        config["qk_nope_head_dim"],
        config["v_head_dim"],
    )
    weights.random(f"{prefix}q_a_proj.weight", query_rank, hidden)
    weights.norm(f"{prefix}q_a_layernorm.weight", query_rank)
    weights.random(f"{prefix}q_b_proj.weight", heads * (plain + rope), query_rank, _ATTENTION_GAIN)
    weights.random(f"{prefix}kv_a_proj_with_mqa.weight", rank + rope, hidden, _ATTENTION_GAIN)
    weights.norm(f"{prefix}kv_a_layernorm.weight", rank)
    weights.random(f"{prefix}kv_b_proj.weight", heads * (plain + value), rank, _ATTENTION_GAIN)
    weights.random(f"{prefix}o_proj.weight", hidden, heads * value, weights.output_gain())


def _experts(weights: _Weights, prefix: str) -> None:
    """Add a router, its experts and the shared expert."""
    config = weights.config
    count, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    weights.random(f"{prefix}gate.weight", count, config["hidden_size"])
    gain = weights.output_gain()
    weights.constant(f"{prefix}gate.e_score_correction_bias", count, 0.0, torch.float32)
    for expert in range(count):
        weights.mlp(f"{prefix}experts.{expert}.", inner, gain)
    weights.mlp(f"{prefix}shared_experts.", inner * config["n_shared_experts"], gain)
