"""Llama, Qwen2 and Qwen3 as transformers stores them: their config.json, names and layouts.

Linear layers are stored (out, in).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from models import llama
from models.hf.harmless import HARMLESS, check_common
from pfx.interop.hf import Fields, Table, WeightsError

_LAYER = "model.layers.{layers}"
_BLOCKS = {
    "attn_norm": f"{_LAYER}.input_layernorm.weight: embed",
    "wq": f"{_LAYER}.self_attn.q_proj.weight: (heads head_dim) embed",
    "wk": f"{_LAYER}.self_attn.k_proj.weight: (kv_heads head_dim) embed",
    "wv": f"{_LAYER}.self_attn.v_proj.weight: (kv_heads head_dim) embed",
    "wo": f"{_LAYER}.self_attn.o_proj.weight: embed (heads head_dim)",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm.weight: embed",
    "w_gate": f"{_LAYER}.mlp.gate_proj.weight: mlp embed",
    "w_up": f"{_LAYER}.mlp.up_proj.weight: mlp embed",
    "w_down": f"{_LAYER}.mlp.down_proj.weight: embed mlp",
}
_QKV_BIAS = {
    "bq": f"{_LAYER}.self_attn.q_proj.bias: (heads head_dim)",
    "bk": f"{_LAYER}.self_attn.k_proj.bias: (kv_heads head_dim)",
    "bv": f"{_LAYER}.self_attn.v_proj.bias: (kv_heads head_dim)",
}
_QK_NORM = {
    "q_norm": f"{_LAYER}.self_attn.q_norm.weight: head_dim",
    "k_norm": f"{_LAYER}.self_attn.k_norm.weight: head_dim",
}


def table(config: llama.Config) -> Table:
    """Names and layouts of all parameters."""
    norm = _QK_NORM if config.qk_norm else {}
    entries = {
        "tok_embed": "model.embed_tokens.weight: vocab embed",
        "blocks": _BLOCKS | norm | (_QKV_BIAS if config.qkv_bias else {}),
        "final_norm": "model.norm.weight: embed",
    }
    if not config.tied:
        entries["unembed"] = "lm_head.weight: vocab embed"
    return Table(
        entries,
        llama.axes(config),
        config.sizes,
        stored={"vocab": config.vocab_size},
        prefix="model.",
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if config.tied else {},
        ignored=[r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"],
    )


def read_config(where: str, entries: Mapping[str, Any], ignore: Iterable[str]) -> llama.Config:
    """Return the model's config; `where` is what errors say comes first.

    Raises:
        pfx.interop.hf.WeightsError: an entry is missing, unknown, or of a model that is not `llama`.
    """
    fields = Fields(where, entries)
    family = str(entries.get("model_type")).capitalize()
    qwen = family.startswith("Qwen")
    check_common(fields, family)
    embed_dim, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = 32 if qwen and "num_key_value_heads" not in entries else num_heads
    theta, scaling = _rope(fields)
    config = {
        "num_layers": fields.size("num_hidden_layers"),
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": fields.size("num_key_value_heads", kv_heads),
        "head_dim": fields.size("head_dim", _head_dim(family, embed_dim, num_heads)),
        "mlp_dim": fields.size("intermediate_size"),
        "vocab_size": fields.size("vocab_size"),
        "max_seq_len": fields.size("max_position_embeddings"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "qk_norm": family == "Qwen3",
        "qkv_bias": family == "Qwen2",
        "tied": fields.flag("tie_word_embeddings", default=False),
        "eps": fields.number("rms_norm_eps", 1e-6),
        "init_std": fields.number("initializer_range", 0.02),
        "dtype": fields.dtype(),
    }
    fields.expect("hidden_act", ["silu", "swish"])
    fields.expect("attention_bias", [False])
    fields.expect("mlp_bias", [False])
    _check_windows(fields, qwen)
    if rate := fields.rate("attention_dropout", 0.0):
        text = f"attention_dropout = {rate} of config.json is left out: these models drop nothing"
        warnings.warn(text, stacklevel=2)
    fields.finish(harmless=[*HARMLESS, "pretraining_tp", "max_window_layers"], ignore=ignore)
    return fields.made(llama.Config, config)


def _head_dim(family: str, embed_dim: int, num_heads: int) -> int:
    """The size of a head where it is not said."""
    return 128 if family == "Qwen3" else max(embed_dim // num_heads, 1)


def _check_windows(fields: Fields, qwen: bool) -> None:  # noqa: FBT001
    """Every layer sees all tokens before it."""
    fields.expect("use_sliding_window", [False])
    if qwen:
        fields.take("sliding_window", None)  # means nothing unless it is used
    else:
        fields.expect("sliding_window", [])
    kinds = fields.take("layer_types", None) or []
    other = sorted({str(kind) for kind in kinds} - {"full_attention"})
    if other:
        fields.problems.append(f"layer_types has {', '.join(other)}; supported: full_attention")


def _rope(fields: Fields) -> tuple[float, llama.RopeScaling | None]:
    """The base and the stretch of the rotary frequencies, in the newer form or in the older one."""
    new, old = fields.group("rope_parameters"), fields.group("rope_scaling")
    if new.entries and old.entries:
        fields.problems.append("rope_parameters and rope_scaling are both there; one is needed")
    theta = fields.number("rope_theta", 10_000.0)
    rope = new if new.entries else old
    theta = rope.number("rope_theta", theta)
    kind = rope.take("rope_type", None) or rope.entries.get("type") or "default"
    rope.take("type", None)
    rope.expect("partial_rotary_factor", [1.0, 1])
    if kind == "default":
        return theta, None
    if kind != "llama3":
        fields.problems.append(f"the rope type {kind!r}; supported: 'default', 'llama3'")
        rope.entries.clear()
        return theta, None
    return theta, llama.RopeScaling(
        factor=rope.number("factor"),
        original_seq_len=rope.size("original_max_position_embeddings"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
    )


def write_config(config: llama.Config) -> dict[str, Any]:
    """Return the entries of config.json; the rotary ones in the form that all versions read.

    Raises:
        WeightsError: transformers has no such model.
    """
    if config.qk_norm and config.qkv_bias:
        what = "qk_norm and qkv_bias are both there, and transformers has no such model."
        raise WeightsError(f"{config}: {what}")
    family = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
    entries: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.eps,
        "initializer_range": config.init_std,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
    }
    if (scaling := config.rope_scaling) is not None:
        entries["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_seq_len,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    return entries
