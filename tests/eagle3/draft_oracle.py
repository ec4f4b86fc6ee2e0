"""Shared by the draft tests: a naive float64 recomputation of an EAGLE-3 draft, and a small driver of the real one.

The oracle reads the stored tensors by name, keeps no cache and knows no mask: a tree node is the end of a chain of tokens, and
every chain is run from the first pair on, its own rows and nothing else.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from cases import page_tables
from safetensors.torch import load_file

from fastverify.eagle3.checkpoint import load_draft
from fastverify.eagle3.grow import GrowBuffers, draft_tree, extend
from fastverify.models.batch import ForwardBatch
from fastverify.tree import Prepared, prepare_tree

DATA = Path(__file__).resolve().parents[1] / "data"
GOLDEN = DATA / "eagle_golden"


def target_config(**kw) -> dict:
    """The target's facts that load_draft needs."""
    return {"hidden_size": 64, "vocab_size": 512, "num_layers": 8, **kw}


@pytest.fixture(scope="module")
def golden() -> dict:
    return load_file(GOLDEN / "random.safetensors")


@pytest.fixture
def draft(golden):
    d = load_draft(GOLDEN / "draft", target_config())
    d.embed = golden["embed"].float()
    return d


class NaiveDraft:
    """One draft from its stored tensors, in float64; `c` is its config.json (flat)."""

    def __init__(self, tensors: dict, c: dict, embed: torch.Tensor):
        self.w = {k.replace("midlayer.", "layers.0."): v.double() if v.is_floating_point() else v for k, v in tensors.items()}
        self.c, self.embed = c, self.w.get("embed_tokens.weight", embed.double())
        self.heads, self.kv = c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = self.w["layers.0.self_attn.q_proj.weight"].shape[0] // self.heads
        self.layers = 1 + max(int(k.split(".")[1]) for k in self.w if k.startswith("layers."))
        vd = self.w["lm_head.weight"].shape[0]
        self.ids = torch.arange(vd) + self.w.get("d2t", torch.zeros(vd, dtype=torch.int64))

    @classmethod
    def load(cls, folder: Path, embed: torch.Tensor) -> "NaiveDraft":
        return cls(load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()), embed)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * self.w[name + ".weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        x = aux.double()
        if "input_norm.weight" in self.w:
            x = self.norm(x, "input_norm")
        if "fc_norm.0.weight" in self.w:
            x = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(x.chunk(3, -1))], -1)
        return x @ self.w["fc.weight"].T

    def rope(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """x [heads, dim] as complex numbers (i, i + dim/2), turned by position * theta^(-2i/dim)."""
        half = self.dim // 2
        angle = position * self.c.get("rope_theta", 10000.0) ** (-torch.arange(half, dtype=torch.float64) / half)
        z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    def chain(self, aux: torch.Tensor, tokens: list) -> torch.Tensor:
        """Rows of one chain: row i has token tokens[i], position i, and fuse(aux[i]) or (past aux) the row before's output.

        -> what is fed back, [len(tokens), H]; also leaves self.keys[layer], self.values[layer], lists of [kv, dim]."""
        fused, out = self.fuse(aux), []
        self.keys, self.values = ([[] for _ in range(self.layers)] for _ in range(2))
        for i, token in enumerate(tokens):
            h = fused[i] if i < len(aux) else out[-1]
            for n in range(self.layers):
                h = self.layer(n, h, token, i)
            out.append(self.norm(h, "norm") if self.c.get("norm_output") else h)
        return torch.stack(out)

    def layer(self, n: int, h: torch.Tensor, token: int, position: int) -> torch.Tensor:
        p = f"layers.{n}."
        if n == 0:
            normed = self.norm(h, p + "hidden_norm")
            x = torch.cat([self.norm(self.embed[token], p + "input_layernorm"), normed])
            h = normed if self.c.get("norm_before_residual") else h
        else:
            x = self.norm(h, p + "input_layernorm")
        q, k, v = (self.linear(x, f"{p}self_attn.{name}_proj").view(-1, self.dim) for name in "qkv")
        if p + "self_attn.q_norm.weight" in self.w:
            q, k = self.norm(q, p + "self_attn.q_norm"), self.norm(k, p + "self_attn.k_norm")
        self.keys[n].append(self.rope(k, position))
        self.values[n].append(v)
        q, keys, values = self.rope(q, position), torch.stack(self.keys[n]), torch.stack(self.values[n])
        seen = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv)
            scores = keys[:, group] @ q[head] / self.dim ** 0.5
            seen.append(scores.softmax(0) @ values[:, group])
        h = h + self.linear(torch.cat(seen), p + "self_attn.o_proj")
        x = self.norm(h, p + "post_attention_layernorm")
        gate = self.linear(x, p + "mlp.gate_proj")
        return h + self.linear(self.activation(gate) * self.linear(x, p + "mlp.up_proj"), p + "mlp.down_proj")

    def activation(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.c["hidden_act"]
        if kind == "silu":
            return x * x.sigmoid()
        inner = torch.erf(x * 0.5**0.5) if kind == "gelu" else torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + inner)

    def logits(self, h2: torch.Tensor) -> torch.Tensor:
        return (h2 if self.c.get("norm_output") else self.norm(h2, "norm")) @ self.w["lm_head.weight"].T

    def log_probs(self, h2: torch.Tensor) -> torch.Tensor:
        """[V] log-probabilities of one row over target ids, -inf outside the draft vocabulary."""
        out = torch.full((self.embed.shape[0],), -torch.inf, dtype=torch.float64)
        out[self.ids] = self.logits(h2).log_softmax(-1)
        return out


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Both finite, equal shapes, |a - b| <= tolerance * (1 + |b|)."""
    a, b = a.double(), b.double()
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * (1 + b.abs())).all())


class Run:
    """The real draft over a paged cache with random disjoint pages; `lengths` is the longest text of each request."""

    def __init__(self, draft, batch: int, longest: int, rng, page_size: int = 4, active: list = None):
        self.draft, self.batch = draft, batch
        self.table, pages = page_tables(batch, longest, page_size, rng)
        self.cache = draft.make_cache(pages, page_size)
        for layer in (self.cache.k, self.cache.v):
            layer.fill_(float("nan"))  # a slot that was never written must never be seen
        self.prefix = torch.zeros(batch, dtype=torch.int32)
        self.active = torch.tensor(active or [1] * batch, dtype=torch.int32)
        self.calls = []

    def extend(self, tokens: list, aux: list, pad: int = 2) -> torch.Tensor:
        """One extend of all requests (tokens[b]: list, aux[b] [n, A*Ht]); keeps h2 of the true rows in self.rows[b]."""
        counts = [len(t) if a else 0 for t, a in zip(tokens, self.active.tolist())]
        cu = torch.tensor([0] + counts).cumsum(0).to(torch.int32)
        rows = int(cu[-1]) + pad
        flat = torch.zeros(rows, dtype=torch.int64)
        features = torch.full((rows, aux[0].shape[1]), float("nan"))
        for b, n in enumerate(counts):
            flat[cu[b]:cu[b] + n] = torch.tensor(tokens[b][:n], dtype=torch.int64)
            features[cu[b]:cu[b] + n] = aux[b][:n]
        p = Prepared(positions=torch.zeros(rows, dtype=torch.int32), slots=torch.zeros(rows, dtype=torch.int64))
        prepare_tree(None, cu, self.prefix, self.table, self.cache.page_size, p)
        batch = ForwardBatch(flat, p.positions, p.slots, cu, self.prefix, self.table)
        with recorded(self.draft, self.calls):
            last = extend(self.draft, self.cache, batch, features, self.active)
        h2 = self.calls[-1][1]
        self.rows = [h2[cu[b]:cu[b + 1]] for b in range(self.batch)]
        self.prefix = self.prefix + torch.tensor(counts, dtype=torch.int32)
        return last

    def tree(self, last: torch.Tensor, roots: list, k: int, levels: int, num_nodes: int, vocab: int = 512):
        """draft_tree -> Tree; self.buffers holds pool and beam, self.calls the levels' (batch, h2)."""
        self.calls.clear()
        self.buffers = GrowBuffers.empty(self.draft, self.batch, k, levels, num_nodes)
        with recorded(self.draft, self.calls):
            return draft_tree(self.draft, self.cache, last, torch.tensor(roots, dtype=torch.int32), self.prefix, self.active,
                              self.table, self.buffers, levels, num_nodes, vocab)

    def kv(self, b: int, count: int, layer: int = 0) -> tuple:
        """K and V [count, kv, dim] of request b's first positions."""
        size = self.cache.page_size
        slots = [int(self.table[b, i // size]) * size + i % size for i in range(count)]
        return tuple(x[layer].flatten(0, 1)[slots] for x in (self.cache.k, self.cache.v))


class recorded:
    """Context: every draft.forward appends (a copy of its batch, a copy of its result) to `calls`."""

    def __init__(self, draft, calls: list):
        self.draft, self.calls = draft, calls

    def __enter__(self):
        forward = self.draft.forward

        def spy(batch, hidden, cache):
            h2 = forward(batch, hidden, cache)
            copy = ForwardBatch(*(x.clone() if isinstance(x, torch.Tensor) else x for x in vars(batch).values()))
            self.calls.append((copy, h2.clone()))
            return h2
        self.draft.forward = spy

    def __exit__(self, *exc):
        del self.draft.forward
