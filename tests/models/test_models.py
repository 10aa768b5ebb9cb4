"""Laws that every reference model keeps, by itself and on one device."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pfx
from models import common, gpt, hf, llama, sampling

BATCH, SEQ = 3, 11
GPT = gpt.Config(
    num_layers=2, embed_dim=24, num_heads=3, mlp_dim=40, vocab_size=131, max_seq_len=16
)
LLAMA = llama.Config(
    num_layers=2,
    embed_dim=24,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=40,
    vocab_size=131,
    max_seq_len=16,
)


@dataclass(frozen=True)
class Case:
    """A model file and one of its configs."""

    family: Any
    config: Any

    def params(self, config: Any = None) -> Any:
        """Initial parameters, moved off the zeros and ones that would hide a mistake."""
        params = self.family.init(config or self.config, pfx.random.key(0))
        torch.manual_seed(1)
        return pfx.tree.map(lambda x: x + 0.1 * torch.randn_like(x), params)

    def loss(self, params: Any, batch: Any, key: Any = None) -> Any:
        return self.family.loss_fn(self.config)(params, batch, key)


CASES = {
    "gpt": Case(gpt, GPT),
    "llama": Case(llama, LLAMA),
    "qwen": Case(llama, replace(LLAMA, qk_norm=True, qkv_bias=True, tied=True)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def some_batch(vocab_size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    tokens = torch.randint(vocab_size, (BATCH, SEQ + 1))
    labels = tokens[:, 1:].clone()
    labels[0, :4] = common.IGNORED_LABEL
    return {"tokens": tokens[:, :-1], "labels": labels}


def named_leaves(tree: Any) -> dict[str, Any]:
    return {pfx.tree.path_string(path): leaf for path, leaf in pfx.tree.flatten_with_path(tree)[0]}


# The tree of parameters


def test_axes_describe_every_parameter(case: Case) -> None:
    params, axes = case.params(), case.family.axes(case.config)
    assert pfx.tree.structure(params) == pfx.tree.structure(axes)
    for path, dims in named_leaves(axes).items():
        shape = tuple(case.config.sizes[dim] for dim in dims.split())
        assert named_leaves(params)[path].shape == shape, path
        assert ("layers" in dims) == ("blocks" in path), path
        assert dims.find("layers") <= 0, path


def test_matrices_decay_and_nothing_else_does(case: Case) -> None:
    for path, decays in named_leaves(pfx.optim.decay_mask(case.family.axes(case.config))).items():
        name = path.replace("]", "").replace("['", ".").replace("'", "").split(".")[-1]
        vector = name in ("scale", "bias") or name.startswith("b") or name.endswith("norm")
        assert decays == (not vector), path


def count(family: Any, config: Any) -> int:
    axes = pfx.tree.leaves(family.axes(config))
    return sum(math.prod(config.sizes[dim] for dim in dims.split()) for dims in axes)


@pytest.mark.parametrize(
    ("family", "config", "published"),
    [
        (gpt, gpt.GPT2, 124_439_808),
        (llama, llama.LLAMA3_8B, 8_030_261_248),
        (llama, llama.LLAMA3_70B, 70_553_706_496),
        (llama, llama.QWEN3_0_6B, 596_049_920),
    ],
    ids=["gpt2", "llama3-8b", "llama3-70b", "qwen3-0.6b"],
)
def test_presets_have_the_published_number_of_parameters(
    family: Any, config: Any, published: int
) -> None:
    padding = (common.padded_vocab(config.vocab_size) - config.vocab_size) * config.embed_dim
    assert count(family, config) - padding == published


def test_init_draws_each_stacked_leaf_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    normal = pfx.random.normal

    def counted(key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        keys.append(tuple(key.tolist()))
        return normal(key, *args, **kwargs)

    monkeypatch.setattr(pfx.random, "normal", counted)
    params = case.family.init(case.config, pfx.random.key(3))
    drawn = [path for path, leaf in named_leaves(params).items() if leaf.std() > 0]
    assert len(keys) == len(set(keys)) == len(drawn)
    assert "['tok_embed']" in drawn


def test_init_is_scaled(case: Case) -> None:
    config = replace(case.config, embed_dim=96, mlp_dim=512, num_layers=8)
    params = case.family.init(config, pfx.random.key(0))
    residual_std = config.init_std / math.sqrt(2 * config.num_layers)
    blocks = params["blocks"]
    for name, std in {"w_up": config.init_std, "w_down": residual_std, "wo": residual_std}.items():
        assert blocks[name].std().item() == pytest.approx(std, rel=0.05), name
        assert abs(blocks[name].mean().item()) < 0.05 * std, name
    assert not torch.equal(blocks["w_up"][0], blocks["w_up"][1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_init_has_the_dtype_of_the_config(case: Case, dtype: torch.dtype) -> None:
    params = case.family.init(replace(case.config, dtype=dtype), pfx.random.key(0))
    assert {leaf.dtype for leaf in pfx.tree.leaves(params)} == {dtype}


# The loss contract


def test_loss_is_the_summed_cross_entropy(case: Case) -> None:
    params, batch = case.params(), some_batch(case.config.vocab_size)
    loss_sum, weight, _ = case.loss(params, batch)
    logits = case.family.apply(params, batch["tokens"], case.config)
    logits = logits[..., : case.config.vocab_size].flatten(0, 1)
    expected = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(loss_sum, expected, atol=0, rtol=1e-6)
    assert weight.item() == BATCH * SEQ - 4
    assert loss_sum.dtype == weight.dtype == torch.float32


def test_loss_of_a_batch_is_the_sum_over_its_parts(case: Case) -> None:
    params, batch = case.params(), some_batch(case.config.vocab_size)
    whole = case.loss(params, batch)
    columns = pfx.tree.map(lambda x: x.split(1), batch)
    rows = zip(columns["tokens"], columns["labels"], strict=True)
    parts = [case.loss(params, {"tokens": row, "labels": labels}) for row, labels in rows]
    for i in (0, 1):
        torch.testing.assert_close(sum(part[i] for part in parts), whole[i], atol=0, rtol=1e-6)


def test_nothing_counted_gives_zero_loss_and_exactly_zero_gradients(case: Case) -> None:
    params, batch = case.params(), some_batch(case.config.vocab_size)
    batch["labels"] = torch.full_like(batch["labels"], common.IGNORED_LABEL)

    def mean_loss(params: Any) -> Any:
        loss_sum, weight, _ = case.loss(params, batch)
        return loss_sum / weight.clamp(min=1), weight

    grads, (value, weight) = torch.func.grad_and_value(mean_loss, has_aux=True)(params)
    assert value == 0
    assert weight == 0
    for path, grad in named_leaves(grads).items():
        assert (grad == 0).all(), path


def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient(case: Case) -> None:
    params, batch = case.params(), some_batch(case.config.vocab_size)
    vocab_size = case.config.vocab_size
    logits = case.family.apply(params, batch["tokens"], case.config)
    assert logits.shape == (BATCH, SEQ, 256)
    assert (logits.softmax(-1)[..., vocab_size:] == 0).all()
    grads = torch.func.grad(lambda p: case.loss(p, batch)[0])(params)
    for name in {"tok_embed", "unembed"} & set(grads):
        assert (grads[name][vocab_size:] == 0).all(), name
        assert grads[name][:vocab_size].abs().sum() > 0, name


def test_a_vocabulary_without_padding_is_not_masked() -> None:
    logits = torch.randn(2, 3, 256)
    assert common.mask_padding(logits, 256) is logits


def test_ignored_labels_hide_what_their_tokens_predict(case: Case) -> None:
    params, batch = case.params(), some_batch(case.config.vocab_size)
    batch["labels"][:, 5:] = common.IGNORED_LABEL
    changed = {**batch, "tokens": batch["tokens"].clone()}
    changed["tokens"][:, 5:] = 0
    assert torch.equal(case.loss(params, batch)[0], case.loss(params, changed)[0])


# The function


def test_no_token_sees_a_later_one(case: Case) -> None:
    params, tokens = case.params(), some_batch(case.config.vocab_size)["tokens"]
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % case.config.vocab_size
    before = case.family.apply(params, tokens, case.config)
    after = case.family.apply(params, changed, case.config)
    torch.testing.assert_close(before[:, :6], after[:, :6], atol=1e-6, rtol=0)
    assert ((before - after)[:, 6:, : case.config.vocab_size].abs().amax(-1) > 1e-4).all()


# On CPU torch loops over the examples of its fused attention, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop.*scaled_dot_product:UserWarning")
def test_per_example_gradients(case: Case) -> None:
    params, batch = case.params(), some_batch(case.config.vocab_size)

    def loss(params: Any, example: Any) -> torch.Tensor:
        return case.loss(params, pfx.tree.map(lambda x: x.unsqueeze(0), example))[0]

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, batch)
    whole = torch.func.grad(lambda p: case.loss(p, batch)[0])(params)
    for path, grad in named_leaves(whole).items():
        total = named_leaves(each)[path].sum(0)
        torch.testing.assert_close(total, grad, atol=1e-5, rtol=1e-5, msg=path)


def test_float64_is_not_narrowed(case: Case) -> None:
    config = replace(case.config, dtype=torch.float64)
    params, batch = case.params(config), some_batch(config.vocab_size)
    # The difference quotient is the derivative to 1e-6 only where every operation in between is
    # carried out in float64.
    h = torch.tensor(1e-6, dtype=torch.float64)

    def moved(h: torch.Tensor) -> torch.Tensor:
        return case.loss(pfx.tree.map(lambda x: x + h, params), batch)[0]

    assert moved(h).dtype == torch.float64
    slope = torch.func.grad(moved)(torch.zeros_like(h))
    torch.testing.assert_close((moved(h) - moved(-h)) / (2 * h), slope, atol=0, rtol=1e-6)


def test_bfloat16_sums_its_loss_in_float32(case: Case) -> None:
    config = replace(case.config, dtype=torch.bfloat16)
    params, batch = case.params(config), some_batch(config.vocab_size)
    loss_sum, weight, _ = case.loss(params, batch)
    assert loss_sum.dtype == weight.dtype == torch.float32
    reference = case.loss(pfx.tree.map(lambda x: x.float(), params), batch)[0]
    assert loss_sum.item() == pytest.approx(reference.item(), rel=0.02)


def test_activations_are_named(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name that `pfx.constrain` gets belongs to a dim of one size."""
    sizes = {**case.config.sizes, "batch": BATCH, "seq": SEQ, "tokens": SEQ}
    seen = set()

    def recording(x: torch.Tensor, names: str) -> torch.Tensor:
        assert tuple(x.shape) == tuple(sizes[name] for name in names.split()), names
        seen.add(names)
        return x

    monkeypatch.setattr(pfx, "constrain", recording)
    case.family.apply(case.params(), some_batch(case.config.vocab_size)["tokens"], case.config)
    assert {"batch seq embed", "batch tokens mlp", "batch tokens vocab"} <= seen
    assert any("heads" in names for names in seen)


