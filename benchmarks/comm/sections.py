"""What multi_gpu.py measures: functions of a Rank (ranks.py)."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overlap import trace
from peers import Peers
from ranks import Rank, fold
from sglang_peer import Sglang

from fastverify import Communicator, all_reduce, all_reduce_columns, all_reduce_rms_norm, linear_all_reduce
from fastverify.comm.linear_all_reduce import ONE_PIECE, cut, fits

EPS, BF16 = 1e-6, "bfloat16"
WAYS = ("peer", "host", "nccl")
NEVER = (1 << 63) - 1  # bytes


DEADLINE = 4.0  # seconds that a call of these communicators waits for its peers


def communicators(me: Rank, max_bytes: int, wanted: tuple = WAYS) -> dict:
    """{"peer", "host", "nccl": Communicator}; one that cannot be made is left out with a row that says why. Without GPUs: {"gathered"}."""
    made = {}
    if not me.cuda:
        return {"gathered": Communicator(device="cpu", max_bytes=max_bytes)}
    for backend in wanted:
        try:
            made[backend] = Communicator(device=me.device, backend=backend, max_bytes=max_bytes, deadline=DEADLINE)
        except RuntimeError as exc:
            me.absent(backend, "all_reduce", dict(W=me.world), BF16, f"failed: {str(exc).splitlines()[0][:200]}")
    return made


# ---- all_reduce, all_reduce_rms_norm -----------------------------------------------------------------------------------------

class Message:
    """Inputs and results of one [rows, hidden] bf16 sum, the same on every rank."""

    def __init__(self, me: Rank, rows: int, hidden: int) -> None:
        self.shape = dict(W=me.world, rows=rows, H=hidden)
        g = torch.Generator().manual_seed(1000 * rows)
        parts = [torch.randn(rows, hidden, generator=g).bfloat16() for _ in range(me.world)]
        self.x, self.want = parts[me.rank].to(me.device), fold(parts)
        self.residual = torch.randn(rows, hidden, generator=g).bfloat16().to(me.device)
        self.weight = torch.ones(hidden, dtype=torch.bfloat16, device=me.device)
        self.exact, self.bound = sum(p.double() for p in parts), 2.0**-7 * me.world

    def close(self, t: torch.Tensor) -> bool:
        return bool(((t.double().cpu() - self.exact).abs() <= self.bound * (1 + self.exact.abs())).all())


def sums(me: Rank, args, comms: dict) -> None:
    symmetric = SymmetricMemory(me, max(args.rows) * args.hidden)
    for rows in args.rows:
        m = Message(me, rows, args.hidden)
        for name, comm in comms.items():
            own_sums(me, name, comm, m.shape, m.x, m.want, m.residual, m.weight, m.close)
        nccl_rows(me, "NCCL", m.x, m.residual.clone(), m.weight, m.shape, m.close)
        symmetric.rows(me, m.x, m.residual.clone(), m.weight, m.shape, m.close)


def peer_sums(me: Rank, args, wanted: tuple = ("flashinfer", "sglang")) -> None:
    made = {"flashinfer": lambda: Peers(me, max(args.rows), args.hidden, args.peers_lib), "sglang": lambda: Sglang(me, max(args.rows), args.hidden)}
    for peer in [made[name]() for name in wanted]:
        for rows in args.rows:
            m = Message(me, rows, args.hidden)
            peer.rows(me, m.x, m.residual, m.weight, m.shape, m.close)


def own_sums(me: Rank, name: str, comm, shape: dict, x, want, residual, weight, close) -> None:
    """Every form of one of our communicators. Bits against the fold in rank order; NCCL's and fp8's within their rounding."""
    rows, hidden = x.shape
    own, out, res = name != "nccl", torch.empty_like(x), residual.clone()
    forms = [(" one-shot", comm.max_bytes), (" two-shot", 0)] if own else [("", None)]
    summed = (residual.float() + want.to(me.device).float()).bfloat16()
    normed = summed.double() * torch.rsqrt(summed.double().square().mean(-1, keepdim=True) + EPS)

    def norm_is_right() -> bool:  # one call more, from the first residual
        res.copy_(residual)
        all_reduce_rms_norm(x, res, weight, comm, EPS, out=out)
        same = torch.equal(res, summed) if own or me.world == 2 else torch.allclose(res.float(), summed.float(), rtol=2e-2, atol=2e-2)
        return same and bool(((out.double() - normed).abs() <= 2.0**-6 * (0.01 + normed.abs())).all())
    if own and rows >= 8:
        columns, both = x.view(1, rows, hidden), torch.empty_like(x)
        me.row(f"{name} both directions at once", "all_reduce", shape, BF16, lambda: all_reduce_columns(columns, comm, both),
               lambda: torch.equal(both.cpu(), want))
    for form, limit in forms:
        label = ("our NCCL" if name == "nccl" else name) + form
        if limit is not None:
            comm.set_one_shot_bytes(limit)
        right = (lambda: torch.equal(out.cpu(), want)) if own else (lambda: close(out))
        me.row(label, "all_reduce", shape, BF16, lambda: all_reduce(x, comm, out), right)
        me.row(label, "all_reduce_rms_norm", shape, BF16, lambda: all_reduce_rms_norm(x, res, weight, comm, EPS, out=out), norm_is_right)
    if own and me.cuda and rows >= 16:
        bound = sum(p.abs().float() for p in me.gathered(x.cpu())) / 16 + me.world * float(x.abs().max()) / 128
        twice = bound + want.abs().float() / 16 + float(want.abs().max()) / 128  # two-shot rounds the sum once more
        comm._handle.set_fp8_bytes(0)
        for form, limit in forms:
            comm.set_one_shot_bytes(limit)
            me.row(f"{name} fp8 wire (lossy),{form}", "all_reduce", shape, BF16, lambda: all_reduce(x, comm, out),
                   lambda most=bound if limit else twice: bool(((out.float().cpu() - want.float()).abs() <= most).all()))
        comm._handle.set_fp8_bytes(NEVER)
    comm.check()


def nccl_rows(me: Rank, label: str, x, res, weight, shape: dict, close) -> None:
    y, group = x.clone(), me.fabric
    me.row(label, "all_reduce", shape, BF16, lambda: dist.all_reduce(y, group=group), lambda: True, "values grow; not compared")

    def step() -> None:
        dist.all_reduce(y, group=group)
        F.rms_norm(res.add_(y), (y.shape[1],), weight, EPS)
    me.row(f"{label} + add + norm", "all_reduce_rms_norm", shape, BF16, step, lambda: True, "values grow; not compared")
    z = x.clone()
    dist.all_reduce(z, group=group)
    if not close(z):
        raise RuntimeError(f"{label} summed wrong")


def sums_without_p2p(me: Rank, args) -> None:
    """In processes of their own: NCCL reads NCCL_P2P_DISABLE once."""
    for rows in args.rows:
        m = Message(me, rows, args.hidden)
        nccl_rows(me, "NCCL without P2P", m.x, m.residual, m.weight, m.shape, m.close)


class SymmetricMemory:
    """torch's one-shot and two-shot kernels on a tensor of theirs, multicast off."""

    def __init__(self, me: Rank, elements: int) -> None:
        self.why = ""
        try:
            if not me.cuda:
                raise RuntimeError("not on a CPU")
            group = me.fabric
            import torch.distributed._symmetric_memory as symm
            self.flat = symm.empty(elements, dtype=torch.bfloat16, device=me.device)
            symm.rendezvous(self.flat, group=group)
            self.name = group.group_name
        except Exception as exc:  # a private interface that changes between versions
            self.why = f"failed: {str(exc).strip().splitlines()[0][:160]}" if str(exc).strip() else type(exc).__name__
        self.why = next((w for w in me.gathered(self.why) if w), "")

    def rows(self, me: Rank, x, res, weight, shape: dict, close) -> None:
        for form in ("one-shot", "two-shot"):
            label = f"torch symmetric {form}"
            if self.why:
                me.absent(label, "all_reduce", shape, BF16, self.why)
                continue
            y = self.flat[:x.numel()].view_as(x)
            out = torch.empty_like(x)

            def call() -> None:  # their input must lie in symmetric memory: what copying it in costs belongs to it
                y.copy_(x)
                if form == "one-shot":
                    torch.ops.symm_mem.one_shot_all_reduce_out(y, "sum", self.name, out)
                else:
                    torch.ops.symm_mem.two_shot_all_reduce_(y, "sum", self.name)

            def bare() -> None:
                if form == "one-shot":
                    torch.ops.symm_mem.one_shot_all_reduce_out(y, "sum", self.name, out)
                else:
                    torch.ops.symm_mem.two_shot_all_reduce_(y, "sum", self.name)
            me.row(label, "all_reduce", shape, BF16, call, lambda: close(out if form == "one-shot" else y), "with the copy in")
            if form == "one-shot":
                me.row(f"{label}, no copy", "all_reduce", shape, BF16, bare, lambda: close(out))

                def fused() -> None:
                    bare()
                    F.rms_norm(res.add_(out), (x.shape[1],), weight, EPS)
                me.row(f"{label}, no copy + add + norm", "all_reduce_rms_norm", shape, BF16, fused, lambda: bool(res.isfinite().all()))


