"""The law of sharding rules: a node computed in parts, and put together, is the node.

Every node of every traced case is tried alone: each factor that may be split is split, the rule's
local call runs on the slices of real operands, and the parts are joined as the rule says (side by
side, or reduced where the factor is contracted). Where the rule lets a partial sum flow, operands are
cut into two addends, and the results must add up.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.fx

import pfx
from pfx import _torch
from pfx._torch import DataDependentError
from pfx.compiler.rule import Assignment, Call, Dims, Local, Rule, operand_nodes, result_values
from pfx.compiler.rules import TABLE, find_rule
from pfx.compiler.simplify import simplify
from pfx.lax.manual.transport import combine
from pfx.lax.ops.functionalize import functionalize
from pfx.spec import local_slices
from tests.sim import op_samples
from tests.sim.op_samples import Case, cases, difference

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's samples provoke torch's warnings

aten = torch.ops.aten
MESH = pfx.make_mesh(x=2, y=2)
Env = Mapping[torch.fx.Node, Any]

NAMES = sorted(set(op_samples.operators()) - op_samples.UNTRACEABLE)

# Ops that are computed whole on every device: nobody shards them, or their dims do not separate.
WITHOUT_RULE = frozenset(
    [
        "_chunk_cat",
        "_embedding_bag",
        "_embedding_bag_backward",
        "_embedding_bag_forward_only",
        "_embedding_bag_per_sample_weights_backward",
        "_histogramdd_bin_edges",
        "_histogramdd_from_bin_cts",
        "_histogramdd_from_bin_tensors",
        "_linalg_solve_ex",
        "_pdist_backward",
        "_pdist_forward",
        "_trilinear",
        "_unsafe_masked_index",
        "_unsafe_masked_index_put_accumulate",
        "_upsample_bilinear2d_aa_backward",
        "_upsample_nearest_exact1d_backward",
        "_upsample_nearest_exact2d_backward",
        "_upsample_nearest_exact3d_backward",
        "as_strided",
        "as_strided_scatter",
        "geqrf",
        "grid_sampler_2d_backward",
        "grid_sampler_3d",
        "grid_sampler_3d_backward",
        "hash_tensor",
        "histc",
        "histogram",
        "isin",
        "linalg_ldl_factor_ex",
        "linalg_ldl_solve",
        "linalg_pinv",
        "lu_unpack",
        "masked_scatter",
        "masked_scatter_backward",
        "max_unpool2d",
        "max_unpool3d",
        "median",
        "multi_margin_loss",
        "multi_margin_loss_backward",
        "multilabel_margin_loss_backward",
        "multilabel_margin_loss_forward",
        "nanmedian",
        "nonzero_static",
        "put",
        "searchsorted",
        "unfold_backward",
        "upsample_bicubic2d_backward",
        "upsample_bilinear2d_backward",
        "upsample_linear1d_backward",
        "upsample_nearest1d_backward",
        "upsample_nearest2d_backward",
        "upsample_nearest3d_backward",
        "upsample_trilinear3d_backward",
        "torch_nn._linear_cross_entropy_batch_chunked",
        "torch_nn._linear_cross_entropy_batch_chunked_no_reduction",
    ]
)


def test_there_are_rules_for_many_ops() -> None:
    assert len(NAMES) > 500
    assert len(TABLE) > 150


@pytest.fixture(scope="session")
def tried() -> set[Any]:
    """The calls that were tried before: most graphs are made of the same views and products."""
    return set()


@pytest.mark.parametrize("name", NAMES)
def test_parts_make_the_whole(name: str, tried: set[Any]) -> None:
    ran = 0
    for case in cases(name, 8 if op_samples.EVERYTHING else 1, ints=1):
        try:
            nodes, env = traced(case)
        except DataDependentError:
            continue
        for node in nodes:
            if signature(node) not in tried:
                check_node(node, env, str(case))
                tried.add(signature(node))
        ran += 1
    assert ran, "no sample ran"


def signature(node: torch.fx.Node) -> str:
    """What a rule can see of a call: shapes and dtypes of operands, their other arguments."""

    def form(n: torch.fx.Node) -> Any:
        made = n.args[1] if n.target is aten.full.default else None
        value = n.meta["val"]
        return str((value.shape, value.dtype, made) if isinstance(value, torch.Tensor) else value)

    return str((node.target, torch.fx.map_arg((node.args, node.kwargs), form)))


def check_node(node: torch.fx.Node, env: Env, where: str) -> None:
    """Try every way that the rule of a node allows."""
    rule, own = find_rule(node)
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    name = str(packet).removeprefix("aten.")
    assert own or packet in TABLE or name in WITHOUT_RULE, f"{node.target} lost its rule"
    check_sizes(node, rule)
    for assignment in assignments(rule):
        check_equal(in_parts(node, rule, assignment, env), node, env, f"{where} split {assignment}")
    for group in addable(node, rule, env):
        check_equal(as_sum(node, group, env), node, env, f"{where} partial in {group}")


def check_equal(got: Sequence[torch.Tensor], node: torch.fx.Node, env: Env, where: str) -> None:
    for part, want in zip(got, results(node, env), strict=True):
        problem = difference(part, want)
        assert not problem, f"{where}: {node.target}: {problem}"


def traced(case: Case) -> tuple[list[torch.fx.Node], Env]:
    """The ops of a traced and simplified case, and the value of every node."""
    fn = case.with_gradient()
    try:
        trace = _torch.trace(fn, case.tensors)
    except RuntimeError:  # torch has no derivative, or one that reads values
        trace = _torch.trace(case.fn, case.tensors)
    module = simplify(functionalize(trace, case.name))
    env = evaluate(module, [*case.tensors, *trace.captured])
    calls = (n for n in module.graph.nodes if n.op == "call_function")
    return [n for n in calls if results(n, env) and n.target is not operator.getitem], env


def evaluate(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Env:
    env: dict[torch.fx.Node, Any] = {}
    feed = iter(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "get_attr":
            env[node] = getattr(module, node.target)
        elif node.op == "call_function":
            feed = {n: [env[n]] for n in node.all_input_nodes}
            env[node] = call(Call(node.target, node.args, node.kwargs), feed)
    return env


def call(what: Call, feed: Mapping[torch.fx.Node, list[Any]], offset: Any = None) -> Any:
    """Call with values for nodes; an operand that occurs twice may be in two parts."""

    def pick(n: torch.fx.Node) -> Any:
        return feed[n].pop(0) if len(feed[n]) > 1 else feed[n][0]

    args, kwargs = torch.fx.map_arg((what.args, dict(what.kwargs)), pick)
    return what.target(*args, **kwargs, **({} if offset is None else {"offset": offset}))


def results(node: torch.fx.Node, env: Env) -> list[torch.Tensor]:
    """The tensors among a node's results."""
    return [v for v in as_list(env[node]) if isinstance(v, torch.Tensor)]


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_sizes(node: torch.fx.Node, rule: Rule) -> None:
    """Every dim of every operand and result is the product of its factors."""
    tensors = [n.meta["val"] for n in operand_nodes(node)] + result_values(node)
    for dims, tensor in zip((*rule.operands, *rule.results), tensors, strict=True):
        if isinstance(tensor, torch.Tensor):
            sizes = tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims)
            assert sizes == tuple(tensor.shape), f"{node.target}: {rule}"