def test_too_long_a_sequence_is_refused(case: Case) -> None:
    tokens = torch.zeros(2, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="tokens are too long") as error:
        case.family.apply(case.params(), tokens, case.config)
    assert str(error.value).splitlines()[1:] == [
        "  tokens has shape (2, 17) (batch, seq); max_seq_len = 16",
        "  fix: pass tokens[:, -16:], or raise max_seq_len",
    ]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: replace(GPT, num_heads=5), "embed_dim = 24, num_heads = 5; 24 % 5 = 4"),
        (lambda: replace(LLAMA, num_kv_heads=4), "num_heads = 6, num_kv_heads = 4; 6 % 4 = 2"),
        (lambda: replace(LLAMA, head_dim=7), "head_dim = 7, a rotary pair = 2; 7 % 2 = 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match="is not a multiple of") as error:
        build()
    assert text in str(error.value)


# GPT's dropout

DROPPING = replace(GPT, dropout=0.5)


def dropped_logits(config: gpt.Config, seed: int | None) -> torch.Tensor:
    tokens = some_batch(config.vocab_size)["tokens"]
    key = None if seed is None else pfx.random.key(seed)
    return gpt.apply(CASES["gpt"].params(), tokens, config, key=key)


def test_dropout_depends_on_its_key_alone() -> None:
    plain = dropped_logits(GPT, None)
    assert torch.equal(dropped_logits(DROPPING, None), plain)
    assert torch.equal(dropped_logits(GPT, 0), plain)
    assert torch.equal(dropped_logits(DROPPING, 0), dropped_logits(DROPPING, 0))
    assert not torch.equal(dropped_logits(DROPPING, 0), plain)
    assert not torch.equal(dropped_logits(DROPPING, 0), dropped_logits(DROPPING, 1))


def test_dropout_keeps_the_mean() -> None:
    x = torch.full((200, 500), 3.0)
    out = gpt.dropout(x, 0.2, pfx.random.key(0))
    assert set(out.unique().tolist()) == {0.0, 3.75}
    assert (out == 0).float().mean().item() == pytest.approx(0.2, abs=0.01)


def test_every_dropout_draws_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key for the embedding and two for each layer, no two of them equal."""
    embed_key, block_keys = gpt._dropout_keys(pfx.random.key(0), DROPPING)
    assert embed_key is not None
    assert block_keys is not None
    used = [embed_key]

    def recording(x: torch.Tensor, rate: float, key: torch.Tensor) -> torch.Tensor:
        assert rate == DROPPING.dropout
        used.append(key)
        return x

    monkeypatch.setattr(gpt, "dropout", recording)
    weights = pfx.tree.map(lambda x: x[0], CASES["gpt"].params()["blocks"])
    for key in block_keys:
        gpt.block(torch.randn(1, 5, GPT.embed_dim), weights, DROPPING, key)
    assert len({tuple(key.tolist()) for key in used}) == len(used) == 1 + 2 * GPT.num_layers


# Llama's parts


def test_rms_norm_of_bfloat16_rounds_once() -> None:
    x, ones = torch.randn(50, 64).bfloat16(), torch.ones(64).bfloat16()
    exact = F.rms_norm(x.double(), (64,), eps=1e-5)
    error = (llama.rms_norm(x, ones, 1e-5).double() - exact).abs()
    assert (error <= exact.abs() * 2**-8).all()


def test_shared_heads_equal_repeated_weights() -> None:
    """Grouped-query attention is multi-head attention whose k and v weights repeat."""
    case = CASES["qwen"]
    config, params = case.config, case.params()
    group = config.num_heads // config.num_kv_heads
    blocks = dict(params["blocks"])
    for name in ("wk", "wv", "bk", "bv"):
        if name in blocks:
            blocks[name] = blocks[name].repeat_interleave(group, dim=-2)
    tokens = some_batch(config.vocab_size)["tokens"]
    grouped = llama.apply(params, tokens, config)
    full = replace(config, num_kv_heads=config.num_heads)
    repeated = llama.apply({**params, "blocks": blocks}, tokens, full)
    torch.testing.assert_close(grouped, repeated, atol=1e-6, rtol=1e-6)


def test_repeat_heads_repeats_each_in_place() -> None:
    x = torch.randn(2, 3, 5, 4)
    assert torch.equal(llama.repeat_heads(x, 4), x.repeat_interleave(4, dim=1))


def test_rotation_leaves_only_the_distance() -> None:
    """q at m and k at n meet as q and k at distance m - n (Su et al., equation 16)."""
    config = replace(LLAMA, max_seq_len=64)
    table = llama.rotary_table(64, config, torch.zeros((), dtype=torch.float64))
    q, k = torch.randn(2, 1, 1, 1, config.head_dim, dtype=torch.float64).expand(-1, 1, 1, 64, -1)
    scores = (llama.rotate(q, table) @ llama.rotate(k, table).transpose(-1, -2))[0, 0]
    for distance in (-40, 0, 7):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (scores[0, 1:] - scores[0, 0]).abs().max() > 0.1
    assert torch.equal(llama.rotate(q, table)[..., 0, :], q[..., 0, :])


@pytest.mark.parametrize(
    "module", [common, gpt, hf, llama, sampling], ids=lambda module: module.__name__
)
def test_docstring_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
