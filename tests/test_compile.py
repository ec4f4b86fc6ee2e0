"""torch.compile(fullgraph=True) around a whole verify step: no graph break, no warning, the same result."""

import warnings

import pytest
import torch

import fastverify as fv
from cases import page_tables

B, N, V, H, HQ, HKV, D, PAGE = 3, 8, 37, 16, 4, 2, 16, 4


def world(seed: int, temperature: float):
    """(step, arguments, everything the step writes); equal for equal seeds."""
    g = torch.Generator().manual_seed(seed)
    plan = fv.VerifyPlan(B, N, 4, H, logprobs=True)
    page_table, pages = page_tables(B, 40, PAGE, g)
    cache = fv.KVCache(2, pages, PAGE, HKV, D)
    cache.k.normal_(generator=g)
    cache.v.normal_(generator=g)
    i32 = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    prefix_len, active, remaining = i32(5, 9, 17), i32(1, 0, 1), i32(10, 10, 2)
    sampling = fv.Sampling.make(B, temperature=temperature, top_k=9, top_p=0.97, min_p=0.01, seed=3)
    counts = torch.zeros(B, V, dtype=torch.int32)
    penalties = torch.tensor([[1.1, 0.1, 0.2]]).repeat(B, 1)
    pool_tokens = torch.randint(0, V, (B, 12), generator=g).int()
    pool = (-torch.rand(B, 12, generator=g), pool_tokens, i32(-1, -1, -1, 0, 0, 1, 1, 2, 3, 4, 5, 6).repeat(B, 1))
    cos_sin = torch.randn(64, D, generator=g)
    logits = torch.randn(B * N, V, generator=g)
    for row in range(0, B * N, N):  # every root row likes the first drafted ids
        logits[row].index_fill_(0, pool_tokens[row // N, :3].long(), 4.0)
    q, k, v = (torch.randn(B * N, h, D, generator=g) for h in (HQ, HKV, HKV))
    aux = torch.randn(B * N, H, generator=g)

    def step(logits, q, k, v, aux, root, prefix_len, active, remaining):
        t, p = plan.tree, plan.prepared
        fv.build_tree(*pool, root, prefix_len, active, N, V, t)
        fv.prepare_tree(t.parents, t.cu_nodes, prefix_len, page_table, PAGE, p)
        attended = []
        for layer in range(2):
            fv.rope_append(q, k, v, t.positions, p.slots, cos_sin, cache.k[layer], cache.v[layer])
            attended.append(fv.tree_attention(q, cache.k[layer], cache.v[layer], t.cu_nodes, prefix_len, page_table, mask=t.mask,
                                              schedule=p.schedule))
        out = fv.verify_tree(logits, t.tokens, t.parents, t.cu_nodes, prefix_len, active, remaining, sampling, penalties=penalties,
                             counts=counts, vocab_size=V, stop_ids=torch.tensor([36]), out=plan.out)
        fv.compact_kv(cache.k, cache.v, out.path, out.num_tokens_out, prefix_len, page_table, cu_nodes=t.cu_nodes, aux=aux,
                      aux_out=plan.aux_out, cu_out=plan.cu_out)
        return attended[0] + attended[1], plan.flatten_tokens(), prefix_len + out.num_tokens_out

    written = (*plan.tree, *(x for x in plan.prepared if x is not None), *plan.out, plan.aux_out, plan.cu_out, cache.k, cache.v,
               counts, remaining, q)
    return step, (logits, q, k, v, aux, i32(1, 2, 3), prefix_len, active, remaining), written, plan


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_verify_step_traces_whole(temperature):
    torch._dynamo.reset()
    step, args, want_written, _ = world(0, temperature)
    want = step(*args)
    traced, args, written, plan = world(0, temperature)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.compile(traced, fullgraph=True, backend="eager")(*args)
    for a, b in zip((*got, *written), (*want, *want_written), strict=True):
        assert torch.equal(a, b)
    assert plan.out.num_tokens_out[0] >= 1 and plan.out.num_tokens_out[1] == 0 and (plan.out.path[0] > 0).any()


def test_wrappers_that_allocate_trace_too():
    """Outputs allocated by the wrapper, and the remaining ops."""
    g = torch.Generator().manual_seed(1)
    i32 = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    hidden, weight = torch.randn(4, 16, generator=g), torch.randn(20, 16, generator=g)
    sampling = fv.Sampling.make(1, temperature=0.7, seed=1)
    tree = (i32(0, 3, 4, 5), i32(-1, 0, 0, 1), i32(0, 4), i32(7), i32(1))

    def accept(hidden, remaining):
        logits = hidden @ weight.T
        a = fv.verify_tree(logits, *tree, remaining.clone(), sampling, max_path=4, logprobs=True)
        b = fv.lm_head_verify_tree(hidden, weight, *tree, remaining.clone(), sampling, max_path=4)
        c = fv.verify_tree_sharded(logits, *tree, remaining.clone(), sampling, lambda w: w[None], vocab_offset=0, vocab_size=20,
                                   filters=True, max_path=4)
        d = fv.draft_topk(logits, 3)
        return a.out_tokens, a.num_tokens_out, a.logprobs, b.out_tokens, c.out_tokens, *d

    torch._dynamo.reset()
    want = accept(hidden, i32(9))
    got = torch.compile(accept, fullgraph=True, backend="eager")(hidden, i32(9))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(want[0], want[4])  # one shard is the whole vocabulary
