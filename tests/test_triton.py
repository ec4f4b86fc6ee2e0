"""The Triton back end: registration, argument texts, and its kernels against the CPU ops.

The kernels run on a GPU, or with TRITON_INTERPRET=1 on small cases here (about 40 s; CI does that); the ops' own tests cover
them too then (`backend` "triton"). Bits are compared: no tolerance.
"""

import inspect
import os
import subprocess
import sys

import pytest
import torch

import conftest
from cases import cumulative, page_tables, random_parents, randint, verify_case
from conftest import positional, run_op, schema
from fastverify import _ops, _triton
from fastverify.tree.build_tree import Tree
from fastverify.tree.grow_tree import DraftState
from fastverify.tree.prepare_tree import Prepared

I32, I64 = torch.int32, torch.int64
EXISTING = [op for op in _triton.MODULES if _triton.exists(op)]
needs_triton = pytest.mark.skipif(not _triton.installed(), reason="triton is not installed")
runs_triton = pytest.mark.skipif(not conftest.TRITON, reason="needs triton and a GPU, or TRITON_INTERPRET=1")


def python(code: str, **env) -> str:
    """Standard output of `code` in a process of its own; `env` without TRITON_INTERPRET."""
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FASTVERIFY_BACKEND")}
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], env={**clean, **env}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- registration -------------------------------------------------------------------------------------------------

def test_every_file_is_in_the_table_and_every_op_of_the_table_exists():
    package = os.path.dirname(_ops.__file__)
    found = {f[:-len("_triton.py")] for folder, _, files in os.walk(package) for f in files if f.endswith("_triton.py")}
    assert set(_triton.MODULES) <= set(_ops._NAMES)
    assert {op for op in found if op in _ops._NAMES} == set(EXISTING) - {"probe"}
    for stage, op in (m.split(".") for m in _triton.MODULES.values() if "." in m):
        assert op == op.lower() and stage in ("tree", "attention", "accept", "kv")


@needs_triton
def test_has_kernel_counts_triton_and_nothing_imports_it():
    code = ("import sys, fastverify, fastverify._ops as o, fastverify.tree, fastverify.accept.verify_tree\n"
            "print([op for op in %r if not o.has_kernel(op, 'cuda')], 'triton' in sys.modules)" % EXISTING)
    assert python(code) == "[] False"
    assert python(code, FASTVERIFY_BACKEND="triton") == "[] False"


@needs_triton
def test_forced_backend_replaces_compiled_kernels():
    code = "import fastverify._ops as o; print(sorted(o._TRITON))"
    assert python(code, FASTVERIFY_BACKEND="triton") == str(sorted(EXISTING))
    native = [op for op in EXISTING if _ops.has_native_kernel(op, "cuda")]
    assert python(code) == str(sorted(set(EXISTING) - set(native)))


def test_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("FASTVERIFY_BACKEND", "cuda")
    with pytest.raises(RuntimeError, match="fastverify: FASTVERIFY_BACKEND must be triton or unset; got cuda. Fix: unset it."):
        _triton.forced()


def test_without_triton_nothing_is_registered(monkeypatch):
    monkeypatch.setattr(_triton, "installed", lambda: False)
    assert _triton.register(list(_triton.MODULES)) == set()


@pytest.mark.parametrize("capability,archs,ptx,fits", [
    ((9, 0), ["90"], None, True), ((9, 0), ["80", "89"], None, False), ((8, 9), ["80"], None, True),
    ((8, 0), ["89"], None, False), ((12, 0), ["80", "90"], "90", True), ((12, 0), ["80", "90"], None, False),
    ((9, 0), ["90a"], None, True), ((12, 1), ["120a"], None, False), ((8, 6), [], None, False), ((8, 0), ["90"], "90", False)])
def test_which_builds_run_on_which_gpus(capability, archs, ptx, fits):
    assert _ops.runs_on(capability, archs, ptx) is fits


