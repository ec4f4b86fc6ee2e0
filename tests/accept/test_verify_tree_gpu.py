"""verify_tree on the GPU against the CPU kernel, bit for bit: sizes, processors, graph replays, large offsets."""

import pytest
import torch

from cases import verify_case
from conftest import mutable_names, positional, run_op
from fastverify import _ops, verify_tree_workspace

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = (lambda t: t.view(torch.int32)) if a.dtype == torch.float32 else (lambda t: t)
    return torch.equal(bits(a), bits(b))


def assert_equals_cpu(case: dict) -> dict:
    """Path only (no workspace), all rows at once, and once more with the same workspace."""
    want = run_op("cpu", "verify_tree", **case)
    memory = verify_tree_workspace()
    for workspace in (None, memory, memory):
        got = run_op("cuda", "verify_tree", **{**case, "workspace": workspace})
        for name, value in want.items():
            assert same(got[name], value), (name, workspace is not None)
    return want


@pytest.mark.parametrize("vocab", [32000, 49152, 128256, 151936, 163840, 50257, 33333])
@pytest.mark.parametrize("temperature,filters,extras", [(0.0, False, False), (0.9, False, False), (0.8, True, False), (0.9, True, True)])
def test_vocabularies(rng, vocab, temperature, filters, extras):
    for dtype in DTYPES:
        case = verify_case(rng, batch=3, nodes=6, vocab=vocab, dtype=dtype, temperature=temperature, filters=filters, extras=extras,
                           agree=0.9, pad=[0, 5, 8][int(torch.randint(0, 3, (), generator=rng))])
        assert_equals_cpu(case)


@pytest.mark.parametrize("batch,nodes", [(1, 1), (1, 64), (1, 1024), (2, 300), (8, 32), (40, 16), (256, 4)])
def test_batches_and_trees(rng, batch, nodes):
    for filters in (False, True):
        case = verify_case(rng, batch=batch, nodes=nodes, vocab=5003, dtype=torch.bfloat16, temperature=0.9, filters=filters, agree=0.95)
        assert_equals_cpu(case)


@pytest.mark.parametrize("kind", ["ties", "equal", "-inf", "nan", "inf", "huge", "one allowed"])
def test_rows_of_every_kind(rng, kind):
    for temperature, filters in ((0.0, False), (1.0, False), (0.7, True)):
        case = verify_case(rng, batch=6, nodes=5, vocab=40000, temperature=temperature, filters=filters, agree=0.9)
        x = case["logits"]
        if kind == "ties":
            x.copy_(x.round())
        elif kind == "equal":
            x.fill_(1.5)
        elif kind == "huge":
            x.mul_(1e37)
        elif kind == "one allowed":
            case["bitmask"] = torch.zeros(x.shape[0], 1250, dtype=torch.int32)
            case["bitmask"][:, 77] = 1 << 5
        else:
            x[torch.rand(x.shape, generator=rng) < 1e-4] = float(kind)
            x[2] = float(kind)
        assert_equals_cpu(case)


def test_graph_replays_with_changing_contents_equal_eager(rng):
    """1,000 replays; inputs change between them, nothing of the launch does."""
    op, mutable = _ops.get("verify_tree"), mutable_names("verify_tree")
    for batch, nodes, filters in ((1, 16, False), (4, 8, True), (20, 8, False)):
        cases = [verify_case(rng, batch=batch, nodes=nodes, vocab=8000, dtype=torch.bfloat16, temperature=0.9, filters=filters,
                             agree=0.9, logprobs=False) for _ in range(10)]
        eager = [run_op("cpu", "verify_tree", **c) for c in cases]
        on_gpu = [{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in c.items()} for c in cases]
        static = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in on_gpu[0].items()}
        static["workspace"] = verify_tree_workspace()
        op(*positional("verify_tree", **static))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op(*positional("verify_tree", **static))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        want = [{k: v.cuda() for k, v in e.items()} for e in eager]
        for i in range(340):
            k = (7 * i) % len(cases)
            for name, value in on_gpu[k].items():
                if isinstance(value, torch.Tensor):
                    static[name].copy_(value)
            graph.replay()
            for name, value in want[k].items():
                if name in mutable and name != "workspace":
                    wrong += (static[name] != value).any()
        assert wrong.item() == 0


def test_more_than_two_to_the_31_elements():
    """Offsets of the last rows exceed 32 bits."""
    rows, vocab = 16800, 128256
    if torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("needs 6 GB of free GPU memory")
    assert rows * vocab > 2**31
    gen = torch.Generator(device="cuda").manual_seed(1)
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device="cuda")
    logits[-40:] = torch.randn(40, vocab, device="cuda", generator=gen)
    case = verify_case(torch.Generator().manual_seed(2), batch=2, nodes=8, vocab=100, temperature=0.9, fixed_nodes=True, logprobs=True)
    case["active"].fill_(1)
    parents = torch.full((rows,), -1, dtype=torch.int32)
    parents[-16:] = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 6] * 2)
    tokens = torch.zeros(rows, dtype=torch.int64)
    case.update(logits=logits, parents=parents, tokens=tokens, cu_nodes=torch.tensor([rows - 16, rows - 8, rows], dtype=torch.int32),
                vocab_size=vocab, stop_ids=None, remaining=torch.full((2,), 100, dtype=torch.int32))
    small = {**case, "logits": logits[-16:], "parents": parents[-16:], "tokens": tokens[-16:], "cu_nodes": torch.tensor([0, 8, 16], dtype=torch.int32)}
    for _ in range(7):  # a chain of the target's own tokens
        out = run_op("cuda", "verify_tree", **small)["out_tokens"]
        for b in range(2):
            tokens[rows - 16 + 8 * b + 1:rows - 8 + 8 * b] = out[b, :7]
    want, got = run_op("cuda", "verify_tree", **small), run_op("cuda", "verify_tree", **case)
    assert (want["num_tokens_out"] > 6).all()
    for name, value in want.items():
        assert same(got[name], value), name


def test_a_small_workspace_raises_in_words(rng):
    case = verify_case(rng, batch=2, nodes=4, vocab=11, fixed_nodes=True)
    with pytest.raises(RuntimeError, match="verify_tree: workspace must have at least 5767296 bytes; got 5. Fix: "):
        run_op("cuda", "verify_tree", **{**case, "workspace": torch.zeros(5, dtype=torch.uint8)})
