"""next_inputs: oracle on random cases, the ring's records, clamps, and every bad argument."""

import copy

import pytest
import torch

from cases import cumulative, randint
from conftest import positional, run_op
from fastverify import Flag, Ring, _ops, next_inputs
from fastverify.accept.verify_tree import Verified
from fastverify.kv.next_inputs import FIELDS, HEADER, Pairs
from fastverify.tree import Tree

OP = "next_inputs"
FLAGS = [0, 0, 0, int(Flag.STOP), int(Flag.BUDGET), int(Flag.BAD_TOKEN), int(Flag.EMPTY_ROW), int(Flag.BAD_ROW | Flag.STOP)]


def case(rng, batch: int, width: int, nodes: int, pairs: int = 0, ring: int = 0, spare: int = 3) -> dict:
    """Random outputs of a verify over trees of up to `nodes` nodes; outputs hold a sentinel."""
    live = [int(randint(0, 4, rng)) > 0 for _ in range(batch)]
    counts = [int(randint(1, nodes + 1, rng)) if x else 0 for x in live]
    rows = batch * nodes
    i32 = dict(dtype=torch.int32)
    tokens, path = torch.full((batch, width), -1, dtype=torch.int64), torch.full((batch, width), -1, **i32)
    num = torch.zeros(batch, **i32)
    for b, n in enumerate(counts):
        long = int(randint(1, min(width, n) + 1, rng)) if n else 0
        path[b, :long] = torch.arange(long, **i32)
        num[b] = int(randint(0, long + 1, rng)) if long else 0
        tokens[b, : int(num[b])] = torch.randint(0, 1 << 20, (int(num[b]),), generator=rng)
    c = dict(out_tokens=tokens, num_tokens_out=num, path=path, next_root=torch.randint(0, 1 << 20, (batch,), generator=rng),
             flags=torch.tensor([FLAGS[int(randint(0, len(FLAGS), rng))] for _ in range(batch)], **i32),
             cu_nodes=cumulative(counts), depth=torch.randint(0, 9, (rows,), generator=rng, **i32),
             active=torch.tensor(live, **i32), prefix_len=torch.randint(0, 5000, (batch,), generator=rng, **i32),
             root=torch.full((batch,), -7, **i32), next_tokens=torch.full((batch * width + spare,), -9, **i32), first=5)
    if pairs:
        c |= dict(pair_slots=torch.full((rows,), -9, dtype=torch.int64), pair_tokens=torch.full((batch * pairs + 1,), -9, **i32),
                  pair_count=torch.randint(0, pairs + 1, (batch,), generator=rng, **i32))
    if ring:
        c |= dict(sequence=torch.tensor([2**31 - 2 + int(randint(0, 9, rng)) if ring == 1 else 11]),
                  ring=torch.full((ring, HEADER + batch * (FIELDS + width) + 2), -9, **i32))
    return c


@pytest.mark.parametrize("batch,width,nodes", [(1, 1, 1), (1, 6, 20), (4, 4, 8), (32, 1, 1), (33, 5, 7), (200, 3, 3)])
@pytest.mark.parametrize("pairs,ring", [(0, 0), (3, 0), (0, 3), (2, 5)])
def test_against_the_oracle(backend, rng, batch, width, nodes, pairs, ring):
    if backend == "cuda" and ring:
        pytest.skip("a GPU needs a pinned ring: test_ring")
    for _ in range(4):
        c = case(rng, batch, width, nodes, pairs, ring)
        got, want = run_op(backend, OP, **c), run_op("reference", OP, **c)
        for name, value in want.items():
            assert torch.equal(got[name], value), name


def test_lengths_that_lie_are_clamped(backend):
    """More tokens than columns, negative counts, cu_nodes outside the rows: nothing is read or written out of bounds."""
    i32 = dict(dtype=torch.int32)
    c = dict(out_tokens=torch.arange(6).view(3, 2), num_tokens_out=torch.tensor([9, -4, 1], **i32), path=torch.zeros(3, 2, **i32),
             next_root=torch.tensor([1, 2, 3]), flags=torch.zeros(3, **i32), cu_nodes=torch.tensor([-5, 2, 900, 7], **i32),
             depth=torch.ones(4, **i32), active=torch.ones(3, **i32), prefix_len=torch.zeros(3, **i32), root=torch.zeros(3, **i32),
             next_tokens=torch.full((6,), -9, **i32), first=0)
    got = run_op(backend, OP, **c)
    assert got["prefix_len"].tolist() == [2, 0, 1] and got["next_tokens"].tolist() == [0, 1, 4, 0, 0, 0]
    assert got["root"].tolist() == [1, 0, 3]


