"""The decode loop: draft -> tree -> target forward -> accept -> compact -> draft. Read `_round`: it is the algorithm.

Plain decoding is the same loop with trees of one node, so the two emit the same text wherever the logits agree.
Definitions and indices: docs/algorithm.md. EAGLE-3: Li et al. 2025; its pairing and extend: eagle3/grow.py.
"""

import operator
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Iterator, Optional

import torch

from ..accept.rule import Flag
from ..accept.verify_tree import Sampling, verify_tree
from ..kv.compact_kv import compact_kv
from ..models.batch import ForwardBatch
from ..plan import VerifyPlan
from ..tree.build_tree import build_tree
from ..tree.ngram import NgramDrafter
from ..tree.prepare_tree import Prepared, prepare_tree
from . import grow
from .requests import Pending, Requests
from .shapes import AUTO, OFF, Controller, Shape, parse_shape
from .sharded import accept_sharded
from .stats import Stats

_DONE = Flag.STOP | Flag.BUDGET | Flag.EMPTY_ROW | Flag.BAD_ROW
# In this order: the walk may have visited bad rows behind the end of the text, which plain decoding never meets.
_REASONS = ((Flag.STOP, "stop"), (Flag.BUDGET, "length"), (Flag.EMPTY_ROW | Flag.BAD_ROW, "bad_logits"))
_LARGE = 1e38
_COLDEST = 1e-30  # the least temperature: logits up to 3e8 over it are finite in float32, below it they would saturate to ties
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_RANGES = dict(temperature=(0, _LARGE), top_p=(0, 1), min_p=(0, 1), repetition_penalty=(1 / _LARGE, _LARGE),
               frequency_penalty=(-_LARGE, _LARGE), presence_penalty=(-_LARGE, _LARGE))


@dataclass
class Result:
    """tokens[b]: emitted ids (the stop id included). finish[b]: "stop", "length" or "bad_logits"."""

    tokens: list
    finish: list
    stats: Stats