@pytest.mark.parametrize("capability,taken", [((9, 0), False), ((7, 5), True)])
def test_triton_takes_over_on_a_gpu_that_the_build_has_no_code_for(monkeypatch, capability, taken):
    asked = []
    monkeypatch.setattr(_ops, "_fitting_devices", set())
    monkeypatch.setattr(_ops, "_NATIVE", {("probe", "cpu"), ("probe", "cuda"), ("compact_kv", "cpu")})
    monkeypatch.setattr(_ops, "_KERNELS", {("probe", "cuda")})
    monkeypatch.setattr(_ops, "_TRITON", set())
    monkeypatch.setattr(_ops, "build_info", lambda: {"cuda": "13.0", "cuda_archs": ["80", "90"], "cuda_ptx": None})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(_triton, "register", lambda ops: asked.append(ops) or set(ops))
    for _ in range(2):  # looked up once per device
        _ops.require_kernel("probe", torch.device("cuda:0"))
    assert asked == ([["probe"]] if taken else [])


@needs_triton
@pytest.mark.parametrize("rows", [1, 16, 64, 513, 4096])
@pytest.mark.parametrize("vocab", [1, 37, 1025, 32000, 128256, 1 << 20])
@pytest.mark.parametrize("sms", [108, 128, 132, 148, 188])  # sm_80, 89, 90, 100, 120
def test_splits_of_verify_tree_cover_every_entry_once(rows, vocab, sms):
    from fastverify.accept import verify_tree_triton as module
    tile, splits, span = module.launch_shape(rows, vocab, sms)
    assert span % tile == 0 and tile % module.GROUP == 0 and 1 <= splits <= module.MAX_SPLITS
    assert (splits - 1) * span < vocab <= splits * span
    assert splits == 1 or rows * splits <= 2 * sms


# ---- cases --------------------------------------------------------------------------------------------------------

def draft_topk_case(rng, rows=4, n=300, k=5, dtype=torch.float32):
    logits = (torch.randn(rows, n, generator=rng) * 3).to(dtype)
    logits[0, 7], logits[1, 3:9], logits[2] = float("nan"), logits[1].max(), -float("inf")
    return dict(logits=logits, d2t=randint(0, 99, rng, (n,)), cu_nodes=cumulative([1, rows - 2]),
                values=torch.full((rows, k), float("nan")), tokens=torch.full((rows, k), -9, dtype=I32))


def coupled_topk_case(rng, rows=6, batch=3, **size):
    coupling = dict(temperature=torch.tensor([0.8, 0.0, 1.3])[:batch], seed=randint(-2**62, 2**62, rng, (batch,)),
                    prefix_len=randint(0, 9999, rng, (batch,)).to(I32), active=torch.ones(batch, dtype=I32), level=2, sharpness=0.8)
    return {**draft_topk_case(rng, rows=rows, **size), "cu_nodes": None, **coupling}


def poisoned(t: torch.Tensor) -> torch.Tensor:
    return t.fill_(-77)


def grow_tree_case(rng, level, batch=3, k=3, hidden=20):
    state = DraftState.empty(batch, k, 4, hidden)
    active = torch.tensor([1, 0, 1], dtype=I32)
    rows = batch if level == 0 else batch * k
    if level == 0:
        state = DraftState(*(poisoned(t) for t in state))
    else:
        for t in (state.pool_scores, state.next_hidden, state.next_tokens):
            poisoned(t)
        state.scores.copy_(-torch.rand(batch * k, generator=rng))
        state.mask.copy_(randint(0, 2**60, rng, state.mask.shape))
        state.pool_index.copy_(randint(0, k, rng, (batch * k,)))
    values = -torch.rand(rows, k, generator=rng).mul(4).round().div(4)
    values[0, 0] = float("nan")
    return dict(values=values, tokens=randint(0, 99, rng, (rows, k)).to(I32), hidden=torch.randn(rows, hidden, generator=rng),
                prefix_len=randint(0, 99, rng, (batch,)).to(I32), active=active, level=level, **state._asdict())


def build_tree_case(rng, batch=3, pool=40, nodes=12, ids=I32):
    parents = torch.stack([torch.tensor(random_parents(pool, rng, forest=True), dtype=I32) for _ in range(batch)])
    scores = -torch.rand(batch, pool, generator=rng).mul(8).round().div(8)
    parents[0, 5], scores[1, 3], scores[1, 10:] = 5, float("nan"), -float("inf")
    out = Tree(*(poisoned(t) for t in Tree.empty(batch, nodes, ids)))
    return dict(pool_scores=scores, pool_tokens=randint(-1, 50, rng, (batch, pool)).to(ids), pool_parents=parents,
                root_tokens=randint(0, 50, rng, (batch,)).to(ids), prefix_len=randint(0, 99, rng, (batch,)).to(I32),
                active=torch.tensor([1, 1, 0], dtype=I32), num_nodes=nodes, vocab_size=49, **out._asdict())