def test_counters_at_the_end_come_round(rng):
    c = case(rng, 2, 3, 4, ring=3)
    c["sequence"].fill_(2**63 - 1)
    c["prefix_len"].fill_(2**31 - 1)
    c["active"].fill_(1)
    c["num_tokens_out"].fill_(2)
    got = run_op("cpu", OP, **c)
    assert got["sequence"].tolist() == [-(2**63)] and got["prefix_len"].tolist() == [1 - 2**31] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ring(device):
    """Records come in order and wrap; a record that was never written is waited for in vain."""
    ring = Ring(4, 3, device, slots=2)
    out, tree = Verified.empty(2, 3, device), Tree.empty(2, 4, device=device)
    i32 = dict(dtype=torch.int32, device=device)
    active, prefix, root = torch.ones(2, **i32), torch.zeros(2, **i32), torch.zeros(2, **i32)
    tree.cu_nodes.copy_(torch.tensor([0, 4, 4]))
    tree.depth.copy_(torch.tensor([0, 1, 1, 2, 0, 0, 0, 0]))
    for number in range(1, 6):
        out.out_tokens.fill_(number)
        out.num_tokens_out.copy_(torch.tensor([number % 3, 0]))
        out.path.copy_(torch.tensor([[0, 1, -1], [-1, -1, -1]]))
        out.flags.zero_()
        next_inputs(out, tree, active, prefix, root, ring=ring, first=number)
        first, rows = ring.read(number)
        assert first == number and rows.shape == (2, FIELDS + 3)
        assert rows[0].tolist() == [number % 3, 0, 1, 4, 2] + [number] * (number % 3) + [-1] * (3 - number % 3)
        assert rows[1].tolist() == [0, 0, -1, 0, 0, -1, -1, -1] and not ring.ready(number + 1)
    assert prefix.tolist() == [1 + 2 + 0 + 1 + 2, 0]
    with pytest.raises(TimeoutError, match="record 6 must come within 0.01 s"):
        ring.read(6, 0.01)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copied_ring_sees_its_own_memory(device):
    with torch.device("meta"):  # nor does the default device matter
        ring = Ring(1, 1, device)
    other = copy.deepcopy(ring)
    other.words[0, :4] = torch.tensor([1, 1, 1, 0], dtype=torch.int32)
    assert other.ready(1) and other.read(1)[1].shape == (1, FIELDS + 1) and not ring.ready(1)
    assert other.words.is_pinned() == ring.words.is_pinned() == (device == "cuda")


BAD = [
    ("num_tokens_out", lambda c: c["num_tokens_out"].long(), "num_tokens_out must be int32 [4] on cpu; got int64 [4] on cpu. Fix: cast"),
    ("path", lambda c: c["path"][:, :2].contiguous(), "path must be int32 [4, 3] on cpu; got int32 [4, 2] on cpu. Fix: pass that shape"),
    ("next_tokens", lambda c: c["next_tokens"][:5].contiguous(), "next_tokens must hold 12 tokens; got 5. Fix: allocate B * D."),
    ("pair_count", lambda c: None, "pair_slots, pair_tokens and pair_count must be given together"),
    ("pair_tokens", lambda c: c["pair_tokens"][:-2].contiguous(), "pair_tokens must hold B * P + 1 tokens; got 7 for 4 requests."),
    ("sequence", lambda c: None, "sequence and ring must be given together; got only ring."),
    ("ring", lambda c: c["ring"][:, :9].contiguous(), "ring must be int32 [slots, >= 36] on cpu"),
    ("ring", lambda c: c["ring"].long(), "ring must be int32 [slots, >= 36] on cpu (pinned for a GPU), contiguous; got int64"),
]


@pytest.mark.parametrize("name,change,message", BAD)
def test_bad_arguments(rng, name, change, message):
    c = case(rng, 4, 3, 2, pairs=2, ring=2)
    with pytest.raises(RuntimeError, match="^next_inputs: ") as error:
        run_op("cpu", OP, **(c | {name: change(c)}))
    assert message in str(error.value)


def test_opcheck(rng):
    c = case(rng, 4, 3, 2, pairs=2, ring=2)
    torch.library.opcheck(_ops.get(OP), positional(OP, **c))


def test_the_wrapper_hands_everything_on(rng):
    c = case(rng, 4, 1, 1, pairs=2)
    want = run_op("reference", OP, **c)
    out = Verified(c["out_tokens"], c["num_tokens_out"], c["path"], c["next_root"], c["flags"])
    tree = Tree.empty(4, 1)._replace(cu_nodes=c["cu_nodes"], depth=c["depth"])
    next_inputs(out, tree, c["active"], c["prefix_len"], c["root"], next_tokens=c["next_tokens"],
                pairs=Pairs(c["pair_tokens"], c["pair_count"], c["pair_slots"]))
    for name, value in want.items():
        assert torch.equal(c[name], value), name
