"""The exact arithmetic of csrc/algo: known answers, accuracy against float64, and equal bits from every build.

A small program (numeric_driver.cpp) is built with the flags of CMakeLists.txt at several optimisation and x86 levels.
"""

import platform
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import run_op
from fastverify.reference.noise import gumbel, philox4x32

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
X86 = platform.machine() in ("x86_64", "AMD64")
BUILDS = {"O0": (["-O0"], 0)}  # name -> (flags, x86 level needed)
BUILDS |= {f"O3 x86-64{v}": (["-O3", f"-march=x86-64{v}"], n) for v, n in (("", 1), ("-v3", 3), ("-v4", 4))} if X86 else {
    "O3": (["-O3"], 0)}
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-DFV_NO_CLONES",
         "-DTORCH_TARGET_VERSION=0x020A000000000000ULL", "-ffunction-sections", "-Wl,--gc-sections"]  # nothing of torch is linked
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the driver")


def test_flags_are_those_of_the_build():
    line = next(x for x in (ROOT / "CMakeLists.txt").read_text().splitlines() if "COMPILE_LANGUAGE:CXX>:-O3" in x)
    assert [f for f in FLAGS if f.startswith("-f") and "sections" not in f] == [f for f in line.rstrip(">").split() if f.startswith("-f")]


@pytest.fixture(scope="module")
def drivers(tmp_path_factory) -> dict:
    """{build name: run(*arguments) -> stdout}; builds that this machine cannot run are built all the same, then left out."""
    folder, torch_dir = tmp_path_factory.mktemp("numeric"), Path(torch.__file__).parent
    jobs = {}
    for i, (name, (flags, _)) in enumerate(BUILDS.items()):
        jobs[name] = folder / f"driver{i}", subprocess.Popen(
            ["g++", *flags, *FLAGS, f"-I{ROOT / 'csrc'}", "-isystem", str(torch_dir / "include"), str(HERE / "numeric_driver.cpp"),
             "-o", str(folder / f"driver{i}")],
            stderr=subprocess.PIPE, text=True)
    for name, (_, job) in jobs.items():
        assert job.wait(300) == 0, f"{name}: {job.stderr.read()}"

    def runner(path):
        return lambda *a: subprocess.run([str(path), *map(str, a)], check=True, capture_output=True, text=True, timeout=120).stdout

    runs = {name: runner(path) for name, (path, _) in jobs.items()}
    level = int(runs["O0"]("level"))
    return {name: run for name, run in runs.items() if BUILDS[name][1] <= level}


@pytest.fixture(scope="module")
def apply(drivers, tmp_path_factory):
    """apply(name, array of 4 or 8-byte elements) -> result; equal in every build."""
    folder = tmp_path_factory.mktemp("maps")

    def call(name: str, x: np.ndarray) -> np.ndarray:
        x.tofile(folder / "in")
        outs = []
        for run in drivers.values():
            run("map", name, folder / "in", folder / "out")
            outs.append((folder / "out").read_bytes())
        assert all(o == outs[0] for o in outs), name
        return np.frombuffer(outs[0], dtype=np.uint64 if name == "mass" else np.float32)

    return call


