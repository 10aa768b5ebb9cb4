"""The error texts of `pfx.random`: where, what, why and a line to paste."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pfx import random
from pfx.errors import PfxError

KEY = random.key(42)

ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: random.uniform(0, (3,)),
        TypeError,
        """\
pfx.random.uniform: key is not a random key.
  got 0; a key is a uint32 tensor of shape (2,).
  fix: key = pfx.random.key(0)""",
    ),
    (
        lambda: random.split(torch.zeros(2)),
        TypeError,
        """\
pfx.random.split: key is not a random key.
  got torch.float32 of shape (2,); a key is torch.uint32 of shape (2,).
  fix: key = pfx.random.key(0)""",
    ),
    (
        lambda: random.normal(random.split(KEY, (2, 3)), (3,)),
        ValueError,
        """\
pfx.random.normal: key is a batch of keys.
  got 6 keys, shape (2, 3, 2); one has shape (2,).
  fix: pfx.vmap(lambda key: pfx.random.normal(key, ...))(keys)""",
    ),
    (
        lambda: random.bits(KEY, 5),
        TypeError,
        """\
pfx.random.bits: shape is not a sequence of ints.
  got 5.
  fix: shape=(5,)""",
    ),
    (
        lambda: random.normal(KEY, (3, -1)),
        ValueError,
        """\
pfx.random.normal: shape has a negative size.
  got (3, -1).
  fix: shape=(3, 0)""",
    ),
    (
        lambda: random.split(KEY, -1),
        ValueError,
        """\
pfx.random.split: num has a negative size.
  got (-1,).
  fix: num=(0,)""",
    ),
    (
        lambda: random.key(0.5),
        TypeError,
        """\
pfx.random.key: seed is not an int.
  got 0.5.
  fix: key = pfx.random.key(0)""",
    ),
    (
        lambda: random.key(2**64 + 3),
        ValueError,
        """\
pfx.random.key: seed does not fit in 64 bits.
  got 18446744073709551619.
  fix: key = pfx.random.key(3)""",
    ),
    (
        lambda: random.fold_in(KEY, -1),
        ValueError,
        """\
pfx.random.fold_in: data does not fit in 32 bits.
  got -1; 0 <= data < 2**32.
  fix: key = pfx.random.fold_in(key, 4294967295)""",
    ),
    (
        lambda: random.fold_in(KEY, "layer"),
        TypeError,
        """\
pfx.random.fold_in: data is not an int.
  got 'layer'.
  fix: key = pfx.random.fold_in(key, 0)""",
    ),
    (
        lambda: random.fold_in(KEY, torch.tensor(1.0)),
        TypeError,
        """\
pfx.random.fold_in: data is not an integer tensor.
  got torch.float32.
  fix: data.to(torch.int64)""",
    ),
    (
        lambda: random.fold_in(KEY, torch.arange(3)),
        ValueError,
        """\
pfx.random.fold_in: data has more than one number.
  got shape (3,).
  fix: pfx.vmap(lambda data: pfx.random.fold_in(..., data))(data)""",
    ),
    (
        lambda: random.uniform(KEY, (3,), torch.int32),
        TypeError,
        """\
pfx.random.uniform: dtype cannot be drawn.
  got torch.int32.
  fix: dtype=torch.float32""",
    ),
    (
        lambda: random.uniform(KEY, (3,), minval=2.0),
        ValueError,
        """\
pfx.random.uniform: minval is greater than maxval.
  minval=2.0, maxval=1.0.
  fix: minval=1.0, maxval=2.0""",
    ),
    (
        lambda: random.uniform(KEY, (3,), minval=torch.zeros(2, 3)),
        ValueError,
        """\
pfx.random.uniform: minval does not broadcast to the result.
  minval has shape (2, 3), the result has shape (3,).
  fix: shape=(2, 3)""",
    ),
    (
        lambda: random.truncated_normal(KEY, 1.0, 1.0),
        ValueError,
        """\
pfx.random.truncated_normal: lower leaves no room below upper.
  lower=1.0, upper=1.0.
  fix: upper=2.0""",
    ),
    (
        lambda: random.truncated_normal(KEY, 0.0, torch.tensor(1.0)),
        TypeError,
        """\
pfx.random.truncated_normal: lower is not a number.
  lower=0.0, upper=tensor(1.).
  fix: lower=-2.0, upper=2.0""",
    ),
    (
        lambda: random.bernoulli(KEY, 1.5),
        ValueError,
        """\
pfx.random.bernoulli: p is not a probability.
  got 1.5.
  fix: p=0.5""",
    ),
    (
        lambda: random.bernoulli(KEY, torch.tensor(1)),
        TypeError,
        """\
pfx.random.bernoulli: p is not a float tensor.
  got torch.int64.
  fix: p.to(torch.float32)""",
    ),
    (
        lambda: random.randint(KEY, (3,), 5, 5),
        ValueError,
        """\
pfx.random.randint: minval is not below maxval.
  minval=5, maxval=5; torch.int32 holds -2147483648 to 2147483647.
  fix: minval=5, maxval=6""",
    ),
    (
        lambda: random.randint(KEY, (3,), 0, 300, torch.uint8),
        ValueError,
        """\
pfx.random.randint: minval or maxval does not fit the dtype.
  minval=0, maxval=300; torch.uint8 holds 0 to 255.
  fix: minval=0, maxval=256""",
    ),
    (
        lambda: random.randint(KEY, (3,), 0, 2**63, torch.int64),
        ValueError,
        """\
pfx.random.randint: minval is too far from maxval.
  minval=0, maxval=9223372036854775808; torch.int64 holds -9223372036854775808 to \
9223372036854775807.
  fix: maxval=4611686018427387904""",
    ),
    (
        lambda: random.permutation(KEY, torch.tensor(3)),
        ValueError,
        """\
pfx.random.permutation: x has no dim 0.
  got shape ().
  fix: x.reshape(-1)""",
    ),
    (
        lambda: random.categorical(KEY, torch.zeros(3, 4), dim=2),
        ValueError,
        """\
pfx.random.categorical: logits has no dim 2.
  got shape (3, 4).
  fix: dim=-1""",
    ),
    (
        lambda: random.categorical(KEY, torch.zeros(3, 4), shape=(4,)),
        ValueError,
        """\
pfx.random.categorical: logits does not fit the result.
  logits without dim 1 have shape (3,), the result (4,).
  fix: shape=(3,)""",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS)
def test_error(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(PfxError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert str(caught.value) == text
