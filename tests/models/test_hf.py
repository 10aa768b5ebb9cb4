"""Weights in and out of the files of transformers: equal logits, equal bits, and only the slices needed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pfx
from models import gpt, hf, llama
from pfx import Deal, P
from pfx.interop.hf import WeightsError, files
from pfx.testing import specs as draw_specs
from tests.models.test_transformers import gpt_from_hf, llama_arguments, llama_from_hf

safetensors_torch = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

GPT = gpt.Config(num_layers=3, embed_dim=12, num_heads=2, mlp_dim=20, vocab_size=131, max_seq_len=9)
LLAMA = llama.Config(
    num_layers=3, embed_dim=12, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=20,
    vocab_size=131, max_seq_len=4096,
)  # fmt: skip
STRETCHED = replace(LLAMA, rope_scaling=llama.RopeScaling(factor=8.0, original_seq_len=170))
QWEN = replace(LLAMA, qk_norm=True, rope_theta=1e6, eps=1e-6)
MODELS = {
    "gpt2": GPT,
    "llama": LLAMA,
    "llama-tied": replace(LLAMA, tied=True),
    "llama3.1": STRETCHED,
    "qwen2": replace(LLAMA, qkv_bias=True, rope_theta=1e6, eps=1e-6),
    "qwen3": QWEN,
    "qwen3-tied": replace(QWEN, tied=True),
}


@pytest.fixture(params=MODELS)
def config(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


def theirs_of(config: Any) -> Any:
    """A model of transformers with the sizes of a config, and weights that hide nothing."""
    if isinstance(config, gpt.Config):
        made = transformers.GPT2Config(
            n_layer=config.num_layers, n_embd=config.embed_dim, n_head=config.num_heads,
            n_inner=config.mlp_dim, vocab_size=config.vocab_size, n_positions=config.max_seq_len,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(made)
    elif config.qkv_bias:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**llama_arguments(config)))
    elif config.qk_norm:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**llama_arguments(config)))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_arguments(config)))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def some_tokens(config: Any) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))


def random_bits(config: Any, seed: int, dtype: torch.dtype) -> Any:
    """Parameters with any bits at all (-0.0, NaN, infinities), zero where they are padding."""
    generator = torch.Generator().manual_seed(seed)
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.iinfo(ints)

    def draw(dims: str) -> torch.Tensor:
        shape = [config.sizes[dim] for dim in dims.split()]
        bits = torch.randint(info.min, info.max, shape, generator=generator, dtype=ints)
        return bits.view(dtype)

    params = pfx.tree.map(draw, hf.family_of(config).axes(config))
    for name in {"tok_embed", "unembed"} & set(params):
        params[name][config.vocab_size :] = 0
    return params


def assert_same_bits(found: Any, expected: Any) -> None:
    assert pfx.tree.structure(found) == pfx.tree.structure(expected)
    for (path, a), b in zip(
        pfx.tree.flatten_with_path(found)[0], pfx.tree.leaves(expected), strict=True
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), path


# With transformers


def test_their_files_load_with_equal_logits(config: Any, tmp_path: Path) -> None:
    model = theirs_of(config)
    model.save_pretrained(tmp_path)
    found, params = hf.load(tmp_path)
    assert found == config
    oracle = gpt_from_hf if isinstance(config, gpt.Config) else llama_from_hf
    assert_same_bits(params, oracle(config, weights_of(model)))
    tokens = some_tokens(config)
    ours = hf.family_of(config).apply(params, tokens, found)
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(ours[..., : config.vocab_size], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_shard_bytes", [2**40, 3000])
def test_our_files_load_there_with_equal_logits(
    config: Any, max_shard_bytes: int, tmp_path: Path
) -> None:
    family = hf.family_of(config)
    params = family.init(config, pfx.random.key(0))
    params = pfx.tree.map(lambda x: x + 0.1 * torch.randn_like(x), params)
    hf.save(tmp_path / "out", params, config, max_shard_bytes=max_shard_bytes)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = some_tokens(config)
    with torch.no_grad():
        theirs = model(tokens).logits
    ours = family.apply(params, tokens, config)[..., : config.vocab_size]
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    assert model.dtype == torch.float32
    written = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert (len(written) > 1) == (max_shard_bytes < 2**40)
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # who may read the config may read the weights


def test_files_of_the_model_without_its_head(tmp_path: Path) -> None:
    """The published GPT-2 has no prefix, and its files have the causal masks."""
    model = theirs_of(GPT)
    model.save_pretrained(tmp_path)
    weights = {k.removeprefix("transformer."): v.clone() for k, v in weights_of(model).items()}
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, 9, 9) for i in range(3)}
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors")
    assert_same_bits(hf.load(tmp_path)[1], gpt_from_hf(GPT, weights_of(model)))


# Round trips


@st.composite
def configs(draw: st.DrawFn) -> Any:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (4, 1)]))
    sizes = {
        "num_layers": draw(st.integers(1, 5)),
        "num_heads": kv_heads * group,
        "mlp_dim": draw(st.sampled_from([4, 6, 12])),
        "vocab_size": draw(st.sampled_from([5, 127, 128, 131, 250])),
        "max_seq_len": draw(st.sampled_from([1, 8, 12])),
    }
    if draw(st.booleans()):
        return gpt.Config(embed_dim=kv_heads * group * 2, **sizes)
    return llama.Config(
        embed_dim=draw(st.sampled_from([2, 6, 8])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        **draw(st.sampled_from([{}, {"qk_norm": True}, {"qkv_bias": True}])),
        tied=draw(st.booleans()),
        rope_theta=draw(st.sampled_from([1e4, 5e5])),
        rope_scaling=draw(st.sampled_from([None, STRETCHED.rope_scaling])),
        **sizes,
    )


@st.composite
def placed(draw: st.DrawFn, config: Any) -> tuple[Any, Any]:
    """A mesh, whose axis pp may deal the layers in any way, and specs of the parameters."""
    sizes = {name: draw(st.integers(1, 3)) for name in ("pp", "dp", "tp")}
    blocks = draw(st.lists(st.integers(0, sizes["pp"] - 1), max_size=3))
    place = tuple(draw(st.permutations([*range(sizes["pp"]), *blocks])))
    mesh = pfx.make_mesh("simulated", deals={"pp": Deal(place)}, **sizes)
    dims = hf.family_of(config).axes(config)
    shapes = pfx.tree.map(
        lambda names: pfx.ShapeDtype(tuple(config.sizes[dim] for dim in names.split())), dims
    )
    others = pfx.make_mesh("simulated", dp=sizes["dp"], tp=sizes["tp"])
    specs = draw(draw_specs(shapes, others))

    def piped(names: str, spec: P) -> P:
        free = names.startswith("layers") and (not spec or spec[0] is None)
        return P("pp", *spec[1:]) if free else spec

    return mesh, pfx.tree.map(piped, dims, specs) if draw(st.booleans()) else specs


@given(st.data())
def test_what_is_saved_loads_bit_for_bit_on_any_mesh(data: st.DataObject) -> None:
    config = data.draw(configs())
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    params = random_bits(config, data.draw(st.integers(0, 99)), dtype)
    before, after = data.draw(placed(config)), data.draw(placed(config))
    with tempfile.TemporaryDirectory() as folder:
        most = data.draw(st.sampled_from([1, 500, 2**40]))
        hf.save(f"{folder}/out", pfx.device_put(params, *before), config, max_shard_bytes=most)
        found, arrays = hf.load(f"{folder}/out", mesh=after[0], specs=after[1])
        plain = hf.load(f"{folder}/out")[1]
        names = sorted(path.name for path in Path(folder).iterdir())
    assert found == replace(config, dtype=dtype)
    assert names == ["out"]
    assert_same_bits(plain, params)
    assert_same_bits(pfx.device_get(arrays), params)
    placed_ones = pfx.device_put(params, *after)
    for array, like in zip(pfx.tree.leaves(arrays), pfx.tree.leaves(placed_ones), strict=True):
        assert (array.layout, array.mesh) == (like.layout, like.mesh)
        for part, other in zip(array.parts, like.parts, strict=True):
            assert_same_bits(part, other)  # the padding of a dealt dim too


@pytest.mark.parametrize(
    "plan",
    [
        pfx.Plan(pp=2, tp=2, microbatches=2, stage_layers=(2, 1)),
        pfx.Plan(dp=2, tp=2, zero=3),
    ],
    ids=["pp", "zero3"],
)
def test_a_state_in_training_is_saved_and_loaded_where_it_lives(
    plan: pfx.Plan, tmp_path: Path
) -> None:
    config = replace(QWEN, num_layers=3, tied=True)
    train = pfx.make_train_step(
        llama.loss_fn(config), pfx.optim.sgd(0.1), plan,
        init=lambda key: llama.init(config, key), axes=llama.axes(config),
    )  # fmt: skip
    state = train.init(pfx.random.key(0))
    hf.save(tmp_path / "out", state.params, config)
    found, params = hf.load(tmp_path / "out", mesh=train.mesh, specs=train.state_specs.params)
    assert found == config
    expected = pfx.device_get(state.params)
    expected["tok_embed"][config.vocab_size :] = 0
    assert_same_bits(pfx.device_get(params), expected)
    if plan.pp > 1:
        return  # compiling another pipeline takes seconds and shows nothing more
    again = train.state_of(params, pfx.random.key(1))
    tokens = some_tokens(config)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    _, metrics = train.step(again, batch)
    loss_sum, weight, _ = llama.loss_fn(config)(expected, batch)
    assert metrics["loss"].item() == pytest.approx((loss_sum / weight).item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_change_on_request_only(dtype: torch.dtype, tmp_path: Path) -> None:
    params = llama.init(QWEN, pfx.random.key(0))
    hf.save(tmp_path / "cast", params, QWEN, dtype=dtype)
    hf.save(tmp_path / "same", params, QWEN)
    cast = pfx.tree.map(lambda x: x.to(dtype), params)
    for name in ("tok_embed", "unembed"):
        params[name][QWEN.vocab_size :] = cast[name][QWEN.vocab_size :] = 0
    assert hf.load(tmp_path / "cast")[0].dtype == dtype
    assert_same_bits(hf.load(tmp_path / "cast")[1], cast)
    assert_same_bits(hf.load(tmp_path / "same")[1], params)
    assert_same_bits(hf.load(tmp_path / "same", dtype=dtype)[1], cast)


# Only the slices needed


@contextmanager
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    counts: list[int] = []
    read = files.Stored.read

    def counted(self: Any, slices: Any) -> torch.Tensor:
        found = read(self, slices)
        counts.append(found.nbytes)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(files.Stored, "read", counted)
        yield counts


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_a_device_reads_its_own_bytes_only(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All devices of a simulated mesh together read what each has: no byte more, none twice."""
    config = replace(MODELS[name], num_layers=4, vocab_size=256)  # no padding, to count exactly
    params = hf.family_of(config).init(config, pfx.random.key(0))
    hf.save(tmp_path / "out", params, config)
    plan = pfx.Plan(pp=2, tp=2, microbatches=2)
    mesh, dims = plan.mesh("simulated"), hf.family_of(config).axes(config)
    specs = plan.compute_specs(dims, params, mesh, [])
    with bytes_read(monkeypatch) as counts:
        _, arrays = hf.load(tmp_path / "out", mesh=mesh, specs=specs)
    held = [part.nbytes for array in pfx.tree.leaves(arrays) for part in array.parts]
    assert sum(counts) == sum(held)
    one = [array.bytes_per_device for array in pfx.tree.leaves(arrays)]
    whole = sum(leaf.nbytes for leaf in pfx.tree.leaves(params))
    assert sum(one) < 0.7 * whole