def assignments(rule: Rule) -> Iterator[Assignment]:
    """Each splittable factor over one axis and over both, and a few pairs of factors."""
    used = {f for dims in (*rule.operands, *rule.results) for dim in dims for f in dim}
    sizes = {f: n for f, n in rule.sizes.items() if f in used - rule.whole and n}
    pairs = list(itertools.permutations(sizes, 2))[:: 1 if op_samples.EVERYTHING else 5]
    candidates: list[Assignment] = [
        *({f: ("x",)} for f in sizes),
        *({f: ("y", "x")} for f in sizes),
        *({f: ("x",), g: ("y",)} for f, g in pairs),
    ]
    for candidate in candidates:
        divides = all(sizes[f] % MESH.count(axes) == 0 for f, axes in candidate.items())
        if divides and all(
            rule.representable(dim, candidate, MESH)
            for dims in (*rule.operands, *rule.results)
            for dim in dims
        ):
            yield candidate


def in_parts(
    node: torch.fx.Node, rule: Rule, assignment: Assignment, env: Env
) -> list[torch.Tensor]:
    """Run the local call of every device that an assignment tells apart; join the parts."""
    what = Call(node.target, node.args, node.kwargs)
    if rule.localize is not None:
        what = rule.localize(Local(node, rule, assignment, MESH))
    axes = [axis for axes in assignment.values() for axis in axes]
    parts: list[tuple[dict[str, int], list[torch.Tensor]]] = []
    for place in MESH.coordinates(MESH.ordered(axes)):
        full = {axis: place.get(axis, 0) for axis in MESH.axis_names}
        local: dict[torch.fx.Node, list[torch.Tensor]] = {}
        for operand, dims in zip(operand_nodes(node), rule.operands, strict=True):
            part = env[operand][slices(rule, dims, assignment, env[operand], full)]
            local.setdefault(operand, []).append(part)
        offset = tuple(MESH.index(full, axes) * size for axes, size in what.offset) or None
        out = as_list(call(what, local, offset))
        parts.append((full, [v for v in out if isinstance(v, torch.Tensor)]))
    return [
        joined(rule, dims, assignment, want, [(place, outs[k]) for place, outs in parts])
        for k, (dims, want) in enumerate(
            zip(tensor_dims(node, rule), results(node, env), strict=True)
        )
    ]