def prepare_tree_case(rng, chain=False, row_base=0):
    counts, page = [5, 0, 70, 1], 4
    prefix = randint(0, 900, rng, (4,)).to(I32)
    table, _ = page_tables(4, 1000, page, rng)
    table[3, 10] = -1
    parents = sum((random_parents(c, rng, forest=row_base > 0) for c in counts if c), [])
    parents[3] = 9
    rows = sum(counts) + 3
    out = Prepared(*(poisoned(t) for t in Prepared.empty(rows, 4, 2)))
    return dict(parents=None if chain else torch.tensor(parents + [0] * 3, dtype=I32), cu_nodes=cumulative(counts),
                prefix_len=prefix, page_table=table, page_size=page, row_base=row_base, **out._asdict())


def compact_kv_case(rng, batch=3, depth=5):
    table, pages = page_tables(batch, 40, 4, rng)
    path = torch.tensor([[0, 2, 3, 7, -1], [0, 1, 1, 4, 5], [0, 4, -1, -1, -1]], dtype=I32)
    cu = cumulative([9, 8, 6])
    return dict(k_cache=torch.randn(2, pages, 4, 3, 5, generator=rng), v_cache=torch.randn(2, pages, 4, 7, generator=rng),
                path=path, num_tokens_out=torch.tensor([4, 5, 2], dtype=I32), prefix_len=randint(0, 20, rng, (3,)).to(I32),
                page_table=table, cu_nodes=cu, aux=torch.randn(23, 11, generator=rng), aux_out=torch.full((15, 11), 5.0),
                cu_out=torch.full((4,), -9, dtype=I32))


def verify(rng, **over):
    return verify_case(rng, batch=over.pop("batch", 2), nodes=over.pop("nodes", 3), **over)


CASES = {  # (op, name) -> case
    ("probe", ""): lambda g: dict(x=torch.randn(1500, generator=g), out=torch.zeros(1500)),
    ("draft_topk", ""): draft_topk_case,
    ("draft_topk", "half, one column per lane"): lambda g: draft_topk_case(g, n=5000, k=3, dtype=torch.float16),
    ("draft_topk", "coupled"): coupled_topk_case,
    ("draft_topk", "coupled, inactive request"): lambda g: {**coupled_topk_case(g, n=5000, k=3, dtype=torch.float16),
                                                            "active": torch.tensor([0, 1, 1], dtype=I32)},
    ("grow_tree", "first level"): lambda g: grow_tree_case(g, 0),
    ("grow_tree", "second level"): lambda g: grow_tree_case(g, 1),
    ("grow_tree", "fourth level"): lambda g: grow_tree_case(g, 3),
    ("build_tree", ""): build_tree_case,
    ("build_tree", "larger than a tile, int64"): lambda g: build_tree_case(g, pool=2100, nodes=70, ids=I64),
    ("prepare_tree", ""): prepare_tree_case,
    ("prepare_tree", "chain"): lambda g: prepare_tree_case(g, chain=True, row_base=9),
    ("prepare_tree", "forest"): lambda g: prepare_tree_case(g, row_base=60),
    ("compact_kv", ""): compact_kv_case,
    ("compact_kv", "half"): lambda g: {k: v.half() if v.is_floating_point() else v for k, v in compact_kv_case(g).items()},
    ("verify_tree", "greedy with everything"): lambda g: verify(g, vocab=37, filters=True, extras=True),
    ("verify_tree", "temperature only"): lambda g: verify(g, vocab=1100, temperature=0.8),
    ("verify_tree", "filters"): lambda g: verify(g, vocab=300, temperature=1.0, filters=True, dtype=torch.float16),
    ("verify_tree", "filters with everything"): lambda g: verify(g, vocab=70, temperature=0.7, filters=True, extras=True),
    ("verify_tree", "more candidates than scratch"): lambda g: {**verify(g, batch=1, nodes=2, vocab=2600, temperature=1.0,
                                                                         scale=0.1), "top_p": torch.tensor([0.97])},
}


# ---- arguments ----------------------------------------------------------------------------------------------------