def test_padding_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = replace(LLAMA, vocab_size=120, tied=True, num_layers=1)  # the padding: 120 to 127
    hf.save(tmp_path / "out", llama.init(config, pfx.random.key(0)), config)
    mesh = pfx.make_mesh("simulated", tp=32)
    with bytes_read(monkeypatch) as counts:
        _, arrays = hf.load(tmp_path / "out", mesh=mesh, specs=_only_embedding("tp"))
    assert len(arrays["tok_embed"].parts) == 32
    held = sum(leaf.nbytes for leaf in pfx.tree.leaves(pfx.device_get(arrays)))
    assert sum(counts) == held - 8 * 12 * 4
    assert all((part == 0).all() for part in arrays["tok_embed"].parts[30:])


def _only_embedding(axis: str) -> Any:
    dims = llama.axes(replace(LLAMA, tied=True))
    return pfx.tree.map(lambda names: P(axis) if "vocab" in names else P(), dims)


# A head that is the embedding (transformers#38870, Qwen3-VL-Embedding#89, vllm PR #51665)


def with_head(
    folder: Path, *, tied: bool, embedding: torch.Tensor | None, head: torch.Tensor | None
) -> Path:
    """A saved model whose config and two tensors are as given."""
    hf.save(folder / "out", llama.init(LLAMA, pfx.random.key(0)), LLAMA)
    path = folder / "out" / "model.safetensors"
    weights = safetensors_torch.load_file(path)
    for name, value in {"model.embed_tokens.weight": embedding, "lm_head.weight": head}.items():
        weights.pop(name)
        if value is not None:
            weights[name] = value.clone()
    safetensors_torch.save_file(weights, path)
    edit_config(folder / "out", tie_word_embeddings=tied)
    return folder / "out"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