@dataclass
class SamplingParams:
    """Host-side sampling parameters of a run; request b uses seed + b. Names and meanings as in verify_tree.

    temperature  0 (greedy), or 1e-30 to 1e38: right for logits up to 3e38 times as large
    bias         finite, or -inf: the id is never drawn
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: dict = field(default_factory=dict)  # token id -> added to its logit


class Decoder:
    """Decodes batches with a target and a drafter.

    target  LlamaModel (load_target); draft: Eagle3Draft (load_draft), NgramDrafter or None (no speculation)
    tree    "auto", "off", "chain-K", "tree-N" (shapes.py)
    coupled runs at a temperature draft with the noise that their own tokens are drawn with: the same text, accepted further

    One decoder per thread: runs share its buffers, and a second thread is refused (RuntimeError) while one is in it. Decoders may share
    target and draft. Streams of one thread may take turns. "auto" leaves out shapes with wider beams than the draft has ids.
    """

    interleaves = True  # two runs may advance side by side without touching each other's times

    def __init__(self, target, draft=None, *, tree: str = "auto", page_size: int = 16, prefill_chunk: int = 512,
                 coupled: bool = True) -> None:
        named = None if tree == "auto" else parse_shape(tree)
        for name, value in (("page_size", page_size), ("prefill_chunk", prefill_chunk)):
            check_count(type(self).__name__, name, value)
        if named == OFF:
            draft = None
        self.target, self.draft = target, draft
        self.page_size, self.prefill_chunk, self.coupled = page_size, prefill_chunk, coupled
        self.eagle = draft is not None and not isinstance(draft, NgramDrafter)
        self.aux_layers = tuple(draft.config.aux_layers) if self.eagle else ()
        self.tree = tree
        if draft is None:
            self.shapes = (OFF,)
        elif named is not None:
            self.shapes = (named,)
            if self.eagle:
                check_beams(type(self).__name__, self.shapes, draft)
        elif self.eagle:
            self.shapes = fitting(AUTO, draft)
        else:
            self.shapes = (OFF, parse_shape(f"chain-{min(16, draft.num_draft)}"))
        self.limit = min([target.config.max_position] + ([draft.cos_sin.shape[0]] if self.eagle else []))  # positions
        self._plans: dict = {}
        self._controllers: dict = {}
        self._alone = OneThread(type(self).__name__)

    # ---- public ------------------------------------------------------------------------------------------

    def generate(self, prompts: list, max_new_tokens: int = 128, sampling: SamplingParams = SamplingParams(),
                 stop_ids: Optional[list] = None) -> Result:
        """Decodes all prompts (lists of token ids) to the end. stop_ids None: the target's eos ids."""
        with self._alone:
            run = _Run(self, prompts, max_new_tokens, sampling, stop_ids)
            for _ in run.spans():
                pass
            return run.result()

    def stream(self, prompts: list, max_new_tokens: int = 128, sampling: SamplingParams = SamplingParams(),
               stop_ids: Optional[list] = None) -> Iterator[tuple]:
        """Yields (request, [tokens]) as they are emitted; the generator's return value is the Result."""
        run = _Run(self, prompts, max_new_tokens, sampling, stop_ids)
        yield from run.spans()
        return run.result()

    # ---- buffers and calibration ---------------------------------------------------------------------------

    def plan(self, batch: int, shape: Shape) -> VerifyPlan:
        """The buffers of a shape, made once per (batch, shape)."""
        key = (batch, shape)
        if key not in self._plans:
            grown = shape.speculative and self.eagle
            max_path = min(shape.nodes, shape.levels + 1) if grown else shape.nodes
            self._plans[key] = VerifyPlan(
                batch, shape.nodes, max_path, len(self.aux_layers) * self.target.config.hidden_size, self.target.dtype,
                self.target.device, draft=self.draft if grown else None, k=shape.k, levels=shape.levels)
        return self._plans[key]

    def controller(self, batch: int) -> Optional[Controller]:
        """Measures one round of every shape (tree="auto"); once per batch size, a second or two.

        None (plain decoding) with a single shape, or where the target gives no rounds to measure.
        """
        if len(self.shapes) == 1:
            return None
        with self._alone:
            if batch not in self._controllers:
                # two passes, the better of each: a busy moment must not decide against a shape for good
                passes = [{shape.name: self._round_ms(batch, shape) for shape in self.shapes} for _ in range(2)]
                if None in passes[0].values() or None in passes[1].values():
                    return None
                times = {name: min(p[name] for p in passes) for name in passes[0]}
                self._controllers[batch] = Controller(self.shapes, times)
            return self._controllers[batch]

    def _round_ms(self, batch: int, shape: Shape, rounds: int = 5) -> Optional[float]:
        """Median milliseconds of a round on made-up text, short enough for any target; None if there was none."""
        vocab, new = self.target.config.vocab_size, rounds * (shape.levels + 1) + 2
        length = min(48, self.limit - new - _extra_rows((shape,)))
        if length < 8:
            return None
        # the text repeats, so that an n-gram drafter drafts full trees too
        prompts = [[(7919 * (i % 4) + b) % vocab for i in range(length)] for b in range(batch)]
        ordered = sorted(r["total"] for r in self.time_rounds(prompts, shape, rounds)[1:])
        return ordered[len(ordered) // 2] if ordered else None

    def time_rounds(self, prompts: list, shape: Shape, rounds: int, stats: Optional[Stats] = None) -> list:
        """Runs `rounds` rounds of one shape behind the prompts, stop ids ignored; [{"draft", "target", "verify", "other",
        "total"}] in ms, one per round (the first one is cold). An n-gram drafter drafts from the prompts alone.

        stats  takes the counts and times; SynchronizedStats for stage times of an asynchronous device
        """
        run = _Run(self, prompts, rounds * (shape.levels + 1) + 2, SamplingParams(), [], fixed=shape)
        run.stats = stats or run.stats
        stages, seen, found = ("draft", "target", "verify"), dict(run.stats.ms), []
        for _ in run.spans(limit=rounds):
            if len(run.round_ms) > len(found):  # a round's spans come after its last stage
                now = dict(run.stats.ms)
                found.append({s: now[s] - seen[s] for s in stages} | {"total": run.round_ms[-1]})
                found[-1]["other"] = found[-1]["total"] - sum(found[-1][s] for s in stages)
                seen = now
        return found


def _extra_rows(shapes: tuple) -> int:
    """Cache rows and positions to reserve behind prompt and text."""
    return max(s.columns for s in shapes) + 1


class OneThread:
    """`with` it around what one thread at a time may do: a second one is refused, not kept waiting. One thread may nest it."""

    def __init__(self, name: str) -> None:
        self.name, self._lock = name, threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(f"{self.name}: the thread must be the only one in it; got a second one while a run is under way. "
                               f"Fix: make one {self.name} per thread; they may share target and draft.")

    def __exit__(self, *_) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple:
        return OneThread, (self.name,)


def fitting(names: tuple, draft) -> tuple:
    """The named shapes whose beams the draft's vocabulary can fill."""
    return tuple(s for s in map(parse_shape, names) if s.k <= draft.config.draft_vocab_size)


def check_beams(op: str, shapes: tuple, draft) -> None:
    wide = next((s for s in shapes if s.k > draft.config.draft_vocab_size), None)
    if wide is not None:
        raise ValueError(f"{op}: shapes must have beams of at most {draft.config.draft_vocab_size}, the draft's ids; got {wide.name} with "
                         f"beams of {wide.k}. Fix: try chain-3.")


def _integer(value: Any, low: int, high: int) -> bool:
    """Whether it is an integer (Python's, numpy's or torch's) in [low, high]."""
    try:
        return low <= operator.index(value) <= high
    except TypeError:
        return False


def _within(value: Any, low: float, high: float) -> bool:
    try:
        return bool(low <= value <= high)
    except (TypeError, ValueError, RuntimeError):  # no number, or many
        return False


def check_count(op: str, name: str, value: Any, low: int = 1, fix: str = "leave it out") -> None:
    if not _integer(value, -_INT64, _INT64):
        raise ValueError(f"{op}: {name} must be an integer; got {value!r:.60}. Fix: {fix}.")
    if value < low:
        raise ValueError(f"{op}: {name} must be at least {low}; got {value}. Fix: {fix}.")


def check_ids(op: str, prompt: Any, vocab: int) -> list:
    """The token ids of one prompt, as ints."""
    try:
        ids = [operator.index(t) for t in prompt]
    except TypeError:
        raise ValueError(f"{op}: a prompt must be a list of token ids (integers); got {prompt!r:.60}. "
                         "Fix: encode the text with this target's tokenizer.") from None
    wrong = next((t for t in ids if not 0 <= t < vocab), None)
    if wrong is not None:
        raise ValueError(f"{op}: token ids must be in [0, {vocab}); got {wrong}. Fix: encode with this target's tokenizer.")
    return ids


def check_prompts(prompts: list, max_new: int, extra: int, vocab: int, limit: int) -> list:
    """Refuses what no run can decode: prompts of a run with `extra` rows behind them, in a loop of `limit` positions. Returns their ids
    as ints."""
    try:
        prompts = list(prompts)
    except TypeError:
        raise ValueError(f"generate: prompts must be a list of prompts; got {prompts!r:.60}. Fix: pass [prompt].") from None
    prompts = [check_ids("generate", p, vocab) for p in prompts]
    if not prompts or any(len(p) == 0 for p in prompts):
        raise ValueError("generate: every prompt must hold at least one token; got an empty one. Fix: drop it.")
    check_count("generate", "max_new_tokens", max_new, fix="pass a positive number")
    longest = max(len(p) for p in prompts)
    if longest + max_new + extra > limit:
        raise ValueError(
            f"generate: prompt + max_new_tokens + drafted rows must be at most {limit} positions; got {longest} + {max_new} + "
            f"{extra} = {longest + max_new + extra}. Fix: shorten the prompt or ask for fewer tokens.")
    return prompts


def check_sampling(p: SamplingParams, vocab: int, batch: int = 1, op: str = "generate") -> None:
    """The op replaces and flags values out of range; a caller of generate is told. `batch` requests use seed, seed + 1, ..."""
    for name, (low, high) in _RANGES.items():
        value = getattr(p, name)
        if not _within(value, low, high):
            raise ValueError(f"{op}: {name} must be in [{low:g}, {high:g}]; got {value}. Fix: leave it out.")
    if 0 < p.temperature < _COLDEST:
        raise ValueError(f"{op}: temperature must be 0 or at least {_COLDEST:g}; got {p.temperature}. Fix: pass 0 for greedy text.")
    for name, low, high in (("top_k", -_INT32 - 1, _INT32), ("seed", -_INT64 - 1, _INT64 + 1 - batch)):
        value = getattr(p, name)
        if not _integer(value, low, high):
            raise ValueError(f"{op}: {name} must be an integer in [{low}, {high}]; got {value}. Fix: leave it out.")
    if not isinstance(p.bias, Mapping):
        raise ValueError(f"{op}: bias must be a dict from token ids to numbers; got {type(p.bias).__name__}. Fix: leave it out.")
    for token, value in p.bias.items():
        if not _integer(token, 0, vocab - 1):
            raise ValueError(f"{op}: bias ids must be in [0, {vocab}); got {token}. Fix: use ids of this target's tokenizer.")
        if not _within(value, -_LARGE, _LARGE) and value != -float("inf"):
            raise ValueError(f"{op}: bias must be in [{-_LARGE:g}, {_LARGE:g}], or -inf; got {value} for id {token}. "
                             "Fix: leave the id out.")


def check_stop_ids(stop_ids: Any, op: str = "generate") -> list:
    """The stop ids as ints, each once."""
    try:
        stops = list(stop_ids)
    except TypeError:
        raise ValueError(f"{op}: stop_ids must be a list of token ids; got {stop_ids!r:.60}. Fix: pass [id].") from None
    for t in stops:
        if not _integer(t, -_INT64 - 1, _INT64):
            raise ValueError(f"{op}: stop_ids must be 64-bit integers; got {t!r:.60}. Fix: use ids of this target's tokenizer.")
    return list(dict.fromkeys(operator.index(t) for t in stops))


class _Run:
    """One batch from prefill to the last token."""

    def __init__(self, decoder: Decoder, prompts: list, max_new_tokens: int, params: SamplingParams, stop_ids: Optional[list],
                 fixed: Optional[Shape] = None) -> None:
        self.d, self.target, self.draft = decoder, decoder.target, decoder.draft
        self.fixed = fixed
        config, device = self.target.config, self.target.device
        shapes = decoder.shapes if fixed is None else (fixed,)
        extra = _extra_rows(shapes)
        self.prompts = prompts = check_prompts(prompts, max_new_tokens, extra, config.vocab_size, decoder.limit)
        check_sampling(params, config.vocab_size, len(prompts))
        stops = check_stop_ids(config.eos_ids if stop_ids is None else stop_ids)
        self.controller = decoder.controller(len(prompts)) if fixed is None else None
        self.shape = shapes[0] if self.controller is None else OFF
        self.req = Requests.make([len(p) for p in prompts], max_new_tokens, extra, decoder.page_size,
                                 Sampling.make(len(prompts), device, params.temperature, params.top_k, params.top_p,
                                               params.min_p, params.seed), device,
                                 stop_ids=torch.tensor(stops, dtype=torch.int64, device=device) if stops else None)
        self._add_processors(params, len(prompts), device)
        self.coupling = self.req.coupling() if decoder.coupled and params.temperature > 0 else None
        num_pages = self.req.page_table.numel()
        self.cache = self.target.make_cache(num_pages, decoder.page_size)
        self.draft_cache = self.draft.make_cache(num_pages, decoder.page_size) if decoder.eagle else None
        self.pending, self.last_hidden = Pending(), None
        self.tokens = [[] for _ in prompts]
        self.finish = [None] * len(prompts)
        self.stats, self.round_ms = Stats(), []

    def _add_processors(self, p: SamplingParams, batch: int, device) -> None:
        first, end = self.target.vocab_range
        self.filters = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
        if p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty:
            row = torch.tensor([p.repetition_penalty, p.frequency_penalty, p.presence_penalty], dtype=torch.float32, device=device)
            self.req.penalties = row.repeat(batch, 1)
            self.req.counts = torch.zeros(batch, end - first, dtype=torch.int32, device=device)
        if p.bias:
            self.req.bias = torch.zeros(batch, end - first, dtype=torch.float32, device=device)
            for token, value in p.bias.items():
                if first <= token < end:
                    self.req.bias[:, token - first] = value

    # ---- the loop ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def spans(self, limit: Optional[int] = None) -> Iterator[tuple]:
        """Yields (request, tokens) spans until all requests are done, or `limit` rounds have run."""
        with self.d._alone, self.stats.timer("prefill"):
            spans = self._prefill()
        yield from spans
        while any(f is None for f in self.finish) and (limit is None or len(self.round_ms) < limit):
            with self.d._alone:
                start = time.perf_counter()
                spans = self._round()
                self.round_ms.append((time.perf_counter() - start) * 1e3)
            yield from spans
        self.stats.decode_ms = sum(self.round_ms)
        self.stats.ms["other"] = self.stats.decode_ms - sum(self.stats.ms[s] for s in ("draft", "target", "verify"))

    def _round(self) -> list:
        """One cycle of the whole batch."""
        req, shape = self.req, self._choose_shape()
        plan = self.d.plan(len(self.prompts), shape)
        with self.stats.timer("draft"):
            self._draft(shape, plan)                                  # -> plan.tree
        with self.stats.timer("target"):
            t = plan.tree
            prepare_tree(t.parents, t.cu_nodes, req.prefix_len, req.page_table, self.d.page_size, plan.prepared)
            hidden, aux = self.target.forward(
                ForwardBatch(t.tokens, t.positions, plan.prepared.slots, t.cu_nodes, req.prefix_len, req.page_table, t.mask,
                             schedule=plan.prepared.schedule), self.cache, self.d.aux_layers)
            logits = self.target.logits(hidden)
        with self.stats.timer("verify"):
            self._accept(logits, t.tokens, t.parents, t.cu_nodes, req, plan)
            compact_kv(self.cache.k, self.cache.v, plan.out.path, plan.out.num_tokens_out, req.prefix_len, req.page_table,
                       cu_nodes=t.cu_nodes, aux=aux, aux_out=plan.aux_out, cu_out=plan.cu_out)
        spans = self._emit(plan, shape)
        if self.d.eagle:
            with self.stats.timer("draft"):
                self._extend(plan, shape)
        req.prefix_len += plan.out.num_tokens_out
        torch.where(plan.out.num_tokens_out > 0, plan.out.next_root.int(), req.root, out=req.root)
        return spans

    def _choose_shape(self) -> Shape:
        if self.controller is not None:
            self.shape = self.controller.choose()
            if self.target.comm is not None:  # clocks differ between ranks, shapes must not
                self.shape = self.target.comm.from_first(self.shape)
        if self.shape.speculative and not self.d.eagle:
            histories = [p + t if f is None else [] for p, t, f in zip(self.prompts, self.tokens, self.finish)]
            if self.fixed is not None:  # a measurement: what is drafted must not depend on what the target says
                histories = self.prompts
            with self.stats.timer("draft"):
                self.pool = self.draft.pool(histories)
            if bool((self.pool[0] == -torch.inf).all()):
                return OFF  # nothing in the text matches: one row, not a padded tree
        return self.shape

    def _accept(self, logits, tokens, parents, cu_nodes, req: Requests, plan: VerifyPlan) -> None:
        if self.target.comm is not None:
            accept_sharded(self.target, logits, tokens, parents, cu_nodes, req, plan.out, filters=self.filters)
            req.active *= (plan.out.flags & int(_DONE)) == 0
            return
        verify_tree(logits, tokens, parents, cu_nodes, req.prefix_len, req.active, req.remaining, req.sampling,
                    stop_ids=req.stop_ids, bias=req.bias, penalties=req.penalties, counts=req.counts,
                    vocab_size=self.target.config.vocab_size, out=plan.out, workspace=plan.verify_workspace)
        req.active *= (plan.out.flags & int(_DONE)) == 0

    # ---- drafting ------------------------------------------------------------------------------------------------

    def _draft(self, shape: Shape, plan: VerifyPlan) -> None:
        """Fills plan.tree: the bare root, an n-gram tree, or a tree grown by the EAGLE-3 draft."""
        req, vocab = self.req, self.target.config.vocab_size
        if not shape.speculative:
            build_tree(*plan.no_pool, req.root, req.prefix_len, req.active, 1, vocab, plan.tree)
        elif not self.d.eagle:
            pool = [x.to(self.target.device) for x in self.pool]
            build_tree(*pool, req.root, req.prefix_len, req.active, shape.nodes, vocab, plan.tree)
        else:
            if self.pending.rounds:
                self._catch_up()
            grow.draft_tree(self.draft, self.draft_cache, self.last_hidden, req.root, req.prefix_len, req.active,
                            req.page_table, plan.grow, shape.levels, shape.nodes, vocab, self.coupling)

    def _extend(self, plan: VerifyPlan, shape: Shape) -> None:
        """The emitted tokens and the target's features of their rows are the draft's new true pairs."""
        tokens = plan.flatten_tokens()
        if not shape.speculative:
            self.pending.add(plan.aux_out, tokens, plan.out.num_tokens_out, plan.cu_out)
            if len(self.pending.rounds) >= 64:
                self._catch_up()
            return
        self._run_extend(plan.aux_out, tokens, plan.cu_out, plan.extend)

    def _catch_up(self) -> None:
        aux, tokens, cu = self.pending.flush()
        n = tokens.numel()
        self._run_extend(aux, tokens, cu, Prepared(positions=torch.zeros(n, dtype=torch.int32, device=aux.device),
                                                  slots=torch.full((n,), -1, dtype=torch.int64, device=aux.device)))

    def _run_extend(self, aux, tokens, cu, prepared: Prepared) -> None:
        req = self.req
        prepare_tree(None, cu, req.draft_len, req.page_table, self.d.page_size, prepared)
        batch = ForwardBatch(tokens, prepared.positions, prepared.slots, cu, req.draft_len, req.page_table,
                             schedule=prepared.schedule)
        self.last_hidden = grow.extend(self.draft, self.draft_cache, batch, aux, req.active)
        req.draft_len += cu[1:] - cu[:-1]

    # ---- prefill ------------------------------------------------------------------------------------------------

    def _prefill(self) -> list:
        """Every prompt in chunks, one request at a time; its first token comes from the same verify as all others."""
        spans, last = [], []
        plan = self.d.plan(1, OFF)
        for b, prompt in enumerate(self.prompts):
            req = self.req.row(b)
            for start in range(0, len(prompt), self.d.prefill_chunk):
                chunk = prompt[start:start + self.d.prefill_chunk]
                final = start + len(chunk) == len(prompt)
                batch = self._chain(chunk, req)
                hidden, aux = self.target.forward(batch, self.cache, self.d.aux_layers)
                req.prefix_len += len(chunk)
                if final:  # the last prompt token is the root of a one-node tree at position len(prompt) - 1
                    req.prefix_len -= 1
                    self._accept(self.target.logits(hidden[-1:]), batch.tokens[-1:], plan.no_pool[2][0],
                                 torch.tensor([0, 1], dtype=torch.int32, device=hidden.device), req, plan)
                    req.prefix_len += 1
                    spans += self._collect(plan, [b])
                    torch.where(plan.out.num_tokens_out > 0, plan.out.next_root.int(), req.root, out=req.root)
                if self.d.eagle:
                    shifted = torch.cat([batch.tokens[1:], req.root if final else batch.tokens.new_tensor(prompt[start + len(chunk):][:1])])
                    pairs = self._chain(None, req, shifted, draft=True)
                    hidden = grow.extend(self.draft, self.draft_cache, pairs, aux, torch.ones_like(req.active))
                    req.draft_len += len(chunk)
            if self.d.eagle and self.finish[b] is None:
                last.append(hidden)
        if self.d.eagle:
            pad = [torch.zeros_like(hidden)] * (len(self.prompts) - len(last))
            self.last_hidden = torch.cat(last + pad)
        self.stats.first_tokens = sum(len(t) for t in self.tokens)
        return spans

    def _chain(self, chunk: Optional[list], req: Requests, tokens: Optional[torch.Tensor] = None, draft: bool = False) -> ForwardBatch:
        """A causal stretch of one request behind its cache."""
        device = req.root.device
        if tokens is None:
            tokens = torch.tensor(chunk, dtype=torch.int32, device=device)
        n, base = tokens.numel(), req.draft_len if draft else req.prefix_len
        cu = torch.tensor([0, n], dtype=torch.int32, device=device)
        p = Prepared(positions=torch.zeros(n, dtype=torch.int32, device=device),
                     slots=torch.zeros(n, dtype=torch.int64, device=device))
        prepare_tree(None, cu, base, req.page_table, self.d.page_size, p)
        return ForwardBatch(tokens, p.positions, p.slots, cu, base, req.page_table)

    # ---- the host side --------------------------------------------------------------------------------------------

    def _collect(self, plan: VerifyPlan, requests: list) -> list:
        """Reads the emitted tokens: the one host read of a round."""
        spans = []
        for b, tokens, n, flags in zip(requests, plan.out.out_tokens.tolist(), plan.out.num_tokens_out.tolist(),
                                       plan.out.flags.tolist()):
            if self.finish[b] is not None:
                continue
            if n:
                self.tokens[b] += tokens[:n]
                spans.append((b, tokens[:n]))
            if flags & _DONE:
                self.finish[b] = next(name for bits, name in _REASONS if flags & bits)
        self.stats.emitted += sum(len(t) for _, t in spans)
        return spans

    def _emit(self, plan: VerifyPlan, shape: Shape) -> list:
        live = [b for b, f in enumerate(self.finish) if f is None]
        cu, path = plan.tree.cu_nodes.tolist(), plan.out.path.tolist()
        depth = plan.tree.depth.tolist()
        accepted = [sum(p >= 0 for p in path[b]) - 1 for b in live]
        self.stats.count(accepted, [max(depth[cu[b]:cu[b + 1]]) for b in live], [cu[b + 1] - cu[b] for b in live])
        self.stats.steps[shape.name] += 1
        if self.controller is not None and self.round_ms:
            self._observed(shape, sum(accepted) / max(1, len(live)))
        return self._collect(plan, list(range(len(self.prompts))))

    def _observed(self, shape: Shape, accepted: float) -> None:
        if self._previous is not None:
            self.controller.observe(self._previous[0], self._previous[1], self.round_ms[-1])
        self._previous = (shape, accepted)

    _previous: Optional[tuple] = None

    def result(self) -> Result:
        if self.controller is not None:
            self.stats.plain_ms = self.controller.round_ms["off"]
            self.stats.controller = self.controller.reason
        return Result(self.tokens, self.finish, self.stats)
