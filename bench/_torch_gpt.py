"""The GPT of models/gpt.py as one writes it with torch's modules: whole, or a run of its layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import gpt


class Block(nn.Module):
    """A block as one writes it in torch; heads are what its local columns of qkv make."""

    def __init__(self, config: gpt.Config) -> None:
        super().__init__()
        e = config.embed_dim
        self.head_dim = e // config.num_heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(e), nn.LayerNorm(e)
        self.qkv, self.out = nn.Linear(e, 3 * e), nn.Linear(e, e)
        self.up, self.down = nn.Linear(e, config.mlp_dim), nn.Linear(config.mlp_dim, e)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attn_norm(x))
        q, k, v = qkv.unflatten(-1, (-1, 3, self.head_dim)).transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Model(nn.Module):
    """Layers `layers` of the model: with the first comes the embedding, with the last the head."""

    def __init__(self, config: gpt.Config, layers: range | None = None) -> None:
        super().__init__()
        self.layers = range(config.num_layers) if layers is None else layers
        self.is_first = self.layers.start == 0
        self.is_last = self.layers.stop == config.num_layers
        e = config.embed_dim
        if self.is_first:
            self.tok_embed = nn.Embedding(config.vocab_size, e)
            self.positions = nn.Parameter(torch.empty(config.max_seq_len, e))
        self.blocks = nn.ModuleList(Block(config) for _ in self.layers)
        if self.is_last:
            self.final_norm = nn.LayerNorm(e)
            self.head = nn.Linear(e, config.vocab_size, bias=False)
        if self.is_first and self.is_last:
            self.tie()

    def tie(self) -> None:
        self.head.weight = self.tok_embed.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.tok_embed(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x)) if self.is_last else x


@torch.no_grad()
def model_of(params: gpt.Params, config: gpt.Config, layers: range | None = None) -> Model:
    """A module with the weights of a tree of pfx's."""
    model = Model(config, layers)
    if model.is_first:
        model.tok_embed.weight.copy_(params["tok_embed"])
        model.positions.copy_(params["positions"])
    for i, block in zip(model.layers, model.blocks, strict=True):
        assert isinstance(block, Block)
        fill(block, params["blocks"], i)
    if model.is_last:
        model.head.weight.copy_(params["tok_embed"])
        model.final_norm.weight.copy_(params["final_norm"]["scale"])
        model.final_norm.bias.copy_(params["final_norm"]["bias"])
    return model


def fill(block: Block, tree: gpt.Params, i: int) -> None:
    """Copy layer `i` of the stacked blocks."""
    e = block.out.out_features
    for norm, name in ((block.attn_norm, "attn_norm"), (block.mlp_norm, "mlp_norm")):
        norm.weight.copy_(tree[name]["scale"][i])
        norm.bias.copy_(tree[name]["bias"][i])
    block.qkv.weight.copy_(tree["wqkv"][i].reshape(e, -1).T)
    block.out.weight.copy_(tree["wo"][i].reshape(-1, e).T)
    block.up.weight.copy_(tree["w_up"][i].T)
    block.down.weight.copy_(tree["w_down"][i].T)
    biases = ("bqkv", "bo", "b_up", "b_down")
    for linear, name in zip((block.qkv, block.out, block.up, block.down), biases, strict=True):
        linear.bias.copy_(tree[name][i].reshape(-1))
