"""The step of bench/step.py as one writes it in JAX, on host-platform devices; bench/step.py starts it.

It is given the sizes as JSON. For each line on stdin it takes one step and prints the loss, so that
its steps and those of pfx can be timed in turns. The same key gives it the same start.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SIZES = json.loads(sys.argv[1])  # and the batch, the learning rate and the mesh
L, E, H, M, V = (
    SIZES[k] for k in ("num_layers", "embed_dim", "num_heads", "mlp_dim", "vocab_size")
)
BATCH, SEQ, LR = SIZES["batch"], SIZES["seq"], SIZES["lr"]
MESH = Mesh(np.reshape(jax.devices(), (SIZES["dp"], SIZES["tp"])), ("dp", "tp"))

# A shape, the standard deviation it starts with (None: ones) and its sharding; Megatron's.
STD, NORM = 0.02, {"scale": ((L, E), None, P()), "bias": ((L, E), 0.0, P())}
PARAMS = {
    "tok_embed": ((V, E), STD, P("tp")),
    "positions": ((SEQ, E), STD, P()),
    "blocks": {
        "attn_norm": NORM,
        "wqkv": ((L, E, H, 3, E // H), STD, P(None, None, "tp")),
        "bqkv": ((L, H, 3, E // H), 0.0, P(None, "tp")),
        "wo": ((L, H, E // H, E), STD / (2 * L) ** 0.5, P(None, "tp")),
        "bo": ((L, E), 0.0, P()),
        "mlp_norm": NORM,
        "w_up": ((L, E, M), STD, P(None, None, "tp")),
        "b_up": ((L, M), 0.0, P(None, "tp")),
        "w_down": ((L, M, E), STD / (2 * L) ** 0.5, P(None, "tp")),
        "b_down": ((L, E), 0.0, P()),
    },
    "final_norm": {"scale": ((E,), None, P()), "bias": ((E,), 0.0, P())},
}
leaves, treedef = jax.tree.flatten(PARAMS, is_leaf=lambda node: isinstance(node, tuple))
shardings = jax.tree.unflatten(treedef, [NamedSharding(MESH, spec) for _, _, spec in leaves])
constrain = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def init(key: jax.Array) -> Any:
    keys = jax.random.split(jax.random.split(key)[0], len(leaves))

    def draw(key: jax.Array, shape: tuple, std: float | None) -> jax.Array:
        return jnp.ones(shape) if std is None else std * jax.random.normal(key, shape)

    drawn = [draw(k, shape, std) for k, (shape, std, _) in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


def layer_norm(x: jax.Array, w: Any) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["scale"] + w["bias"]


def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    qkv = jnp.tensordot(layer_norm(x, w["attn_norm"]), w["wqkv"], 1) + w["bqkv"]
    q, k, v = jnp.moveaxis(constrain(qkv, "dp", None, "tp"), 3, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = constrain(x + jnp.tensordot(mixed, w["wo"], 2) + w["bo"], "dp")
    hidden = jax.nn.gelu(layer_norm(x, w["mlp_norm"]) @ w["w_up"] + w["b_up"])
    return constrain(x + hidden @ w["w_down"] + w["b_down"], "dp"), None


def loss_fn(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    x = constrain(params["tok_embed"][tokens] + params["positions"], "dp")
    x, _ = jax.lax.scan(block, x, params["blocks"])  # faster here than unrolled
    logits = constrain(
        layer_norm(x, params["final_norm"]) @ params["tok_embed"].T, "dp", None, "tp"
    )
    label_logits = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - label_logits).mean()


def train_step(state: Any, tokens: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    """Clip by the global norm, then AdamW."""
    params, mu, nu, count = state
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, labels)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)
    count = count + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, nu, grads)
    c1, c2 = 1 - 0.9**count, 1 - 0.999**count
    step = lambda p, m, v: p - LR * (m / c1 / (jnp.sqrt(v / c2) + 1e-8) + 0.01 * p)
    return (jax.tree.map(step, params, mu, nu), mu, nu, count), loss


def main() -> None:
    rows, whole = NamedSharding(MESH, P("dp")), NamedSharding(MESH, P())
    data = jnp.arange(BATCH * (SEQ + 1)).reshape(BATCH, SEQ + 1) * 7919 % V
    tokens, labels = (jax.device_put(part, rows) for part in (data[:, :-1], data[:, 1:]))
    params = jax.jit(init, out_shardings=shardings)(jax.random.key(0))
    zeros = lambda: jax.tree.map(jnp.zeros_like, params)
    state = (params, zeros(), zeros(), jax.device_put(jnp.float32(0), whole))
    kept = (shardings, shardings, shardings, whole)
    step = jax.jit(
        train_step,
        donate_argnums=0,
        in_shardings=(kept, rows, rows),
        out_shardings=(kept, whole),
    )
    for _ in sys.stdin:
        state, loss = step(state, tokens, labels)
        jax.block_until_ready(state)
        print(float(loss), flush=True)


if __name__ == "__main__":
    main()