EMBED = torch.arange(131 * 12, dtype=torch.float32).reshape(131, 12)
OTHER = torch.where(torch.arange(131 * 12).reshape(131, 12) == 1000, -1.0, EMBED)


def test_tied_and_only_the_head_is_there(tmp_path: Path) -> None:
    config, params = hf.load(with_head(tmp_path, tied=True, embedding=None, head=EMBED))
    assert config.tied
    assert "unembed" not in params
    assert torch.equal(params["tok_embed"][:131], EMBED)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_tied_and_both_are_there_and_differ(on_mesh: bool, tmp_path: Path) -> None:
    folder = with_head(tmp_path, tied=True, embedding=EMBED, head=OTHER)
    mesh = pfx.make_mesh("simulated", tp=2) if on_mesh else None
    with pytest.raises(WeightsError, match="under two names, with different values") as error:
        hf.load(folder, mesh=mesh, specs=P())
    assert "model.embed_tokens.weight" in str(error.value)


def test_untied_and_the_head_is_missing(tmp_path: Path) -> None:
    folder = with_head(tmp_path, tied=False, embedding=EMBED, head=None)
    with pytest.raises(WeightsError, match=r"missing: lm_head\.weight") as error:
        hf.load(folder)
    assert "tie_word_embeddings" in str(error.value)


def test_tied_and_both_are_there_and_equal(tmp_path: Path) -> None:
    config, params = hf.load(with_head(tmp_path, tied=True, embedding=EMBED, head=EMBED))
    assert torch.equal(params["tok_embed"][:131], EMBED)
    hf.save(tmp_path / "again", params, config)
    names = safetensors_torch.load_file(tmp_path / "again" / "model.safetensors")
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_tied_and_neither_is_there(tmp_path: Path) -> None:
    folder = with_head(tmp_path, tied=True, embedding=None, head=None)
    missing = r"missing: model\.embed_tokens\.weight or lm_head\.weight"
    with pytest.raises(WeightsError, match=missing):
        hf.load(folder)


def test_untied_heads_are_two_parameters(tmp_path: Path) -> None:
    config, params = hf.load(with_head(tmp_path, tied=False, embedding=EMBED, head=OTHER))
    assert not config.tied
    assert torch.equal(params["tok_embed"][:131], EMBED)
    assert torch.equal(params["unembed"][:131], OTHER)
