"""`pfx.random` against values of `jax.random` 0.10.2 (threefry2x32, partitionable).

A golden row holds the first elements of a draw and the CRC-32 of all of its bytes, so one wrong bit
anywhere fails it. Rows marked x64 were made with ``jax_enable_x64``.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pfx import random
from pfx.random import threefry

KEY = random.key(42)


def crc(x: Tensor) -> int:
    return zlib.crc32(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def assert_golden(x: Tensor, first: list[Any], checksum: int) -> None:
    assert x.reshape(-1)[: len(first)].tolist() == first
    assert crc(x) == checksum, f"{crc(x):#010x}"


# Keys and bits.


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (0, [0, 0]),
        (1, [0, 1]),
        (2**31, [0, 2**31]),
        (2**32 - 1, [0, 2**32 - 1]),
        (2**32 + 1, [1, 1]),  # x64, as are all below
        (2**40 + 5, [256, 5]),
        (-1, [2**32 - 1, 2**32 - 1]),
        (2**63 - 1, [2**31 - 1, 2**32 - 1]),
    ],
)
def test_key_of_a_seed(seed: int, words: list[int]) -> None:
    key = random.key(seed)
    assert (key.dtype, key.tolist()) == (torch.uint32, words)
    assert random.key(torch.tensor(seed)).tolist() == words


def test_key_of_a_narrow_seed_has_no_high_word() -> None:
    assert random.key(torch.tensor(-1, dtype=torch.int32)).tolist() == [0, 2**32 - 1]


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, 0, [0x6B200159, 0x99BA4EFE]),
        (-1, -1, [0x1CB996FC, 0xBB002BE7]),
        (0x13198A2E03707344, 0x243F6A8885A308D3, [0xC4923A9C, 0x483DF7A0]),
    ],
)
def test_hash_has_the_known_answers_of_its_authors(
    key: int, counter: int, words: list[int]
) -> None:
    for hash_ in (torch.ops.pfx.threefry, threefry.threefry_torch):
        assert hash_(random.key(key), torch.tensor(counter)).tolist() == words


@pytest.mark.parametrize(
    ("make", "last", "checksum"),
    [
        (lambda: random.split(KEY), [64467757, 2916123636], 0x8324DFB0),
        (lambda: random.split(KEY, 5), [2954079971, 3276725750], 0xD6B140FC),
        (lambda: random.split(KEY, (2, 3)), [2765691542, 824333390], 0x220B0403),
        (
            lambda: random.split(random.split(KEY, 3)[2], (2, 2)),
            [1844025098, 928543246],
            0x77369951,
        ),
        (lambda: random.fold_in(KEY, 0), [1832780943, 270669613], 0xB5902D7F),
        (lambda: random.fold_in(KEY, 2**31), [3181546281, 2228815013], 0x721A1CD8),
        (lambda: random.fold_in(KEY, 2**32 - 1), [2398536845, 3890976714], 0x3A1BFDE6),
        (lambda: random.fold_in(random.fold_in(KEY, 3), 99), [744289045, 735147409], 0x18CBEB8F),
    ],
)
def test_split_and_fold_in(make: Callable[[], Tensor], last: list[int], checksum: int) -> None:
    keys = make()
    assert keys.dtype == torch.uint32
    assert keys.reshape(-1)[-2:].tolist() == last
    assert crc(keys) == checksum


def test_split_shapes() -> None:
    assert random.split(KEY, ()).shape == (2,)
    assert random.split(KEY, 0).shape == (0, 2)
    assert random.split(KEY, (2, 0, 3)).shape == (2, 0, 3, 2)
    assert torch.equal(random.split(KEY, 6).reshape(2, 3, 2), random.split(KEY, (2, 3)))


def test_fold_in_of_a_tensor_counts_its_low_word() -> None:
    for data in (0, 7, 2**31, 2**32 - 1):
        want = random.fold_in(KEY, data)
        assert torch.equal(random.fold_in(KEY, torch.tensor(data)), want)
        assert torch.equal(random.fold_in(KEY, torch.tensor(data + 2**32)), want)
    want = random.fold_in(KEY, 7)
    assert torch.equal(random.fold_in(KEY, torch.tensor(7, dtype=torch.int32)), want)


@pytest.mark.parametrize(
    ("seed", "shape", "first", "checksum"),
    [
        (0, (), [4070199207], 0x5223C5FD),
        (0, (7,), [4070199207, 4202968722], 0xC990887C),
        (42, (3, 5), [2098992034, 2919706841], 0x6CDDDF23),
        (123456789, (2, 3, 7), [1234914217, 2979648120], 0x6CE4E998),
        (2**32 - 1, (100003,), [2226700399, 2348827549], 0x5DC8473A),
        (42, (0, 4), [], 0),
    ],
)
def test_bits(seed: int, shape: tuple[int, ...], first: list[int], checksum: int) -> None:
    words = random.bits(random.key(seed), shape)
    assert (words.shape, words.dtype) == (shape, torch.uint32)
    assert_golden(words, first, checksum)


@pytest.mark.parametrize(
    ("dtype", "first", "checksum"),
    [
        (torch.uint8, [162, 217], 0xE5EDDCB0),
        (torch.uint16, [5026, 12505], 0x5D054F0E),
        (torch.uint64, [7871734211187709741, 276886910877598708], 0x22E3C29C),  # x64
    ],
)
def test_bits_of_other_widths(dtype: torch.dtype, first: list[int], checksum: int) -> None:
    assert_golden(random.bits(KEY, (1001,), dtype), first, checksum)


def test_counters_have_64_bits() -> None:
    first = 3 * 2**40 + 2**32 - 2  # the low word wraps after two
    want = [1142042193, 4087358128, 2330170773, 513519100, 2296439365]
    assert torch.ops.pfx.random_bits(KEY, [5], [first], [2**43]).tolist() == want
    row, column = divmod(first, 2**20)
    block = ([1, 5], [row, column - 4], [2**23, 2**20])
    assert torch.ops.pfx.random_bits(KEY, *block)[0, 4].item() == want[0]
    for width in (32, 64):
        plain = threefry.random_bits_torch(KEY, *block, width)
        assert torch.equal(torch.ops.pfx.random_bits(KEY, *block, width), plain)


# Distributions.


@pytest.mark.parametrize(
    ("seed", "shape", "minval", "maxval", "first", "checksum"),
    [
        (0, (), 0.0, 1.0, [0.9476670026779175], 0x0164FB7D),
        (42, (1001,), 0.0, 1.0, [0.48870956897735596, 0.6797971725463867], 0xAD6034B5),
        (7, (5, 3), -1.0, 1.0, [0.34817981719970703, 0.9492337703704834], 0xF9788433),
        (42, (33, 31), -0.3, 2.7, [1.1661286354064941, 1.739391565322876], 0x911CECBC),
        (3, (2, 3, 7), -0.02, 0.02, [-0.017037896439433098, 0.017525773495435715], 0x88D8171A),
    ],
)
def test_uniform(
    seed: int, shape: tuple[int, ...], minval: float, maxval: float, first: Any, checksum: int
) -> None:
    x = random.uniform(random.key(seed), shape, minval=minval, maxval=maxval)
    assert (x.shape, x.dtype) == (shape, torch.float32)
    assert_golden(x, first, checksum)
    bounds = torch.tensor(minval), torch.tensor(maxval).expand(shape)
    assert torch.equal(random.uniform(random.key(seed), shape, torch.float32, *bounds), x)


@pytest.mark.parametrize(
    ("dtype", "minval", "maxval", "checksum"),
    [
        (torch.float16, 0.0, 1.0, 0x1EC4DACF),
        (torch.float16, -0.3, 2.7, 0x6AA75D36),
        (torch.bfloat16, 0.0, 1.0, 0x6A2830B9),
        (torch.bfloat16, -0.3, 2.7, 0x45A1B961),
        (torch.float64, 0.0, 1.0, 0x6AA609DC),  # x64, as are all below
        (torch.float64, -1.0, 1.0, 0x08D41D45),
        (torch.float64, -0.25, 1.75, 0x230A354F),
    ],
)
def test_uniform_of_other_dtypes(
    dtype: torch.dtype, minval: float, maxval: float, checksum: int
) -> None:
    x = random.uniform(KEY, (1001,), dtype, minval, maxval)
    assert x.dtype == dtype
    assert crc(x) == checksum


def test_uniform_between_equal_bounds() -> None:
    assert random.uniform(KEY, (3,), minval=0.3, maxval=0.3).tolist() == [pytest.approx(0.3)] * 3


@pytest.mark.parametrize(
    ("seed", "shape", "first", "total", "squares"),
    [
        (0, (), [1.622642159461975], 1.622642159461975, 2.632967577663422),
        (
            *(42, (1001,), [-0.02830461598932743, 0.4671318531036377, 0.2957029640674591]),
            *(41.164638908114284, 947.403285394353),
        ),
        (
            *(7, (5, 3), [0.4512351453304291, 1.9534509181976318, -0.5162394642829895]),
            *(0.4510148614645004, 15.457106363035916),
        ),
        (
            *(123456789, (2, 3, 7), [-0.5606274008750916, 0.5065178275108337]),
            *(-1.4145094295963645, 28.564693224200916),
        ),
    ],
)
def test_normal(
    seed: int, shape: tuple[int, ...], first: list[float], total: float, squares: float
) -> None:
    x = random.normal(random.key(seed), shape)
    assert (x.shape, x.dtype) == (shape, torch.float32)
    assert x.reshape(-1)[: len(first)].tolist() == pytest.approx(first, rel=1e-6)
    x = x.double()
    assert x.sum().item() == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert x.square().sum().item() == pytest.approx(squares, rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "first", "tolerance"),
    [
        (torch.float16, [-1.4296875, -0.87548828125, 1.974609375], 1e-3),
        (torch.bfloat16, [0.34375, 1.015625, 1.890625], 8e-3),
        (
            *(torch.float64, [-0.18471174528191162, -2.169824560397754, 0.18693555179382582]),
            1e-14,  # x64
        ),
    ],
)
def test_normal_of_other_dtypes(dtype: torch.dtype, first: list[float], tolerance: float) -> None:
    x = random.normal(KEY, (1001,), dtype)
    assert x.dtype == dtype
    assert x[:3].tolist() == pytest.approx(first, rel=tolerance)


def test_truncated_normal() -> None:
    x = random.truncated_normal(KEY, -2.0, 2.0, (1001,))
    first = [-0.027016498148441315, 0.44438081979751587, 0.2818770706653595]
    assert x[:3].tolist() == pytest.approx(first, rel=1e-6)
    assert x.double().sum().item() == pytest.approx(40.06749463826418, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("lower", "upper"), [(-1.0, 1.0), (0.0, 0.01), (3.0, 9.0), (-math.inf, -2)]
)
def test_truncated_normal_stays_inside(lower: float, upper: float, dtype: torch.dtype) -> None:
    x = random.truncated_normal(KEY, lower, upper, (4096,), dtype)
    low, high = torch.tensor([lower, upper], dtype=dtype)
    assert bool(((low < x) & (x < high)).all())


def test_bernoulli() -> None:
    assert crc(random.bernoulli(KEY, 0.3, (1001,))) == 61800360
    p = torch.tensor([0.1, 0.5, 0.9])
    assert crc(random.bernoulli(KEY, p, (333, 3))) == 1295574877
    assert random.bernoulli(KEY, p).shape == (3,)
    assert random.bernoulli(KEY).shape == ()
    assert not random.bernoulli(KEY, 0.0, (1001,)).any()
    assert random.bernoulli(KEY, 1.0, (1001,)).all()


@pytest.mark.parametrize(
    ("minval", "maxval", "dtype", "first", "checksum"),
    [
        (0, 10, torch.int32, [4, 4], 0x345D1846),
        (-7, 1000003, torch.int32, [263019, 831525], 0x1765E851),
        (0, 50257, torch.int32, [28293, 11853], 0x5BB54DC6),
        (-(2**31), 2**31 - 1, torch.int32, [977810628, 1236381714], 0x8B804A32),
        (0, 256, torch.uint8, [196, 18], 0x8625ED1E),
        (-100, 100, torch.int8, [-56, 14], 0x688D11DC),
        (0, 10, torch.int64, [5, 8], 0x7E5DDF25),  # x64, as is the next
        (-(2**40), 2**61, torch.int64, [2160457820912465461, 869865070566561470], 0x83965304),
    ],
)
def test_randint(
    minval: int, maxval: int, dtype: torch.dtype, first: list[int], checksum: int
) -> None:
    x = random.randint(KEY, (1001,), minval, maxval, dtype)
    assert x.dtype == dtype
    assert_golden(x, first, checksum)
    bounds = torch.tensor(minval), torch.tensor(maxval)
    assert torch.equal(random.randint(KEY, (1001,), *bounds, dtype), x)
    assert torch.equal(random.randint(KEY, (1001,), minval, bounds[1], dtype), x)


def test_randint_clips_tensor_bounds() -> None:
    five = torch.tensor(5)
    assert random.randint(KEY, (3,), five, five - 1).tolist() == [5, 5, 5]
    wide = random.randint(KEY, (99,), torch.tensor(-(2**40)), torch.tensor(2**40), torch.int8)
    assert torch.equal(wide, random.randint(KEY, (99,), -128, 128, torch.int8))


@pytest.mark.parametrize(
    ("size", "first", "checksum"),
    [(1, [0], 0x6522DF69), (10, [7, 4], 0xCE8CACD9), (5000, [3825, 3150], 0x75294579)],
)
def test_permutation_of_a_range(size: int, first: list[int], checksum: int) -> None:
    x = random.permutation(KEY, size)
    assert_golden(x, first, checksum)
    assert x.sort().values.tolist() == list(range(size))


@pytest.mark.parametrize(
    ("dim", "independent", "checksum"),
    [(0, False, 0x857A6ADE), (1, False, 0x0222B4C2), (-1, True, 0x9CF60F30)],
)
def test_permutation_of_a_tensor(dim: int, independent: bool, checksum: int) -> None:
    x = torch.arange(64 * 50).reshape(64, 50)
    shuffled = random.permutation(KEY, x, dim, independent=independent)
    assert crc(shuffled) == checksum
    assert torch.equal(shuffled.sort(dim).values, x)


def test_permutation_of_nothing() -> None:
    assert random.permutation(KEY, 0).shape == (0,)
    assert random.permutation(KEY, torch.zeros(0, 3), independent=True).shape == (0, 3)


@pytest.mark.parametrize(
    ("dim", "shape", "checksum"),
    [(-1, None, 0xF8A44C8C), (0, None, 0x4C58474D), (1, (3, 4, 5), 0x7730F5EB)],
)
def test_categorical(dim: int, shape: tuple[int, ...] | None, checksum: int) -> None:
    logits = (torch.arange(120) % 7).to(torch.float32).reshape(4, 6, 5) * 0.5
    assert crc(random.categorical(KEY, logits, dim, shape)) == checksum


# What no golden value says: the draws have the distributions they are named for.

DRAWS = 1 << 16


def test_moments() -> None:
    five_sigma = 5 / math.sqrt(DRAWS)
    x = random.normal(KEY, (DRAWS,)).double()
    assert abs(x.mean()) < five_sigma
    assert abs(x.var() - 1) < math.sqrt(2) * five_sigma
    assert abs(x.pow(4).mean() - 3) < math.sqrt(96) * five_sigma
    u = random.uniform(KEY, (DRAWS,)).double()
    assert abs(u.mean() - 1 / 2) < math.sqrt(1 / 12) * five_sigma
    assert abs((u[1:] * u[:-1]).mean() - 1 / 4) < five_sigma
    assert abs(random.bernoulli(KEY, 0.3, (DRAWS,)).double().mean() - 0.3) < five_sigma / 2


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.randint(KEY, (DRAWS,), 0, 6),
        lambda: random.categorical(KEY, torch.zeros(6), shape=(DRAWS,)),
        lambda: torch.func.vmap(lambda key: random.permutation(key, 6))(random.split(KEY, DRAWS))[
            :, 4
        ],
    ],
)
def test_every_face_of_a_die_is_as_likely(draw: Callable[[], Tensor]) -> None:
    counts = Counter(draw().tolist())
    assert sorted(counts) == list(range(6))
    chi_square = sum((count - DRAWS / 6) ** 2 / (DRAWS / 6) for count in counts.values())
    assert chi_square < 30  # 5 degrees of freedom: exceeded once in 70,000
