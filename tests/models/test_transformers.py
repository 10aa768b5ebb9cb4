"""The reference models compute what transformers computes, given the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pfx
from models import gpt, llama
from models.common import padded_vocab

transformers = pytest.importorskip("transformers")

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
Weights = dict[str, torch.Tensor]

# Odd on purpose: a prime vocabulary, a sequence shorter than the model's, as few powers of two
# as possible.
GPT = gpt.Config(
    num_layers=3, embed_dim=30, num_heads=3, mlp_dim=44, vocab_size=131, max_seq_len=17
)
LLAMA = llama.Config(
    num_layers=3,
    embed_dim=30,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    mlp_dim=44,
    vocab_size=131,
    max_seq_len=4096,
)
# Of the five frequencies of a head, 170 keeps one, interpolates one and divides three.
STRETCHED = replace(LLAMA, rope_scaling=llama.RopeScaling(factor=8.0, original_seq_len=170))
QWEN = replace(LLAMA, qk_norm=True, rope_theta=1e6, eps=1e-6)


def test_gpt2() -> None:
    theirs = transformers.GPT2Config(
        n_layer=GPT.num_layers,
        n_embd=GPT.embed_dim,
        n_head=GPT.num_heads,
        n_inner=GPT.mlp_dim,
        vocab_size=GPT.vocab_size,
        n_positions=GPT.max_seq_len,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        attn_implementation="eager",
    )
    assert_same_model(gpt, GPT, transformers.GPT2LMHeadModel(theirs), gpt_from_hf)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("config", [LLAMA, STRETCHED], ids=["llama3", "llama3.1"])
def test_llama(config: llama.Config, tied: bool) -> None:
    config = replace(config, tied=tied)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_arguments(config)))
    assert_same_model(llama, config, model, llama_from_hf)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_qwen3(tied: bool) -> None:
    config = replace(QWEN, tied=tied)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**llama_arguments(config)))
    assert_same_model(llama, config, model, llama_from_hf)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_qwen2(tied: bool) -> None:
    config = replace(LLAMA, tied=tied, qkv_bias=True, rope_theta=1e6, eps=1e-6)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**llama_arguments(config)))
    assert_same_model(llama, config, model, llama_from_hf)


def assert_same_model(family: Any, config: Any, model: Any, from_hf: Any) -> None:
    """Equal logits, loss and gradients; the mapping is linear, so it maps gradients too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # zero biases would hide a wrong one
            weight.normal_(mean=float("norm" in name or "ln_" in name), std=0.2)
            if "bias" in name:
                weight.normal_(std=0.2)
    tokens = torch.randint(config.vocab_size, (2, 13))
    labels = torch.randint(config.vocab_size, (2, 13)).masked_fill_(torch.rand(2, 13) < 0.3, -100)

    logits = model(tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()

    params = from_hf(config, {name: weight.detach() for name, weight in model.named_parameters()})
    ours = family.apply(params, tokens, config)
    torch.testing.assert_close(ours[..., : config.vocab_size], logits.detach(), **TOLERANCE)
    assert (ours[..., config.vocab_size :] == -torch.inf).all()

    def mean_loss(params: Any) -> torch.Tensor:
        batch = {"tokens": tokens, "labels": labels}
        loss_sum, weight, _ = family.loss_fn(config)(params, batch, None)
        return loss_sum / weight

    grads, value = torch.func.grad_and_value(mean_loss)(params)
    torch.testing.assert_close(value, loss.detach(), **TOLERANCE)
    expected = from_hf(config, {name: weight.grad for name, weight in model.named_parameters()})
    assert pfx.tree.structure(params) == pfx.tree.structure(family.axes(config))
    for (path, grad), reference in zip(
        pfx.tree.flatten_with_path(grads)[0], pfx.tree.leaves(expected), strict=True
    ):
        torch.testing.assert_close(
            grad, reference, **TOLERANCE, msg=lambda text, path=path: f"{path}: {text}"
        )
        assert reference.abs().max() > 1e-4, path  # a gradient that is zero anyway shows nothing


def gpt_from_hf(config: gpt.Config, weights: Weights) -> Any:
    """GPT-2's Conv1D stores (in, out); q, k and v stand side by side in its output."""
    layers, heads = config.num_layers, config.num_heads

    def stack(name: str) -> torch.Tensor:
        return torch.stack([weights[f"transformer.h.{i}.{name}"] for i in range(layers)])

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {"scale": stack(f"{name}.weight"), "bias": stack(f"{name}.bias")}

    return {
        "tok_embed": pad_rows(weights["transformer.wte.weight"]),
        "positions": weights["transformer.wpe.weight"],
        "blocks": {
            "attn_norm": norm("ln_1"),
            "wqkv": stack("attn.c_attn.weight").unflatten(2, (3, heads, -1)).transpose(2, 3),
            "bqkv": stack("attn.c_attn.bias").unflatten(1, (3, heads, -1)).transpose(1, 2),
            "wo": stack("attn.c_proj.weight").unflatten(1, (heads, -1)),
            "bo": stack("attn.c_proj.bias"),
            "mlp_norm": norm("ln_2"),
            "w_up": stack("mlp.c_fc.weight"),
            "b_up": stack("mlp.c_fc.bias"),
            "w_down": stack("mlp.c_proj.weight"),
            "b_down": stack("mlp.c_proj.bias"),
        },
        "final_norm": {
            "scale": weights["transformer.ln_f.weight"],
            "bias": weights["transformer.ln_f.bias"],
        },
    }


def llama_from_hf(config: llama.Config, weights: Weights) -> Any:
    """Linear layers store (out, in)."""
    layers, head_dim = config.num_layers, config.head_dim

    def stack(name: str) -> torch.Tensor:
        return torch.stack([weights[f"model.layers.{i}.{name}.weight"] for i in range(layers)])

    def linear(name: str) -> torch.Tensor:
        return stack(name).transpose(1, 2)

    blocks = {
        "attn_norm": stack("input_layernorm"),
        "wq": linear("self_attn.q_proj").unflatten(2, (-1, head_dim)),
        "wk": linear("self_attn.k_proj").unflatten(2, (-1, head_dim)),
        "wv": linear("self_attn.v_proj").unflatten(2, (-1, head_dim)),
        "wo": linear("self_attn.o_proj").unflatten(1, (-1, head_dim)),
        "mlp_norm": stack("post_attention_layernorm"),
        "w_gate": linear("mlp.gate_proj"),
        "w_up": linear("mlp.up_proj"),
        "w_down": linear("mlp.down_proj"),
    }
    if config.qk_norm:
        blocks["q_norm"] = stack("self_attn.q_norm")
        blocks["k_norm"] = stack("self_attn.k_norm")
    if config.qkv_bias:
        for name in "qkv":
            bias = [weights[f"model.layers.{i}.self_attn.{name}_proj.bias"] for i in range(layers)]
            blocks[f"b{name}"] = torch.stack(bias).unflatten(1, (-1, head_dim))
    params = {
        "tok_embed": pad_rows(weights["model.embed_tokens.weight"]),
        "blocks": blocks,
        "final_norm": weights["model.norm.weight"],
    }
    if not config.tied:
        params["unembed"] = pad_rows(weights["lm_head.weight"])
    return params


def pad_rows(embedding: torch.Tensor) -> torch.Tensor:
    return F.pad(embedding, (0, 0, 0, padded_vocab(len(embedding)) - len(embedding)))


def llama_arguments(config: llama.Config) -> dict[str, Any]:
    """The names that LlamaConfig and Qwen3Config share."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_seq_len,
        }
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied,
        "attn_implementation": "eager",
    }
