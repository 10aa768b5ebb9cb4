"""Weights read and written by real processes; run by `checks`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import pfx
from models import hf, llama
from pfx.interop.hf import WeightsError, files, load_params, save_params

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CONFIG = llama.Config(
    num_layers=3, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=12,
    vocab_size=131, max_seq_len=16, qk_norm=True, tied=True,
)  # fmt: skip


def weights_in_and_out() -> None:
    """A state that processes hold is written once and comes back where each of them keeps it."""
    folder = Path(sys.argv[1])
    params = llama.init(CONFIG, pfx.random.key(0))
    params["blocks"]["wq"][:] = -0.0
    params["tok_embed"][CONFIG.vocab_size :] = 0
    for number, plan in enumerate(_plans()):
        mesh = plan.mesh()
        assert mesh.kind == "process"
        specs = plan.compute_specs(llama.axes(CONFIG), params, mesh, [])
        before = pfx.device_put(params, mesh, specs)
        hf.save(folder / f"out{number}", before, CONFIG, max_shard_bytes=2000)
        counts = _counting()
        config, after = hf.load(folder / f"out{number}", mesh=mesh, specs=specs)
        assert config == CONFIG
        assert sum(counts) < sum(leaf.nbytes for leaf in pfx.tree.leaves(params))
        for array, like in zip(pfx.tree.leaves(after), pfx.tree.leaves(before), strict=True):
            assert (array.layout, array.coordinate) == (like.layout, like.coordinate)
            (part,), (other,) = array.parts, like.parts
            assert torch.equal(part.view(torch.int32), other.view(torch.int32))
        whole = hf.load(folder / f"out{number}")[1]
        for leaf, like in zip(pfx.tree.leaves(whole), pfx.tree.leaves(params), strict=True):
            assert torch.equal(leaf.view(torch.int32), like.view(torch.int32))


def _plans() -> list[pfx.Plan]:
    pipeline = pfx.Plan(pp=2, tp=SIZE // 2, microbatches=2, stage_layers=(2, 1))
    return [pipeline, pfx.Plan(dp=SIZE // 2, tp=2)]


def _counting() -> list[int]:
    """The bytes of every slice that is read from now on."""
    counts: list[int] = []
    read = files.Stored.read

    def counted(self: Any, slices: Any) -> torch.Tensor:
        found = read(self, slices)
        counts.append(found.nbytes)
        return found

    files.Stored.read = counted  # type: ignore[method-assign]
    return counts


def weights_that_fail() -> None:
    """What goes wrong in one process is an error in all: nobody waits."""
    folder = Path(sys.argv[1])
    mesh = pfx.make_mesh(tp=SIZE)
    params = llama.init(CONFIG, pfx.random.key(0))
    if RANK == 0:
        save_params(folder / "twins", params, hf.table(CONFIG), config={})
        path = folder / "twins" / "model.safetensors"
        tensors = load_file(path)
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1] += 1  # the last real row: the second half of the vocabulary begins at 128
        save_file(tensors | {"lm_head.weight": head}, path)
    pfx.device_get(pfx.device_put(torch.zeros(SIZE), mesh, pfx.P("tp")))  # written, for all
    specs = pfx.tree.map(
        lambda dims: pfx.P("tp") if "vocab" in dims else pfx.P(), llama.axes(CONFIG)
    )
    text = _error(lambda: load_params(folder / "twins", hf.table(CONFIG), mesh=mesh, specs=specs))
    mine = RANK == SIZE // 2
    assert "different values" in text, text
    assert mine or f"failed on rank {SIZE // 2}." in text, text
    text = _error(lambda: hf.load(folder / ("out0" if RANK else "nowhere"), mesh=mesh))
    assert "nowhere/config.json: cannot be read" in text, text
    assert ("failed on rank 0." in text) == (RANK > 0), text
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / f"{RANK}").touch()
    text = _error(lambda: hf.save(folder / "full", pfx.device_put(params, mesh), CONFIG))
    assert "there is something already." in text, text
    assert ("failed on rank 0." in text) == (RANK > 0), text


def _error(call: Any) -> str:
    try:
        call()
    except WeightsError as error:
        return str(error)
    raise AssertionError("no error")