# ---- linear_all_reduce -------------------------------------------------------------------------------------------------------

STREAMS = (("columns", 2), ("columns", 4), ("columns", 8), ("growing", 3), ("growing", 4), ("rows", 2), ("rows", 4))
RESIDENT = (("resident", 1), ("resident", 4), ("resident", 8), ("resident", 16), ("resident", 32))
FEW = 8  # blocks or CTAs of a sum that leaves the SMs to the product


def linears(me: Rank, args, comms: dict, resident: bool = False) -> None:
    """residual += sum(x @ weight.T): product then sum against pieces, and the share of the shorter part that is hidden. resident: the
    pieces of one kernel that waits for them."""
    comms = dict(comms)
    if "nccl" in comms and not args.quick and not resident:
        comms["nccl, 8 CTAs"] = Communicator(device=me.device, backend="nccl", nccl=dict(max_ctas=FEW))
    for inner in args.inner:
        n, k = args.hidden, inner // me.world
        weight = torch.randn(n, k, generator=torch.Generator(me.device).manual_seed(1), device=me.device).bfloat16() / k**0.5
        for name, comm in comms.items():
            for m in args.linear_rows:
                linear(me, args, name, comm, m, weight, resident)
                comm.check()


def cuts_for(m: int, transport: str, quick: bool, resident: bool) -> list:
    """(split, blocks of the sums) worth measuring for m rows."""
    if resident:
        if transport == "nccl":
            return []
        return [(c, b) for c in RESIDENT if m >= 64 or c[1] == 1 for b in ((16, FEW, FEW // 2) if m >= 256 and not quick else (FEW,))]
    streams = [c for c in STREAMS if c[0] != "rows" or m // c[1] >= 64]
    if m < 64:
        return [(("columns", 2), 64)]
    if quick:
        streams = [c for c in streams if c not in (("growing", 4), ("rows", 2))]
    if transport == "nccl":
        return [(c, 64) for c in streams]
    return [(c, b) for c in streams for b in ((64, FEW) if m >= 256 and not quick else (64,))]


def linear(me: Rank, args, name: str, comm, m: int, weight: torch.Tensor, resident: bool) -> None:
    n, k = weight.shape
    shape = dict(W=me.world, M=m, N=n, K=k, over=name) | (dict(cards=1) if getattr(args, "same_gpu", False) else {})
    x = torch.randn(m, k, generator=torch.Generator(me.device).manual_seed(m), device=me.device).bfloat16()
    h, y = torch.zeros(m, n, dtype=torch.bfloat16, device=me.device), torch.zeros(m, n, dtype=torch.bfloat16, device=me.device)
    kw = dict(chain=100, repeats=min(8 if m <= 256 else 4, args.repeats))  # a replay of 4096 rows takes half a second
    own, parts = comm.transport != "nccl", y.split(m if comm.transport == "nccl" else max(1, min(m, comm.max_bytes // (2 * n))))

    def sum_alone() -> None:
        for part in parts:
            all_reduce(part, comm, out=part)

    def in_turn() -> None:
        torch.mm(x, weight.t(), out=y)
        sum_alone()
        h.add_(y)
    if own:  # the form that is faster for this size
        forms = {}
        for limit in (comm.max_bytes, 0):
            comm.set_one_shot_bytes(limit)
            forms[limit] = me.time_or_none(sum_alone, **kw)
        comm.set_one_shot_bytes(min(forms, key=lambda f: forms[f] or 1e9))
    us = {"product": me.row("product alone", "linear_all_reduce", shape, BF16, lambda: F.linear(x, weight), **kw),
          "sum": me.row("sum alone", "linear_all_reduce", shape, BF16, sum_alone, **kw),
          "then": me.row("product, sum, add", "linear_all_reduce", shape, BF16, in_turn, **kw)}
    if None in us.values():
        return
    y.zero_()
    h.zero_()
    in_turn()
    want, found, turn, total = h.float(), [], us["then"], us["sum"]
    one_call = own and m * n * 2 <= comm.max_bytes
    if one_call:  # the other kernel, in turn as well: the faster of the two is what an overlap is held against
        columns, fused = y.view(1, m, n), torch.empty_like(h)
        alone = me.row("sum alone, both directions at once", "linear_all_reduce", shape, BF16,
                       lambda: all_reduce_columns(columns, comm, fused), **kw)
        total = min(total, alone or total)
    shorter = min(us["product"], total)
    if "cards" in shape:  # ranks in turn on one GPU get in each other's way: nothing can hide more than the parts alone
        turn = min(turn, us["product"] + total)
    as_called = cut(m, weight, comm)
    me.row(f"as called without split: {as_called[1]} of {as_called[0]}", "linear_all_reduce", shape, BF16, lambda: linear_all_reduce(x, weight, comm, residual=h),
           note="falls back to product, sum, add" if as_called == ONE_PIECE else "", **kw)
    for split, blocks in cuts_for(m, comm.transport, args.quick, resident):
        if (split[0] == "resident" and not one_call) or not fits(n, 2, *split):
            continue
        if own:
            comm._handle.set_blocks(blocks)
        t = me.time_or_none(lambda: linear_all_reduce(x, weight, comm, split=split, residual=h), **kw)
        if t is None:
            continue
        comm.check()  # a lost communicator is fast and wrong
        h.zero_()
        linear_all_reduce(x, weight, comm, split=split, residual=h)
        good = bool(((h.float() - want).abs() <= 0.02 * (1 + want.abs())).all())
        if split == ("resident", 1):
            turn = min(turn, t)
        found.append((t, split, blocks))
        label = f"{split[1]} pieces of {split[0]}" if split[0] != "resident" else f"{split[1]} pieces, one resident kernel"
        me.known_row(label + (f", {blocks} blocks" if blocks != 64 else ""), "linear_all_reduce", shape, BF16, t, good,
                     f"hidden {100 * (turn - t) / shorter:.0f} % of the shorter part ({shorter:.1f} us) against {turn:.1f} us in turn")
    if found and m in (64, 256, 1024) and me.cuda:
        best = min(me.gathered(min(found)))
        if own:
            comm._handle.set_blocks(best[2])
        seen = trace(me, lambda: linear_all_reduce(x, weight, comm, split=best[1], residual=h), args.out, f"{name.split(',')[0]}-M{m}-K{k}{'-resident' if resident else ''}")
        if me.rank == 0:
            print(f"linear over {name}, M={m}, K={k}: product {us['product']:.1f} us, sum {us['sum']:.1f}, in turn {us['then']:.1f} (best {turn:.1f}), "
                  f"{best[1]} {best[0]:.1f} = {100 * (turn - best[0]) / shorter:.0f} % hidden; trace: sum {seen['sum_us']:.1f} us, product "
                  f"{seen['product_us']:.1f} us, both at once {seen['both_us']:.1f} us = {100 * seen['share']:.0f} % of the shorter", flush=True)
    if own:
        comm._handle.set_blocks(64)


# ---- verify over a sharded vocabulary ----------------------------------------------------------------------------------------

def verifies(me: Rank, args, comms: dict) -> None:
    """verify_tree_sharded against all-gather of the logits + verify_tree: time, bytes received by a rank, equal tokens."""
    from fastverify import Sampling, verify_tree
    from fastverify.accept.verify_tree_combine import verify_tree_sharded
    vocab = args.vocab // (32 * me.world) * 32 * me.world
    shard, nccl, device = vocab // me.world, me.fabric, me.device
    laws = {"greedy": dict(temperature=0.0), "temperature": dict(temperature=0.8), "top-k+top-p": dict(temperature=0.8, top_k=50, top_p=0.95)}
    for nodes in (16, 64):
        whole = torch.randn(nodes, vocab, generator=torch.Generator(device).manual_seed(nodes), device=device).bfloat16() * 2
        mine = whole[:, me.rank * shard:(me.rank + 1) * shard].contiguous()
        parents = torch.tensor([-1] + [max(0, i - 2) for i in range(1, nodes)], dtype=torch.int32, device=device)
        best = whole.float().argmax(-1)
        tokens = torch.randint(0, vocab, (nodes,), generator=torch.Generator(device).manual_seed(3), device=device)
        tokens[1], tokens[3] = best[0], best[1]  # two drafts that a greedy walk accepts
        cu = torch.tensor([0, nodes], dtype=torch.int32, device=device)
        prefix, active = torch.full((1,), 100, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device)
        for law, params in laws.items():
            sampling = Sampling.make(1, device, **params)
            left = torch.full((1,), 1 << 20, dtype=torch.int32, device=device)
            found: dict = {}

            def gathered() -> None:
                parts = torch.empty(me.world, nodes, shard, dtype=whole.dtype, device=device)
                dist.all_gather_into_tensor(parts.flatten(0, 1), mine, group=nccl)
                logits = parts.transpose(0, 1).reshape(nodes, vocab)
                found["gathered"] = verify_tree(logits, tokens, parents, cu, prefix, active, left.clone(), sampling, vocab_size=vocab)
            shape = dict(W=me.world, N=nodes, V=vocab, law=law)
            nbytes = (me.world - 1) * nodes * shard * 2
            me.row("all-gather + verify_tree", "verify_tree_sharded", shape, BF16, gathered, note=f"{nbytes} bytes in")
            for name, comm in comms.items():
                words = []

                def gather(w: torch.Tensor) -> torch.Tensor:
                    words.append(w.numel() * 8)
                    return comm.gather_rows(w)

                def sharded() -> None:
                    words.clear()
                    found[name] = verify_tree_sharded(
                        mine, tokens, parents, cu, prefix, active, left.clone(), sampling, gather, vocab_offset=me.rank * shard,
                        vocab_size=vocab, filters=law == "top-k+top-p", max_path=nodes)
                same = lambda: all(torch.equal(getattr(found[name], f)[:, :3] if getattr(found[name], f).dim() > 1  # noqa: E731
                                               else getattr(found[name], f), getattr(found["gathered"], f)[:, :3]
                                               if getattr(found["gathered"], f).dim() > 1 else getattr(found["gathered"], f))
                                   for f in ("out_tokens", "num_tokens_out", "next_root"))
                sharded()
                me.row(f"vocab-parallel over {name}", "verify_tree_sharded", shape, BF16, sharded, same,
                       f"{(me.world - 1) * sum(words)} bytes in, {len(words)} gathers")


def environment_for_ranks() -> dict:
    """Multicast stays off: neither NCCL's NVLS nor torch's symmetric memory may bind it."""
    return dict(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_DEBUG=os.environ.get("NCCL_DEBUG", "WARN"))