# Random123's kat_vectors for philox4x32: rounds, counter, key, answer
KNOWN = [
    (7, "00000000 " * 4, "00000000 " * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff " * 4, "ffffffff " * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize("rounds,counter,key,answer", KNOWN)
def test_philox_known_answers(drivers, rounds, counter, key, answer):
    for run in drivers.values():
        assert run("philox", rounds, *counter.split(), *key.split()).split() == answer.split()
    words = philox4x32([int(c, 16) for c in counter.split()], [int(k, 16) for k in key.split()], rounds)  # the oracle's own
    assert " ".join(f"{int(w):08x}" for w in words) == answer


def floats(bits) -> np.ndarray:
    return np.asarray(bits, dtype=np.uint32).view(np.float32)


def spread(rng, low: float, high: float, n: int) -> np.ndarray:
    """Floats in [low, high]: uniform in value and in bits, with the neighbourhoods of both ends."""
    a, b = sorted(int(np.float32(v).view(np.uint32)) for v in (low, high))
    near = np.concatenate([np.arange(a, min(b, a + 20000)), np.arange(max(a, b - 20000), b + 1)])
    return np.concatenate([rng.uniform(low, high, n).astype(np.float32), floats(rng.integers(a, b, n)), floats(near)])


def test_log(apply):
    rng = np.random.default_rng(1)
    around = [floats(np.arange(-30000, 30000) + int(np.float32(c).view(np.uint32)))
              for c in (1.0, 0.5**0.5, 2.0**0.5, 2.0, 0.5, np.e)]
    x = np.concatenate([spread(rng, 1.1754944e-38, 3.4028235e38, 300_000), spread(rng, 0.25, 4.0, 300_000), *around])
    y, want = apply("log", x).astype(np.float64), np.log(x.astype(np.float64))
    assert np.all(np.abs(y - want) <= 2.0**-23.5 * np.abs(want))
    assert apply("log", np.float32([1.0]))[0] == 0.0
    order = np.argsort(x)
    assert np.all(np.diff(y[order]) >= 0)


def test_exp2(apply):
    rng = np.random.default_rng(2)
    whole = np.arange(126, dtype=np.float32)
    t = np.concatenate([-np.abs(spread(rng, 1e-30, 126.0, 400_000)), -whole, -whole - 0.5])
    steps = (-0.5 - np.arange(40, dtype=np.float32))[:, None].view(np.uint32) + np.arange(-300, 300).astype(np.uint32)
    t = np.concatenate([t, floats(steps.ravel())])
    y, want = apply("exp2", t).astype(np.float64), np.exp2(t.astype(np.float64))
    assert np.all(np.abs(y - want) <= 2.0**-23.4 * want)
    y = y[np.argsort(t, kind="stable")]
    assert np.all(y[1:] >= y[:-1] * (1 - 2.0**-23))  # monotone up to one unit in the last place
    ends = apply("exp2", np.float32([0.0, -0.0, -1.0, -126.0, -126.00001, -1e30, -INF]))
    assert ends.tolist() == [1.0, 1.0, 0.5, 2.0**-126, 0.0, 0.0, 0.0]


def test_gumbel(apply):
    """Noise from every kind of word; the largest comes from 0 and it falls with r, so that max_gumbel bounds it."""
    rng = np.random.default_rng(3)
    edges = [np.arange(200_000), 2**32 - 1 - np.arange(200_000), 0x4a000000 + np.arange(-100_000, 100_000),
             np.asarray(2.0**32 * (1 - np.exp(-1.0))).astype(np.int64) + np.arange(-100_000, 100_000)]
    r = np.unique(np.concatenate([rng.integers(0, 2**32, 600_000), *edges])).astype(np.uint32)
    y = apply("gumbel", r).astype(np.float64)
    want = -np.log(-np.log1p(-(r.astype(np.float64) + 0.5) * 2.0**-32))
    assert np.all(np.abs(y - want) <= 2.0**-21.9 * np.maximum(1.0, np.abs(want)))
    assert np.all(np.diff(y) <= 0) and y[0] == y.max() and np.isfinite(y).all()
    assert y[0] == pytest.approx(33 * np.log(2), rel=1e-7) and y[-1] == pytest.approx(-np.log(33 * np.log(2)), rel=1e-6)


def test_noise_bound(apply):
    """Never below the noise by more than its slack (the GPU rows skip entries by it), and close to it where the noise is large."""
    rng = np.random.default_rng(4)
    powers = [np.clip(2**k + np.arange(-300, 300), 0, 2**32 - 1) for k in range(33)]
    r = np.unique(np.concatenate([rng.integers(0, 2**32, 600_000), np.arange(200_000), *powers])).astype(np.uint32)
    gap = apply("bound", r).astype(np.float64) - apply("gumbel", r).astype(np.float64)
    assert gap.min() > -5e-4  # kBoundSlack is 1e-3
    assert gap[(r > 64) & (r < 2**25)].max() < 0.07
    assert gap[(r > 64) & (r < 2**31)].max() < 0.1


PINNED = {  # a seed means a text for good: these bits must never change (docs/decisions.md)
    "gumbel": [0, 1, 330, 0x3fffffff, 0x49ffffff, 0x4a000000, 0x4cccccdb, 0x80000000, 0xa1d2f1a9, 0xfffffffe, 0xffffffff],
    "log": [0x00800000, 0x3f3504f2, 0x3f3504f3, 0x3f7fffff, 0x3f800001, 0x402df854, 0x7f7fffff],
    "exp2": [0xb3000000, 0xbeffffff, 0xbf000001, 0xbf3504f3, 0xc0490fdb, 0xc2c80000, 0xc2fbffff],
}
BITS = {
    "gumbel": [0x41b6fda9, 0x41ae33b3, 0x41830a74, 0x3f9f79a2, 0x3f89a5cc, 0x3f89a5cc, 0x3f83f587, 0x3ebba795, 0xb749ffb0,
               0xc0452b66, 0xc04851d5],
    "log": [0xc2aeac50, 0xbeb1721b, 0xbeb17218, 0xb3800000, 0x33ffffff, 0x3f800000, 0x42b17218],
    "exp2": [0x3f800000, 0x3f3504f4, 0x3f3504f3, 0x3f1ccfe7, 0x3de8118d, 0x0d800000, 0x0080002c],
}


@pytest.mark.parametrize("name", PINNED)
def test_bits_that_texts_depend_on(apply, name):
    assert apply(name, np.array(PINNED[name], dtype=np.uint32)).view(np.uint32).tolist() == BITS[name]


def test_noise_of_the_oracle_is_the_same_stream(apply):
    """reference/noise.py (float64, written apart) against philox + gumbel of the header for far ids, positions and seeds."""
    ids = np.array([0, 1, 2, 3, 4, 7, 151_935, 2**20 - 1], dtype=np.int64)
    words, want = [], []
    for seed, position in ((0, 0), (2**63 - 1, 2**32 - 1), (-1, 7), (123456789123, 4096)):
        k = seed & (2**64 - 1)
        four = philox4x32((ids >> 2, position, 0, 0), (k & 0xFFFFFFFF, k >> 32))
        words += [four[i & 3][j] for j, i in enumerate(ids)]
        want += gumbel(ids, position, seed).tolist()
    np.testing.assert_allclose(apply("gumbel", np.array(words, dtype=np.uint32)), want, rtol=1e-6, atol=1e-6)


def test_masses(apply):
    rng = np.random.default_rng(4)
    z = np.concatenate([-np.abs(spread(rng, 1e-20, 100.0, 200_000)), np.float32([0.0, -0.0, -29.8, -29.9, -87.0, -88.0, -1e38, -INF])])
    m, want = apply("mass", z).astype(np.float64), np.exp(z.astype(np.float64)) * 2.0**43
    assert np.all(np.abs(m - want) <= want * (2.0**-23 + 2.0**-23 * np.abs(z.clip(-200))) + 1)
    assert m.max() == 2.0**43 and m[z == 0].min() == 2.0**43 and m[z <= -30].max() <= 1
    sums = np.concatenate([2.0 ** rng.uniform(0, 63, 200_000), 2.0 ** np.arange(63), 2.0 ** np.arange(1, 63) - 1]).astype(np.uint64)
    got = apply("log_mass", sums).astype(np.float64)
    assert np.all(np.abs(got - (np.log(sums.astype(np.float64)) - 43 * np.log(2))) <= 2.5e-6)
    assert np.isneginf(apply("log_mass", np.uint64([0]))[0])
    assert apply("log_mass", np.uint64([2**43]))[0] == pytest.approx(0.0, abs=1.5e-6)


def test_order_maps_are_exact_and_monotone(apply):
    rng = np.random.default_rng(5)
    x = rng.integers(0, 2**32, 300_000).astype(np.uint32)
    x = np.concatenate([x[~np.isnan(x.view(np.float32))], floats([0, 2**31, 1, 2**31 + 1, 0x7f800000, 0xff800000]).view(np.uint32)])
    assert apply("order", x).all()


HEADER = struct.Struct("<4i6f q 2I")  # Case of numeric_driver.cpp
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def make_rows(count: int = 360) -> list:
    """(header fields, row tensor): ragged sizes, ties, broken and extreme entries, every filter and extra."""
    g = torch.Generator().manual_seed(9)
    pick = lambda *v: v[int(torch.randint(0, len(v), (), generator=g))]  # noqa: E731
    out = []
    for i in range(count):
        n, dtype = pick(1, 2, 5, 63, 64, 65, 255, 256, 257, 1000, 5003), i % 3
        x = torch.randn(n, generator=g) * pick(0.01, 1.0, 3.0, 30.0)
        kind = i % 9
        if kind == 1:
            x = x.round()
        elif kind == 2:
            x[torch.randint(0, n, (1 + n // 9,), generator=g)] = pick(NAN, INF, -INF)
        elif kind == 3:
            x = x * pick(1e30, 1e-30, 1e-42)
        elif kind == 4:
            x.fill_(pick(0.0, -0.0, 1.5, -INF, NAN, -3.4e38))
        elif kind == 5:
            x[::2] = -x[::2].abs() * 0.0
        fields = [dtype, n, pick(0, 0, 1, 2, 7, 40, n, 2**30), pick(1, 1, 1, 0), pick(0.0, 0.7, 1.0, 1.3, 1e-3, 1e-39, 1e30, NAN),
                  pick(1.0, 1.0, 0.9, 0.5, 0.01, 0.0, 1 - 2**-24, 7.0), pick(0.0, 0.0, 0.05, 0.5, 1.0), pick(1.0, 1.3, 0.7), pick(0.0, 0.4),
                  pick(0.0, -0.3), int(torch.randint(-2**63, 2**63 - 1, (), generator=g)), pick(0, 1, 4095, 2**32 - 1), pick(0, 0, 1, 2, 3, 4, 7)]
        out.append((fields, x.to(DTYPES[dtype])))
    return out


def test_rows_have_equal_bits_in_every_build(drivers, tmp_path):
    """choose_token at every level gives one and the same keys, masses and logarithms; the installed library the same tokens."""
    cases = make_rows()
    (tmp_path / "in").write_bytes(b"".join(
        HEADER.pack(*f) + x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy().tobytes() for f, x in cases))
    results = {}
    for name, run in drivers.items():
        run("rows", tmp_path / "in", tmp_path / "out")
        results[name] = np.fromfile(tmp_path / "out", dtype=np.uint64).reshape(len(cases), 4)
    first = next(iter(results.values()))
    for name, got in results.items():
        assert np.array_equal(got, first), (name, np.nonzero((got != first).any(1))[0][:5])
    tokens = 0
    for (f, x), (key, bad, _, _) in zip(cases, first):
        dtype, n, top_k, rule, t, top_p, min_p, _, _, _, seed, position, extras = f
        if extras & 4 or not 1 <= position < 2**31:
            continue
        words = philox4x32((np.arange(n), position, 3, 0), (1, 2))[0].astype(np.uint32)
        out = run_op(
            "cpu", "verify_tree", logits=x[None], tokens=torch.zeros(1, dtype=torch.int32), parents=torch.tensor([-1], dtype=torch.int32),
            cu_nodes=torch.tensor([0, 1], dtype=torch.int32), prefix_len=torch.tensor([position - 1], dtype=torch.int32),
            active=torch.ones(1, dtype=torch.int32), remaining=torch.tensor([5], dtype=torch.int32), temperature=torch.tensor([t]),
            top_k=torch.tensor([top_k], dtype=torch.int32), top_p=torch.tensor([top_p]), min_p=torch.tensor([min_p]),
            seed=torch.tensor([seed]), out_tokens=torch.zeros(1, 1, dtype=torch.int64), num_tokens_out=torch.zeros(1, dtype=torch.int32),
            path=torch.zeros(1, 1, dtype=torch.int32), next_root=torch.zeros(1, dtype=torch.int64), flags=torch.zeros(1, dtype=torch.int32),
            bias=torch.from_numpy((words.view(np.int32) >> 24).astype(np.float32) / 64)[None] if extras & 1 else None,
            bitmask=torch.from_numpy(np.packbits(np.pad((words & 4096) != 0, (0, -n % 32)), bitorder="little").view(np.int32))[None]
            if extras & 2 else None, vocab_size=n, rule=rule)
        emitted = int(out["num_tokens_out"])
        assert emitted == (key != 0) and bool(out["flags"] & 16) == bool(bad)
        if emitted:
            tokens += 1
            assert int(out["next_root"]) == 2**20 - 1 - (int(key) & (2**20 - 1))
    assert tokens > 80 and (first[:, 1] != 0).sum() > 20 and (first[:, 0] == 0).sum() > 3


def test_every_level_ran_or_says_why_not(drivers):
    missing = [name for name in BUILDS if name not in drivers]
    assert {"O0"} <= set(drivers)
    if missing:
        pytest.skip(f"built, but not run on this machine: {', '.join(missing)}")
