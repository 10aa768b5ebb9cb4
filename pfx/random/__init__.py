"""Random numbers as pure functions of a key: the names, the keys and the bits of ``jax.random``.

Nothing here reads or writes a global generator. A draw depends on its key and on the global index
of each element only, so it is the same on every mesh, under rematerialization and after a resume.
"""

from pfx.random.discrete import bernoulli, categorical, permutation, randint
from pfx.random.distributions import normal, truncated_normal, uniform
from pfx.random.keys import bits, fold_in, key, split

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "fold_in",
    "key",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]