def bad_arguments(op: str, case: dict):
    """(what, the case with one argument wrong), for every argument in several ways."""
    for a in schema(op):
        value = case.get(a.name)
        if isinstance(value, torch.Tensor):
            yield a.name + " dtype", {a.name: value.to(torch.int16 if value.dtype != torch.int16 else torch.int32)}
            yield a.name + " float64", {a.name: value.to(torch.float64)}
            yield a.name + " dimension", {a.name: value[None]}
            yield a.name + " longer", {a.name: torch.cat([value, value[:1]])}
            if value.dim() > 1:
                yield a.name + " wider", {a.name: torch.cat([value, value[..., :1]], -1)}
                yield a.name + " empty rows", {a.name: value[..., :0]}
            if value.numel() > 1:
                yield a.name + " strided", {a.name: torch.stack([value, value], -1)[..., 0]}
            if value.dim() > 1 and value.shape[0] > 1:
                yield a.name + " expanded", {a.name: value[:1].expand_as(value)}
            if "Optional" in str(a.type):
                yield a.name + " missing", {a.name: None}
        elif isinstance(value, int):
            for wrong in (-1, 0, 7, 10**4, 10**7, 2**31 - 1, 2**31, 2**62):
                yield f"{a.name} {wrong}", {a.name: wrong}
        elif isinstance(value, float):
            for wrong in (1e300, -1e300, 1e-300):
                yield f"{a.name} {wrong}", {a.name: wrong}


def text(call, args) -> str:
    try:
        call(*args)
    except RuntimeError as exc:
        return str(exc).split("\n")[0]
    return ""


@needs_triton
@pytest.mark.parametrize("op", [op for op in EXISTING if any(key[0] == op for key in CASES)])
def test_bad_arguments_raise_the_words_of_the_compiled_op(op, rng):
    case = CASES[next(key for key in CASES if key[0] == op)](rng)
    module = sys.modules[_triton.function(op).__module__]
    assert text(module.check_arguments, positional(op, **case)) == ""
    tried = raised = 0
    for what, change in bad_arguments(op, case):
        args = positional(op, **{**case, **change})
        got, want = text(module.check_arguments, args), text(_ops.get(op), args)
        if "of request" in want or "at request" in want:
            continue  # device values, which a GPU op does not read
        assert got == want, what
        tried, raised = tried + 1, raised + bool(want)
    assert raised >= tried // 3 > 0


# ---- kernels ------------------------------------------------------------------------------------------------------

@needs_triton
@pytest.mark.parametrize("op", EXISTING)
def test_functions_have_the_schema_s_arguments(op):
    assert list(inspect.signature(_triton.function(op)).parameters) == [a.name for a in schema(op)]


@runs_triton
@pytest.mark.parametrize("op,name", CASES)
def test_bits_equal_the_cpu_op(op, name, rng):
    case = CASES[op, name](rng)
    want, got = run_op("cpu", op, **case), run_op("triton", op, **case)
    for key in want:
        assert torch.equal(got[key].view(torch.uint8), want[key].view(torch.uint8)), key


@runs_triton
def test_overlapping_requests_are_refused(rng):
    """Rows belong to the first request that claims them; the CPU op lets both walk."""
    case = verify(rng, batch=3, nodes=3, vocab=20, fixed_nodes=True)
    case.update(active=torch.ones(3, dtype=I32), cu_nodes=torch.tensor([0, 6, 3, 6], dtype=I32))
    case["parents"][:6] = torch.tensor([-1, 0, 0, -1, 0, 0], dtype=I32)
    flags = run_op("triton", "verify_tree", **case)["flags"]
    assert (flags & 4).tolist() == [4, 4, 4]


OPCHECK = """
import sys
sys.path.insert(0, {folder!r})
import torch, test_triton
from conftest import positional
from fastverify import _ops
case = next(make for (op, _), make in test_triton.CASES.items() if op == {op!r})(torch.Generator().manual_seed(0))
args = tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in positional({op!r}, **case))
torch.library.opcheck(_ops.get({op!r}), args)
print({op!r} in _ops._TRITON)
"""


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("op", sorted({op for op, _ in CASES}))
def test_registered_kernels_pass_opcheck(op):
    code = OPCHECK.format(folder=os.path.dirname(__file__), op=op)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "FASTVERIFY_BACKEND": "triton"}, capture_output=True,
                          text=True)
    assert done.returncode == 0 and done.stdout.split() == ["True"], done.stderr[-2000:]
