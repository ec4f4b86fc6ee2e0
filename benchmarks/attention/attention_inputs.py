"""Inputs of the attention benchmarks: one paged cache that every provider reads in its own form, random trees, an oracle."""

from typing import NamedTuple, Optional

import torch


PAGE = 64   # of the pool; smaller page sizes are views of it
BOOST = 9.5  # tree keys lie along the queries, so that a wrong mask changes the output


class Inputs(NamedTuple):
    """One buffer set. Visible keys of node i of request b: the prefix, and the columns j with tree[b, i, j]."""

    q: torch.Tensor           # [B*N, Hq, D]
    k: torch.Tensor           # [pages, PAGE, Hkv, D]
    v: torch.Tensor
    table: torch.Tensor       # int32 [B, pages of a request] of PAGE tokens
    prefix_len: torch.Tensor  # int32 [B]
    cu_nodes: torch.Tensor    # int32 [B+1]
    mask: torch.Tensor        # int64 [B*N, ceil(N/64)]
    tree: torch.Tensor        # bool [B, N, N]
    out: torch.Tensor         # [B*N, Hq, D]

    def paged(self, page_size: int) -> tuple:
        """(k, v, table) with pages of `page_size`, a divisor of PAGE: views and a longer table."""
        split = PAGE // page_size
        shape = (-1, page_size, *self.k.shape[2:])
        table = (self.table[:, :, None] * split + torch.arange(split, device=self.table.device)).flatten(1).int()
        return self.k.view(shape), self.v.view(shape), table


def random_trees(batch: int, nodes: int, device) -> torch.Tensor:
    """bool [B, N, N]: ancestors and self of random trees, parents before children."""
    tree = torch.zeros(batch, nodes, nodes, dtype=torch.bool)
    parent = (torch.rand(batch, nodes) * torch.arange(nodes)).long()
    for i in range(nodes):
        if i:
            tree[torch.arange(batch), i] = tree[torch.arange(batch), parent[:, i]]
        tree[:, i, i] = True
    return tree.to(device)


def mask_words(tree: torch.Tensor) -> torch.Tensor:
    """bool [B, N, N] -> int64 [B*N, ceil(N/64)]."""
    batch, nodes, _ = tree.shape
    words = -(-nodes // 64)
    bits = torch.zeros(batch, nodes, words * 64, dtype=torch.int64, device=tree.device)
    bits[..., :nodes] = tree
    place = torch.ones(64, dtype=torch.int64, device=tree.device) << torch.arange(64, device=tree.device)
    return (bits.view(batch * nodes, words, 64) * place).sum(-1)


def make(batch: int, nodes: int, prefix: int, q_heads: int, kv_heads: int, head_dim: int, dtype, device, step: Optional[Inputs] = None) -> Inputs:
    """A request's KV is `prefix` committed tokens and its tree, on random pages of one pool. step: another layer of the same step, whose
    page table, lengths and trees are this one's too; without it they are its own."""
    per = -(-(prefix + nodes) // PAGE)
    pages = batch * per
    table = step.table if step else torch.randperm(pages, device=device).view(batch, per).int()
    normal = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)  # noqa: E731
    along = torch.nn.functional.normalize(torch.randn(head_dim, device=device), dim=0) * BOOST
    k, v = normal(pages, PAGE, kv_heads, head_dim), normal(pages, PAGE, kv_heads, head_dim)
    at = prefix + torch.arange(nodes, device=device)
    k[table[:, at // PAGE].long(), at % PAGE] += along.to(dtype)
    tree = step.tree if step else random_trees(batch, nodes, device)
    rows = batch * nodes
    own = Inputs(normal(rows, q_heads, head_dim) + along.to(dtype), k, v, table,
                 torch.full((batch,), prefix, dtype=torch.int32, device=device),
                 torch.arange(0, rows + 1, nodes, dtype=torch.int32, device=device), mask_words(tree), tree,
                 torch.full((rows, q_heads, head_dim), float("nan"), device=device, dtype=dtype))
    return own._replace(prefix_len=step.prefix_len, cu_nodes=step.cu_nodes, mask=step.mask) if step else own


def layers(count: int, make_one, own_tables: bool = False) -> list:
    """`count` buffer sets from make_one(step): the layers of one step, which share page table, lengths and trees; or each with its own."""
    sets = [make_one(None)]
    return sets + [make_one(None if own_tables else sets[0]) for _ in range(count - 1)]


def per_step(sets: list, make_one) -> list:
    """make_one(x) for every set, made once for sets that share their tables."""
    made = {}
    return [made[id(x.table)] if id(x.table) in made else made.setdefault(id(x.table), make_one(x)) for x in sets]


def dense(x: Inputs) -> tuple:
    """K, V [B, Hkv, prefix + N, D] in order of position."""
    batch, nodes = x.tree.shape[:2]
    length = int(x.prefix_len[0]) + nodes
    take = lambda cache: cache[x.table.long()].flatten(1, 2)[:, :length].transpose(1, 2).contiguous()  # noqa: E731
    return take(x.k), take(x.v)


def oracle(x: Inputs) -> torch.Tensor:
    """[B*N, Hq, D] in float64 arithmetic, one request at a time."""
    batch, nodes = x.tree.shape[:2]
    out = torch.empty_like(x.out, dtype=torch.float32)
    keys, values = dense(x)
    group, d = x.q.shape[1] // keys.shape[1], x.q.shape[2]
    for b in range(batch):
        q = x.q.view(batch, nodes, -1, group, d)[b].double()  # [N, Hkv, G, D]
        s = torch.einsum("nhgd,hkd->hgnk", q, keys[b].double()) * d ** -0.5
        s[..., -nodes:].masked_fill_(~x.tree[b], -torch.inf)
        out.view(batch, nodes, -1, group, d)[b] = torch.einsum("hgnk,hkd->nhgd", s.softmax(-1), values[b].double()).float()
    return out


def right(x: Inputs, out: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-2) -> bool:
    """Every element of out [B*N, Hq, D] within the tolerance of the oracle."""
    return bool(((out.float() - want).abs() <= tolerance * (1 + want.abs())).all())


def bytes_of(batch: int, nodes: int, prefix: int, q_heads: int, kv_heads: int, head_dim: int, item: int) -> int:
    """Each key and value once, q and out once."""
    return batch * (2 * (prefix + nodes) * kv_heads + 2 * nodes * q_heads) * head_dim * item
