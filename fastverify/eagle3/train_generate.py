"""Batched generation with the frozen target: static KV cache, left-padded rows, one CUDA graph per attended length.

Training data is the target's own text, so throughput over thousands of rows matters and latency does not. On a GPU
the decode step is captured in CUDA graphs; on a CPU the same function runs eagerly. Rows that have ended are dropped by
moving the others to the front, whenever half of the rows have. Sampling is Gumbel-max at temperature T after a min-p cut
(Nguyen et al. 2024, arXiv:2407.01082), which needs no sort; temperature 0 is argmax.
"""

from __future__ import annotations

import time
from typing import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .train_data import Prompts, Ragged, Replies, repeat_rate
from .train_target import TargetLlama, apply_rope, rope_tables

CHECK = 32  # steps between two looks at which rows have ended


class Generator:
    """Generates replies for batches of prompts. ``rows`` is the batch size at short context; long prompts use fewer."""

    def __init__(self, net: TargetLlama, eos: list[int], rows: int = 2048, min_p: float = 0.05, seed: int = 0,
                 cache_bytes: float = 70e9, step: int = 128):
        self.net, self.eos, self.rows, self.min_p, self.step = net, eos, rows, min_p, step
        self.device, self.dtype = net.norm.weight.device, net.norm.weight.dtype
        self.cuda = self.device.type == "cuda"
        self.cache_bytes, self.graphs, self.pool, self._s = cache_bytes, {}, None, None
        torch.manual_seed(seed)

        def stack(kind: str, parts: list) -> Tensor | None:
            found = [getattr(p, kind) for p in parts]
            return None if found[0] is None else torch.cat(found)

        attn, mlp = [x.self_attn for x in net.layers], [x.mlp for x in net.layers]
        self.qkv, self.qkv_bias = ([stack(k, [a.q_proj, a.k_proj, a.v_proj]) for a in attn] for k in ("weight", "bias"))
        self.gate_up, self.gate_up_bias = ([stack(k, [x.gate_proj, x.up_proj]) for x in mlp] for k in ("weight", "bias"))

    # -- one decode step -------------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, mod) -> Tensor:
        return F.rms_norm(x, mod.weight.shape, mod.weight, mod.eps)

    def _decode(self, s: dict, attend: int, sampled: bool) -> None:
        """One token for every row of state ``s``, attending cache columns [0, attend). Updates ``s`` in place."""
        c = self.net.config
        n, m, d, g = (c.num_attention_heads, c.num_key_value_heads, c.head_dim,
                      c.num_attention_heads // c.num_key_value_heads)
        rows = s["tok"].shape[0]
        h = self.net.embed_tokens(s["tok"])
        cos, sin = rope_tables((s["col"] - s["pad"])[:, None], d, c.rotary())
        cols = self._cols[:attend]
        keep = (cols >= s["pad"][:, None]) & (cols <= s["col"])
        bias = torch.zeros(keep.shape, dtype=self.dtype, device=self.device).masked_fill_(~keep, -1e4)
        bias = bias[:, None, None, :].expand(rows, m, g, attend)
        for i, layer in enumerate(self.net.layers):
            x = F.linear(self._norm(h, layer.input_layernorm), self.qkv[i], self.qkv_bias[i])
            q, k, v = x.view(rows, -1, d).split([n, m, m], 1)
            q, k = layer.self_attn.q_norm(q), layer.self_attn.k_norm(k)
            q = apply_rope(q[:, :, None], cos, sin).view(rows, m, g, d)
            k = apply_rope(k[:, :, None], cos, sin)
            s["k"][i].index_copy_(2, s["col"], k)
            s["v"][i].index_copy_(2, s["col"], v[:, :, None])
            y = self._attend(q, s["k"][i][:, :, :attend], s["v"][i][:, :, :attend], bias)
            h = h + layer.self_attn.o_proj(y.reshape(rows, n * d))
            x = F.linear(self._norm(h, layer.post_attention_layernorm), self.gate_up[i], self.gate_up_bias[i])
            gate, up = x.chunk(2, -1)
            h = h + layer.mlp.down_proj(F.silu(gate) * up)
        tok = self._pick(self._norm(h, self.net.norm), s, sampled)
        s["tok"].copy_(tok.masked_fill_(s["done"], 0))
        s["out"].index_copy_(1, s["col"], s["tok"][:, None].to(s["out"].dtype))
        for e in self.eos:
            s["done"] |= s["tok"] == e
        s["col"] += 1

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """q [rows, m, g, d] (the g query heads of a key head as rows), k, v [rows, m, A, d], bias [rows, m, g, A]."""
        rows, m, g, d = q.shape
        x = torch.baddbmm(bias.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=d**-0.5)
        return torch.bmm(x.softmax(-1), v.flatten(0, 1)).view(rows, m, g, d)

    def _pick(self, h: Tensor, s: dict, sampled: bool) -> Tensor:
        """h [rows, Ht] (normed) -> token ids [rows]."""
        x = self.net.logits(h)
        if not sampled:
            return x.argmax(-1)
        x = x * s["inv_t"][:, None]
        if self.min_p:
            x = x.masked_fill_(x < x.amax(-1, keepdim=True) + float(np.log(self.min_p)), float("-inf"))
        return (x - torch.empty_like(x).exponential_().log_()).argmax(-1)

    def _step(self, s: dict, attend: int, sampled: bool) -> None:
        if not self.cuda:
            return self._decode(s, attend, sampled)
        key = (s["tok"].shape[0], attend, sampled)
        if key not in self.graphs:
            kept = {k: s[k].clone() for k in ("tok", "col", "done")}
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._decode(s, attend, sampled)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                self._decode(s, attend, sampled)
            self.pool = self.pool or graph.pool()
            for k, v in kept.items():
                s[k].copy_(v)
            self.graphs[key] = graph
        self.graphs[key].replay()

    # -- one batch -------------------------------------------------------------------------------------------------

    def _state(self, rows: int, cols: int) -> dict:
        """Static buffers for ``rows`` rows and ``cols`` cache columns; one set is alive at a time."""
        if self._s is not None and self._s["key"] == (rows, cols):
            return self._s
        self._s, self.graphs, self.pool = None, {}, None
        c, dev = self.net.config, self.device
        shape = (rows, c.num_key_value_heads, cols, c.head_dim)
        self._cols = torch.arange(cols, device=dev)
        self._s = dict(
            key=(rows, cols),
            k=[torch.zeros(shape, dtype=self.dtype, device=dev) for _ in range(c.num_hidden_layers)],
            v=[torch.zeros(shape, dtype=self.dtype, device=dev) for _ in range(c.num_hidden_layers)],
            tok=torch.zeros(rows, dtype=torch.int64, device=dev),
            col=torch.zeros(1, dtype=torch.int64, device=dev),
            pad=torch.zeros(rows, dtype=torch.int64, device=dev),
            done=torch.zeros(rows, dtype=torch.bool, device=dev),
            inv_t=torch.ones(rows, device=dev),
            out=torch.zeros(rows, cols, dtype=torch.int32, device=dev),
        )
        return self._s

    @torch.no_grad()
    def batch(self, prompts: list, max_new: int, cols: int, rows: int, temps: np.ndarray | None) -> list[np.ndarray]:
        """prompts: token arrays (at most ``rows``, each <= cols - max_new) -> replies, cut after the first eos."""
        s, n = self._state(rows, cols), len(prompts)
        width = max(len(p) for p in prompts)
        pad = np.full(rows, width - 1, np.int64)
        ids = np.zeros((rows, width), np.int64)
        for b, p in enumerate(prompts):
            pad[b] = width - len(p)
            ids[b, pad[b] :] = p
        s["pad"].copy_(torch.from_numpy(pad))
        s["done"].zero_()[n:] = True
        s["col"].fill_(width - 1)
        if temps is not None:
            inv = np.ones(rows, np.float32)
            inv[:n] = 1.0 / np.asarray(temps, np.float32)
            s["inv_t"].copy_(torch.from_numpy(inv))
        gids = torch.from_numpy(ids).to(self.device)
        chunk = max(1, int(2**21 // (width * width)) * 8)
        for a in range(0, rows, chunk):  # prefill of columns [0, width - 1)
            if a >= n or width == 1:
                break
            self._prefill(s, gids[a : a + chunk, :-1], a)
        s["tok"].copy_(gids[:, -1])
        out, row_of = [None] * n, np.arange(rows)  # row_of: the prompt of each row; n and above: none
        for t in range(max_new):
            col = width - 1 + t
            self._step(s, min(cols, -(-(col + 1) // self.step) * self.step), temps is not None)
            if t % CHECK == CHECK - 1 or t == max_new - 1:
                s, row_of = self._drop(s, row_of, out, width - 1, col + 1, t == max_new - 1)
                if s is None:
                    break
        return out

    def _drop(self, s: dict, row_of: np.ndarray, out: list, first: int, end: int, last: bool) -> tuple:
        """Writes the replies of rows that leave to ``out``; (state of the rows that stay, their prompts), or (None, None).

        Rows leave when all have ended, or once half of them have: the others move to the front of the same buffers."""
        done = s["done"].cpu().numpy()
        live = np.flatnonzero(~done)
        size = len(done)
        while size // 2 >= max(len(live), 16):
            size //= 2
        if len(live) and not last and size == len(done):
            return s, row_of
        leaving = np.arange(len(done)) if last or not len(live) else np.flatnonzero(done)
        tokens = s["out"][torch.from_numpy(leaving).to(self.device), first:end].cpu().numpy()
        for row, text in zip(leaving, tokens):
            if row_of[row] < len(out):
                stop = np.flatnonzero(np.isin(text, self.eos))
                out[row_of[row]] = text[: stop[0] + 1] if len(stop) else text
        if last or not len(live):
            return None, None
        order = np.concatenate([live, np.flatnonzero(done)])[:size]  # ended rows fill up; their prompts are written
        row_of = np.where(done[order], len(out), row_of[order])
        index = torch.from_numpy(order).to(self.device)
        small = {k: [x[:size] for x in v] if isinstance(v, list) else v if k in ("col", "key") else v[:size]
                 for k, v in s.items()}
        for key, value in small.items():
            for to, source in zip(value, s[key]) if isinstance(value, list) else [(value, s[key])]:
                if key not in ("col", "key"):
                    to.copy_(source[index])
        return small, row_of

    def _prefill(self, s: dict, ids: Tensor, at: int) -> None:
        """Fill cache columns [0, w) of rows [at, at + r) from left-padded ids [r, w]."""
        net, (r, w) = self.net, ids.shape
        cols = torch.arange(w, device=self.device)
        pad = s["pad"][at : at + r]
        pos = (cols - pad[:, None]).clamp_(min=0)
        keep = (cols >= pad[:, None])[:, None, None, :] & (cols[:, None] >= cols)
        keep |= torch.eye(w, dtype=torch.bool, device=self.device)
        bias = torch.zeros(keep.shape, dtype=self.dtype, device=self.device).masked_fill_(~keep, -1e4)
        if w % 8:  # the fused attention kernels want 16-byte rows in the mask
            bias = F.pad(bias, (0, 8 - w % 8))[..., :w]
        cos, sin = rope_tables(pos, net.config.head_dim, net.config.rotary())
        h = net.embed_tokens(ids)
        for i, layer in enumerate(net.layers):
            h, k, v = layer(h, cos, sin, bias)
            s["k"][i][at : at + r, :, :w] = k
            s["v"][i][at : at + r, :, :w] = v

    # -- many prompts ----------------------------------------------------------------------------------------------

    def many(self, prompts: list, max_new: int, temps: np.ndarray | None, deadline: float = float("inf"),
             log: Callable = print) -> list[np.ndarray | None]:
        """Replies in the order of ``prompts``; None for those not reached before ``deadline`` (time.time())."""
        out: list[np.ndarray | None] = [None] * len(prompts)
        c = self.net.config
        lengths = np.array([len(p) for p in prompts])
        classes: dict[int, list[int]] = {}
        for i in np.argsort(lengths, kind="stable"):
            cols = -(-(lengths[i] + max_new) // (4 * self.step)) * 4 * self.step
            classes.setdefault(int(cols), []).append(int(i))
        token_bytes = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * torch.finfo(self.dtype).bits // 8
        batches = []
        for cols, members in classes.items():
            rows = min(self.rows, max(1, int(self.cache_bytes // (cols * token_bytes))), -(-len(members) // 16) * 16)
            rows = -(-len(members) // -(-len(members) // rows))  # even batches
            some = [(cols, rows, members[a : a + rows]) for a in range(0, len(members), rows)]
            # shuffled: a deadline then cuts no kind of length
            batches += [some[i] for i in np.random.default_rng(0).permutation(len(some))]
        done, tokens, start = 0, 0, time.time()
        for cols, rows, members in batches:
            if time.time() > deadline:
                log(f"generate: out of time after {done} of {len(prompts)} prompts")
                break
            got = self.batch([prompts[i] for i in members], max_new, cols, rows, None if temps is None else temps[members])
            for i, reply in zip(members, got):
                out[i] = reply
            done += len(members)
            tokens += sum(len(x) for x in got)
            spent = time.time() - start
            log(f"generate: {done} of {len(prompts)} prompts, {tokens} tokens, {tokens / max(spent, 1e-9):.0f} tok/s, "
                f"{spent / done * (len(prompts) - done):.0f} s to go")
        return out


def conversations(gen: Generator, prompts: Prompts, max_new: int, greedy: bool, seed: int, deadline: float = float("inf"),
                  max_repeat: float = 0.3, order: np.ndarray | None = None, log: Callable = print,
                  temperatures: tuple = (0.7, 1.0)) -> Replies:
    """Generate reply 1 (and reply 2 where a follow-up exists) for every prompt, dropping loops.

    ``order`` limits the run to some prompts. Sampled replies use one temperature per prompt, uniform in ``temperatures``. A
    function of its arguments alone (a deadline apart): the random state is set from ``seed``."""
    order = np.arange(len(prompts.first)) if order is None else order
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    temps = None if greedy else rng.uniform(*temperatures, len(order)).astype(np.float32)
    first = gen.many([prompts.first[i] for i in order], max_new, temps, deadline, log)
    ids, asst, kept, second = [], [], [], []
    for k, i in enumerate(order):
        reply = first[k]
        if reply is None or len(reply) < 2 or repeat_rate(reply) > max_repeat:
            continue
        p, ended = prompts.first[i], reply[-1] in gen.eos
        if ended and len(prompts.second[i]):
            second.append(len(ids))
        ids.append(np.concatenate([p, reply]))
        asst.append(np.concatenate([np.zeros(len(p), np.uint8), np.ones(len(reply), np.uint8)]))
        kept.append(k)
    if second and time.time() < deadline:
        ctx = [np.concatenate([ids[j], prompts.second[order[kept[j]]]]) for j in second]
        t2 = None if temps is None else temps[[kept[j] for j in second]]
        for j, c, reply in zip(second, ctx, gen.many(ctx, max_new, t2, deadline, log)):
            if reply is None or len(reply) < 2 or repeat_rate(reply) > max_repeat:
                continue
            asst[j] = np.concatenate([asst[j], np.zeros(len(c) - len(ids[j]), np.uint8), np.ones(len(reply), np.uint8)])
            ids[j] = np.concatenate([c, reply])
    rows = order[np.asarray(kept, np.int64)]
    return Replies(Ragged.of(ids), Ragged.of(asst, np.uint8), prompts.source[rows], prompts.held[rows],
                   np.full(len(rows), greedy), prompts.names)


def join(parts: list[Replies]) -> Replies:
    """Concatenate reply sets that share their source names."""
    seqs = [(r, i) for r in parts for i in range(len(r.ids))]
    return Replies(
        Ragged.of([r.ids[i] for r, i in seqs]),
        Ragged.of([r.asst[i] for r, i in seqs], np.uint8),
        np.concatenate([r.source for r in parts]),
        np.concatenate([r.held for r in parts]),
        np.concatenate([r.greedy for r in parts]),
        parts[0].names,
    )
