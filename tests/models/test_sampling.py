"""Generation: greedy as in transformers, draws from the right distribution, the same on any mesh."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pfx
from models import gpt, llama, sampling
from models.sampling import generate
from pfx import P

CONFIG = gpt.Config(
    num_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, vocab_size=37, max_seq_len=24
)
PROMPT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@functools.cache
def params() -> Any:
    made = gpt.init(CONFIG, pfx.random.key(0))
    torch.manual_seed(0)
    return pfx.tree.map(lambda x: x + 0.3 * torch.randn_like(x), made)


def write(length: int, seed: int | None = 1, **settings: Any) -> torch.Tensor:
    key = None if seed is None else pfx.random.key(seed)
    given_params = settings.pop("params", None) or params()
    return generate(gpt.apply, given_params, CONFIG, PROMPT, length, key, **settings)


def test_greedy_is_that_of_transformers(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from models import hf

    hf.save(tmp_path / "out", params(), CONFIG)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = model.generate(
        PROMPT, max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=0,
        attention_mask=torch.ones_like(PROMPT),
    )  # fmt: skip
    ours = write(15, seed=None, temperature=0.0)
    assert torch.equal(ours, theirs)
    assert len(ours[0].unique()) > 4  # not one token again and again


def test_llama_writes_too() -> None:
    config = llama.Config(
        num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=8,
        vocab_size=11, max_seq_len=6,
    )  # fmt: skip
    made = llama.init(config, pfx.random.key(0))
    out = generate(llama.apply, made, config, PROMPT, 4, pfx.random.key(0))
    assert out.shape == (2, 9)
    assert ((out >= 0) & (out < 11)).all()


def test_each_token_is_chosen_from_the_logits_of_what_is_seen() -> None:
    """By hand, without padding; beyond the window of 24 the earliest tokens are not seen."""
    out = write(22, temperature=0.7, top_k=5)
    for position in (5, 6, 7, 15, 23, 24, 25, 26):
        seen = out[:, max(0, position - 24) : position]
        logits = gpt.apply(params(), seen, CONFIG)[:, -1]
        key = pfx.random.fold_in(pfx.random.key(1), position)
        chosen = sampling.choose(logits, key, temperature=0.7, top_k=5)
        assert torch.equal(chosen, out[:, position]), position


def test_a_longer_text_begins_as_a_shorter_one() -> None:
    assert torch.equal(write(12)[:, :11], write(6))
    assert not torch.equal(write(12), write(12, seed=2))


@pytest.mark.parametrize(
    "plan", [pfx.Plan(dp=2, tp=2, zero=3), pfx.Plan(pp=2, tp=2, microbatches=2)], ids=["zero", "pp"]
)
def test_any_mesh_writes_the_same(plan: pfx.Plan) -> None:
    mesh = plan.mesh("simulated")
    specs = plan.compute_specs(gpt.axes(CONFIG), params(), mesh, [])
    placed = pfx.device_put(params(), mesh, specs)
    compiled = functools.partial(pfx.jit, mesh=mesh, out_specs=P(), names=plan.logical_names)
    settings = {"temperature": 0.8, "top_k": 9, "top_p": 0.9}
    out = write(6, params=placed, compile=compiled, **settings)
    assert torch.equal(out, write(6, **settings))


def test_after_a_stop_comes_nothing_else() -> None:
    free = write(20)
    stop = int(free[0, 8])
    out = write(20, stop=stop)
    for row, full in zip(out, free, strict=True):
        ends = [i for i in range(5, 25) if full[i] == stop]
        end = ends[0] if ends else 24
        assert torch.equal(row[: end + 1], full[: end + 1])
        assert (row[end + 1 :] == stop).all()
    assert (out[0, 9:] == stop).all()


# Among which tokens


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=9),
    st.sampled_from([None, 1, 2, 3, 5, 20]),
    st.sampled_from([None, 0.01, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0]),
)
@settings(max_examples=300)  # a few numbers each
def test_the_most_probable_tokens(
    logits: list[int], top_k: int | None, top_p: float | None
) -> None:
    """The definitions: no kept token is less probable than one that is not; as few as it takes."""
    values = torch.tensor(logits, dtype=torch.float64)
    kept = sampling.most_probable(values, top_k, top_p)
    inside = kept > -torch.inf
    assert torch.equal(kept[inside], values[inside])
    assert inside.any()
    if not inside.all():
        assert values[inside].min() > values[~inside].max()
    ties = values == values[inside].min()
    k = len(logits) if top_k is None else min(top_k, len(logits))
    among = values >= values.sort(descending=True).values[k - 1]
    assert not (inside & ~among).any()
    shares = torch.where(among, values, -torch.inf).softmax(0)
    p = 1.0 if top_p is None else top_p
    assert shares[inside].sum() >= p - 1e-9
    assert shares[inside & ~ties].sum() < p or not (inside & ~ties).any()


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    drawn = sampling.choose(logits, pfx.random.key(3), temperature=0.5, top_k=3)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    expected = torch.tensor([0.0, 2.0, 4.0, -torch.inf]).softmax(0)
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"seed": None}, "key = None"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"generate: {text}"):
        write(1, **settings)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"generate: prompt = \(1, 0\)"):
        generate(gpt.apply, params(), CONFIG, torch.zeros(1, 0), 1, pfx.random.key(0))


def test_nothing_more_is_the_prompt() -> None:
    assert torch.equal(write(0), PROMPT)
    assert list(itertools.chain(*PROMPT.tolist())) == [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