def tensor_dims(node: torch.fx.Node, rule: Rule) -> list[Dims]:
    values = result_values(node)
    return [d for d, v in zip(rule.results, values, strict=True) if isinstance(v, torch.Tensor)]


def slices(
    rule: Rule, dims: Dims, assignment: Assignment, tensor: torch.Tensor, place: Mapping[str, int]
) -> tuple[slice, ...]:
    return local_slices(tensor.shape, rule.layout(dims, assignment), MESH, place)


def joined(
    rule: Rule,
    dims: Dims,
    assignment: Assignment,
    want: torch.Tensor,
    parts: Sequence[tuple[Mapping[str, int], torch.Tensor]],
) -> torch.Tensor:
    """Reduce over the contracted factors, and put the rest side by side."""
    kept = {f for dim in dims for f in dim}
    reduces = {rule.reduce.get(f, "sum") for f in assignment if f not in kept}
    assert len(reduces) <= 1, "two kinds of reduction at once"
    reduce = next(iter(reduces), "sum")
    whole = torch.empty_like(want)
    groups: dict[Any, list[torch.Tensor]] = {}
    for place, part in parts:
        where = slices(rule, dims, assignment, whole, place)
        groups.setdefault(tuple((s.start, s.stop) for s in where), []).append(part)
    for key, members in groups.items():
        where = tuple(slice(*ends) for ends in key)
        total = combine(reduce)(members) if len(members) > 1 else members[0]
        assert total.shape == whole[where].shape, f"a part of shape {tuple(total.shape)}"
        if total.dtype != whole.dtype:
            return total  # the caller says so
        whole[where] = total
    return whole


def addable(node: torch.fx.Node, rule: Rule, env: Env) -> Iterator[tuple[int, ...]]:
    """The groups of operands whose partial sums may flow, where rounding lets us see it."""
    values = [env[n] for n in operand_nodes(node)]
    exact = (torch.float64, torch.complex128)
    finite = all(bool(v.isfinite().all()) for v in (*values, *results(node, env)))
    for group in rule.linear:
        if finite and all(values[i].dtype in exact for i in group):
            yield group


def as_sum(node: torch.fx.Node, group: tuple[int, ...], env: Env) -> list[torch.Tensor]:
    """Run a node on two addends of the operands of a group, and add the results."""
    random_ = torch.Generator().manual_seed(0)
    first = {
        i: torch.randn(n.meta["val"].shape, dtype=n.meta["val"].dtype, generator=random_)
        for i, n in enumerate(operand_nodes(node))
        if i in group
    }
    totals: list[torch.Tensor] = []
    for share in (lambda i, value: first[i], lambda i, value: value - first[i]):
        count = itertools.count()  # an operand may occur twice

        def pick(n: torch.fx.Node, share: Any = share, count: Any = count) -> Any:
            i = next(count)
            return share(i, env[n]) if i in group else env[n]

        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), pick)
        outs = as_list(node.target(*args, **kwargs))  # type: ignore[operator]
        totals = [a + b for a, b in zip(totals, outs, strict=True)] if totals else outs
    return totals
