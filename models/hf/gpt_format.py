"""GPT-2 as transformers stores it: its config.json, names and layouts.

The linear layers are stored (in, out). q, k and v stand side by side in the output of one, each with
all of its heads; here the parts of a head come together.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from models import gpt
from models.hf.harmless import HARMLESS, check_common
from pfx.interop.hf import Fields, Table

_LAYER = "transformer.h.{layers}"
ENTRIES = {
    "tok_embed": "transformer.wte.weight: vocab embed",
    "positions": "transformer.wpe.weight: positions embed",
    "blocks": {
        "attn_norm": {
            "scale": f"{_LAYER}.ln_1.weight: embed",
            "bias": f"{_LAYER}.ln_1.bias: embed",
        },
        "wqkv": f"{_LAYER}.attn.c_attn.weight: embed (qkv heads head_dim)",
        "bqkv": f"{_LAYER}.attn.c_attn.bias: (qkv heads head_dim)",
        "wo": f"{_LAYER}.attn.c_proj.weight: (heads head_dim) embed",
        "bo": f"{_LAYER}.attn.c_proj.bias: embed",
        "mlp_norm": {
            "scale": f"{_LAYER}.ln_2.weight: embed",
            "bias": f"{_LAYER}.ln_2.bias: embed",
        },
        "w_up": f"{_LAYER}.mlp.c_fc.weight: embed mlp",
        "b_up": f"{_LAYER}.mlp.c_fc.bias: mlp",
        "w_down": f"{_LAYER}.mlp.c_proj.weight: mlp embed",
        "b_down": f"{_LAYER}.mlp.c_proj.bias: embed",
    },
    "final_norm": {
        "scale": "transformer.ln_f.weight: embed",
        "bias": "transformer.ln_f.bias: embed",
    },
}


def table(config: gpt.Config) -> Table:
    """Names and layouts of all parameters; older files lack the prefix, and have the masks too."""
    return Table(
        ENTRIES,
        gpt.axes(config),
        config.sizes,
        stored={"vocab": config.vocab_size},
        prefix="transformer.",
        aliases={"lm_head.weight": "transformer.wte.weight"},
        ignored=[r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"],
    )


def read_config(where: str, entries: Mapping[str, Any], ignore: Iterable[str]) -> gpt.Config:
    """Return the model's config; `where` is what errors say comes first.

    Raises:
        pfx.interop.hf.WeightsError: an entry is missing, unknown, or of a model that is not `gpt`.
    """
    fields = Fields(where, entries)
    check_common(fields, "GPT2")
    embed_dim = fields.size("n_embd", 768)
    config = {
        "num_layers": fields.size("n_layer", 12),
        "embed_dim": embed_dim,
        "num_heads": fields.size("n_head", 12),
        "mlp_dim": fields.size("n_inner", 4 * embed_dim),
        "vocab_size": fields.size("vocab_size", 50257),
        "max_seq_len": fields.size("n_positions", 1024),
        "dropout": _dropout(fields),
        "eps": fields.number("layer_norm_epsilon", 1e-5),
        "init_std": fields.number("initializer_range", 0.02),
        "dtype": fields.dtype(),
    }
    fields.expect("activation_function", ["gelu_new", "gelu_pytorch_tanh"])
    fields.expect("tie_word_embeddings", [True])
    fields.expect("scale_attn_weights", [True])
    fields.expect("scale_attn_by_inverse_layer_idx", [False])
    fields.expect("add_cross_attention", [False])
    summary = [name for name in entries if name.startswith("summary_")]
    order = ["reorder_and_upcast_attn", "n_ctx", "gradient_checkpointing"]
    fields.finish(harmless=[*HARMLESS, *summary, *order], ignore=ignore)
    return fields.made(gpt.Config, config)


def _dropout(fields: Fields) -> float:
    """The one rate of the embedding and of both branches; that inside attention does not exist here."""
    embed, residual = fields.rate("embd_pdrop", 0.1), fields.rate("resid_pdrop", 0.1)
    if embed != residual:
        fields.problems.append(
            f"embd_pdrop = {embed}, resid_pdrop = {residual}; one rate is needed"
        )
    if inside := fields.rate("attn_pdrop", 0.1):
        text = f"attn_pdrop = {inside} of config.json is left out: nothing is dropped in attention"
        warnings.warn(text, stacklevel=2)
    return residual


def write_config(config: gpt.Config) -> dict[str, Any]:
    """Return the entries of config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.num_layers,
        "n_embd": config.embed_dim,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "layer_norm_epsilon": config.eps,
        "initializer_range": config.init_std,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }
