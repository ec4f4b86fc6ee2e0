"""The decode loop on the GPU: one captured graph per cycle, the host some cycles behind.

Every cycle (cycle.py) is captured once per (batch bucket, shape, processors) and replayed. The host never waits for a value
it needs to go on: it launches at most `run_ahead` cycles before it has read the record of an earlier one from the pinned
ring, and does admission, prefill, cancellation and the choice of the next shape in between, all in stream order. Without
capture (CPU tensors, or capture=False) the same cycles run eagerly and give the same tokens.
"""

import contextlib
import itertools
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Callable, Iterator, Optional

import torch

from ..kv.next_inputs import FIELDS, next_inputs
from ..models.batch import ForwardBatch
from ..plan import VerifyPlan
from ..tree.prepare_tree import Prepared, prepare_tree
from .cycle import PAIRS, STOP_IDS, CatchUp, Cycle, LoopState, accept
from .decode import _DONE, _REASONS, OneThread, SamplingParams, check_beams, check_count, check_ids, check_sampling, check_stop_ids
from .pool import Job, RequestPool
from .shapes import OFF, Controller, Shape
from .stats import Stats

CALIBRATION_CYCLES = 10  # of one shape: one eager, one to warm up, two times four


class GraphLoop:
    """Decodes a changing set of requests with a target and an EAGLE-3 draft (or none).

    shapes      the shapes to choose from; one: it always runs. The first must be OFF where there are several
    max_batch   slots; max_length: longest prompt + max_new_tokens of a request
    num_pages   pages of the caches (default: enough for max_batch requests of max_length)
    capture     False: cycles run eagerly (default: True on CUDA)
    run_ahead   cycles that may be in flight before the host reads a record; 0 over several ranks, whose hosts must launch the
                same cycles (every rank submits the same requests in the same order)
    stop_ids    of all requests (default: the target's); at most max_stop_ids, which size their table
    hook        see Cycle
    grammar     grammar(job, drafted) -> int32 [ceil(V/32)] of allowed ids (bit 1 = allowed), or None for all, where `drafted` are the
                tokens drafted behind job.tokens (and the prompt). The cycle is then two graphs with this host step between,
                without run-ahead; stats.host_steps counts them
    coupled     sampled requests are drafted with the noise of their own tokens; greedy ones are left alone. False: no request is
    exact       text with speculation = text without, bit for bit, whatever the batch (slower; docs/decode_loop.md)

    One thread at a time may step, cancel, reset or set stop ids; another is refused (RuntimeError). submit may come from any thread.
    """

    def __init__(self, target, draft=None, *, shapes: tuple = (OFF,), max_batch: int = 1, max_length: int = 2048,
                 num_pages: Optional[int] = None, page_size: int = 16, prefill_chunk: int = 512, run_ahead: int = 2,
                 stop_ids: Optional[list] = None, capture: Optional[bool] = None, hook: Optional[Callable] = None,
                 calibration_length: int = 256, exact: bool = False, grammar: Optional[Callable] = None,
                 coupled: bool = True, max_stop_ids: int = STOP_IDS) -> None:
        for name, value, low in (("max_batch", max_batch, 1), ("max_length", max_length, 1), ("page_size", page_size, 1),
                                 ("prefill_chunk", prefill_chunk, 1), ("run_ahead", run_ahead, 0), ("max_stop_ids", max_stop_ids, 1),
                                 ("calibration_length", calibration_length, 1), ("num_pages", 1 if num_pages is None else num_pages, 1)):
            check_count("GraphLoop", name, value, low)
        shapes = tuple(shapes)
        if not shapes or (len(shapes) > 1 and shapes[0] != OFF):
            raise ValueError(f"GraphLoop: shapes must be one, or several that begin with OFF; got {[s.name for s in shapes]}. "
                             "Fix: put OFF first.")
        if exact and not target.exact_fits():
            raise ValueError("GraphLoop: exact must have a whole target whose matrices are multiples of 16 x 32, bfloat16 on a GPU; got "
                             f"{target.dtype} on {target.device}. Fix: leave exact off.")
        if any(s.speculative for s in shapes) and draft is None:
            raise ValueError("GraphLoop: draft must be an EAGLE-3 draft for shapes other than off; got None. Fix: pass shapes=(OFF,).")
        if draft is not None:
            check_beams("GraphLoop", shapes, draft)
        stops = check_stop_ids(target.config.eos_ids if stop_ids is None else stop_ids, "GraphLoop")
        if len(stops) > max_stop_ids:
            raise ValueError(f"GraphLoop: stop_ids must be at most {max_stop_ids}; got {len(stops)}. Fix: pass fewer, or a larger "
                             "max_stop_ids.")
        self.target, self.draft, self.shapes, self.hook = target, draft, shapes, hook
        self.exact, self.grammar, self.coupled = exact, grammar, coupled
        self.device, self.prefill_chunk = target.device, prefill_chunk
        self.run_ahead = run_ahead if target.comm is None else 0
        self.capture = self.device.type == "cuda" if capture is None else capture
        self.extra = max(s.columns for s in shapes) + 1
        limit = min([target.config.max_position] + ([draft.cos_sin.shape[0]] if draft is not None else []))
        # scratch pages: where calibration writes, so that it never meets a request
        room = CALIBRATION_CYCLES * (max(s.levels for s in shapes) + 1) + self.extra
        self.calibration_length = max(1, min(calibration_length, limit - room))
        scratch = -(-(self.calibration_length + room) // page_size)
        columns = max(scratch, -(-(max_length + self.extra) // page_size))
        pages = max_batch * columns if num_pages is None else num_pages
        self.scratch = range(pages, pages + scratch)
        self.pool = RequestPool(max_batch, range(pages), page_size, self.extra)
        self.max_path = max(s.levels + 1 for s in shapes)
        self.state = LoopState.make(target, draft, max_batch, pages + scratch, page_size, columns, self.max_path)
        if max_stop_ids > STOP_IDS:
            self.state.requests.stop_ids = torch.full((max_stop_ids,), -1, dtype=torch.int64, device=self.device)
        self.max_length, self.limit, self.max_stop_ids = max_length, limit, max_stop_ids
        self._alone = OneThread("GraphLoop")
        self.set_stop_ids(stops)
        self.aux_layers = tuple(draft.config.aux_layers) if draft is not None else ()
        self._prefill_plan = VerifyPlan(1, 1, 1, 0, target.dtype, self.device)
        self._cycles: dict = {}       # (batch, shape, processors) -> Cycle
        self._graphs: dict = {}       # the same -> CUDAGraph (with a grammar: of the cycle's first half)
        self._second: dict = {}       # with a grammar: the replay of the second half
        self._catch_up: dict = {}     # batch -> (CatchUp, what runs it: its replay, or it itself)
        self.times: dict = {}         # (batch, processors) -> {shape name: ms}
        self.controllers: dict = {}
        self._memory = torch.cuda.graph_pool_handle() if self.capture else None
        self._flight: deque = deque()  # of _Flight: records that the host has not looked at
        self._issued = 0              # records asked for
        self._behind = 0              # plain cycles since the draft's last extend
        self._numbers = itertools.count()
        self._read_at: Optional[float] = None  # when the last record was read, if the device has been busy since
        self.stats = Stats()
        if grammar is not None:
            rows, words = max_batch * max(s.nodes for s in shapes), -(-target.config.vocab_size // 32)
            self._mask = torch.full((rows, words), -1, dtype=torch.int32, device=self.device)
            self._host_mask = torch.full((rows, words), -1, dtype=torch.int32, device="cpu", pin_memory=self.device.type == "cuda")
            self.run_ahead = 0

    # ---- requests ------------------------------------------------------------------------------------------------

    def submit(self, prompt: list, max_new_tokens: int = 128, params: SamplingParams = SamplingParams()) -> Job:
        """Queues a request. Its tokens come from step(); errors are those of generate, and leave the loop as it was."""
        vocab = self.target.config.vocab_size
        prompt = check_ids("submit", prompt, vocab)
        check_count("submit", "max_new_tokens", max_new_tokens, -(1 << 63), "pass a positive number")
        check_sampling(params, vocab, op="submit")
        if not prompt or max_new_tokens < 1:
            raise ValueError(f"submit: prompt and max_new_tokens must be at least 1 token; got {len(prompt)} and {max_new_tokens}. "
                             "Fix: pass a prompt and a positive number.")
        total = len(prompt) + max_new_tokens
        if total > self.max_length or total + self.extra > self.limit:
            most = min(self.max_length, self.limit - self.extra)
            raise ValueError(f"submit: prompt + max_new_tokens must be at most {most} positions; got {len(prompt)} + "
                             f"{max_new_tokens} = {total}. Fix: shorten the prompt, or make the loop with a larger max_length.")
        if self.pool.pages_for(len(prompt), max_new_tokens) > self.pool.pages.total:
            raise ValueError(f"submit: the request must fit into {self.pool.pages.total} pages; got "
                             f"{self.pool.pages_for(len(prompt), max_new_tokens)}. Fix: make the loop with more pages.")
        processors = bool(params.bias) or params.repetition_penalty != 1.0 or bool(params.frequency_penalty or params.presence_penalty)
        job = Job(next(self._numbers), prompt, max_new_tokens, params, processors=processors)
        self.pool.waiting.append(job)
        return job

    @torch.inference_mode()
    def cancel(self, job: Job) -> None:
        """Ends a request; others go on. Tokens of cycles in flight are dropped. A call that fails changes nothing."""
        with self._alone:
            if job.finish is not None:
                return
            if not any(j is job for j in (*self.pool.slots, *self.pool.waiting)):
                raise ValueError(f"cancel: the job must be one of this loop; got job {job.number} of another. Fix: ask the loop it was "
                                 "submitted to.")
            if job.slot >= 0:
                self.state.requests.active[job.slot:job.slot + 1].fill_(0)
                self.pool.leave(job)
            else:
                self.pool.waiting.remove(job)
            job.finish = "cancelled"

    @torch.inference_mode()
    def set_stop_ids(self, stop_ids: list) -> None:
        """Stop ids of all requests from now on, at most max_stop_ids."""
        stops = check_stop_ids(stop_ids, "set_stop_ids")
        if len(stops) > self.max_stop_ids:
            raise ValueError(f"set_stop_ids: stop_ids must be at most {self.max_stop_ids}; got {len(stops)}. Fix: pass fewer, or make the "
                             "loop with a larger max_stop_ids.")
        with self._alone:
            table = self.state.requests.stop_ids
            table.copy_(torch.tensor(stops + [-1] * (table.numel() - len(stops)), dtype=torch.int64, device="cpu"))

    # ---- the loop ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list:
        """Admits what fits, launches at most one cycle and returns the spans (job, tokens) that have become known. Without capture a step
        that admits returns the first tokens and leaves the cycle to the next."""
        with self._alone:
            return self._step()

    def _step(self) -> list:
        spans, keep, admitted = [], 0, False
        while (job := self.pool.admit()) is not None:
            self._prefill(job)
            admitted = True
        if admitted and not self.capture:  # cycles run where they are launched: the first tokens would come with the first cycle's
            while self._flight:
                spans += self._collect()
            return spans
        while self._flight and self.grammar is not None:  # the grammar must know every token so far
            spans += self._collect()
        if self._worth_a_cycle():
            self._launch()
            keep = self.run_ahead
        if len(self._flight) > keep:
            spans += self._collect()
        # over several ranks every record is read before anything is decided: what one host knows the others must know too
        while self._flight and (self.target.comm is not None or len(self._flight) > keep > 0 or self._known(self._flight[0])):
            spans += self._collect()
        return spans

    @torch.inference_mode()
    def reset(self) -> None:
        """Cancels everything and waits for the device: the state to start from, also after an exception in the middle of a step
        (Ctrl-C, out of memory). Graphs, caches and what the controllers have learned stay."""
        with self._alone:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.state.requests.active.zero_()
            if self.state.pair_count is not None:
                self.state.pair_count.zero_()
            issued = int(self.state.ring.sequence)  # what was launched but not noted, or the other way round
            for job in [*self.pool.running, *self.pool.waiting]:
                job.finish = job.finish or "cancelled"
                self.pool.leave(job)
            self.pool.waiting.clear()
            self._flight.clear()
            self._behind, self._read_at, self._issued = 0, None, issued

    def busy(self) -> bool:
        """Whether requests wait or run, or records are unread."""
        return bool(self.pool.waiting or self.pool.running or self._flight)

    def run(self) -> Iterator[tuple]:
        """Steps until every request is done; yields (job, tokens)."""
        while self.busy():
            yield from self.step()

    def _worth_a_cycle(self) -> bool:
        """False where the cycles in flight are sure to finish every request."""
        return any(j.max_new_tokens - len(j.tokens) > sum(j in f.jobs for f in self._flight) for j in self.pool.running)

    def _launch(self) -> None:
        bucket = self.pool.bucket()
        processors = any(j.processors for j in self.pool.running)
        shape = self._choose(bucket, processors)
        if self.draft is not None:
            if shape.speculative and self._behind or self._behind >= PAIRS:
                self._catch_up_now(bucket)
            self._behind += not shape.speculative
        self._replay(bucket, shape, processors)
        self._issue(shape, self.pool.slots[:bucket], bucket)

    def _issue(self, shape: Optional[Shape], jobs: list, bucket: int) -> None:
        self._issued += 1
        self._flight.append(_Flight(self._issued, shape, list(jobs), bucket))

    def _replay(self, batch: int, shape: Shape, processors: bool) -> None:
        key = (batch, shape, processors)
        cycle = self._prepare(key)
        first, second = (self._graphs[key].replay, self._second.get(key)) if self.capture else self._halves(cycle)
        first()
        if self.grammar is not None:
            self._fill_mask(cycle.plan, self.pool.slots[:batch])
            self.stats.host_steps += 1
            second()

    def _halves(self, cycle: Cycle) -> tuple:
        """(the whole cycle, None), or with a grammar its halves before and after the masks are known."""
        if self.grammar is None:
            return cycle.run, None
        kept: list = [None, None]

        def before() -> None:
            kept[:] = cycle.verify_inputs()

        return before, lambda: cycle.accept(*kept, bitmask=self._mask[:kept[0].shape[0]])

    def _fill_mask(self, plan: VerifyPlan, jobs: list) -> None:
        """Asks the grammar about every node of the trees: the host step of a cycle with a grammar."""
        cu, tokens, parents = plan.tree.cu_nodes.tolist(), plan.tree.tokens.tolist(), plan.tree.parents.tolist()
        for job, low, high in zip(jobs, cu, cu[1:]):
            paths: list = []
            for row in range(low, high):
                paths.append([] if row == low else paths[parents[row]] + [tokens[row]])
                self._allow(row, self.grammar(job, paths[-1]))
        rows = plan.tree.tokens.numel()
        self._mask[:rows].copy_(self._host_mask[:rows], non_blocking=True)

    def _allow(self, row: int, words: Optional[torch.Tensor]) -> None:
        self._host_mask[row] = -1 if words is None else words

    def _catch_up_now(self, batch: int) -> None:
        self._prepare_catch_up(batch)
        self._catch_up[batch][1]()
        self._behind = 0

    @torch.inference_mode()
    def _prepare_catch_up(self, batch: int) -> None:
        if batch in self._catch_up:
            return
        catch_up = CatchUp(self.draft, self.state, batch)  # kept: a replay writes its buffers
        run = catch_up.run
        if self.capture:
            with _Scratch(self, batch):
                run()
                torch.cuda.synchronize(self.device)
                graph = self._captured(run)
            run = graph.replay
        self._catch_up[batch] = (catch_up, run)

    def _choose(self, batch: int, processors: bool) -> Shape:
        controller = self.controller(batch, processors)
        if controller is None:
            return self.shapes[0]
        shape = controller.choose()
        return shape if self.target.comm is None else self.target.comm.from_first(shape)  # clocks differ between ranks

    def controller(self, batch: int, processors: bool = False) -> Optional[Controller]:
        """The controller of a bucket; measures every shape the first time. None with a single shape."""
        if len(self.shapes) == 1:
            return None
        key = (batch, processors)
        if key not in self.controllers:
            for shape in self.shapes:
                self._prepare((batch, shape, processors))
            if self.draft is not None:
                self._prepare_catch_up(batch)
            known = next(iter(self.controllers.values()), None)
            self.controllers[key] = Controller(self.shapes, dict(self.times[key]))
            if known is not None:
                self.controllers[key].learn_from(known)
        return self.controllers[key]

    # ---- capture and calibration -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def _prepare(self, key: tuple) -> Cycle:
        """The cycle of `key`, captured and timed when it is asked for first."""
        if key in self._cycles:
            return self._cycles[key]
        batch, shape, processors = key
        if processors:
            self._make_processors()
        cycle = Cycle(self.target, self.draft, self.state, shape, batch, processors=processors, hook=self.hook,
                      exact=self.exact, coupled=self.coupled)
        if not self.capture and len(self.shapes) == 1:  # nothing to choose from: nothing to measure
            self._cycles[key] = cycle
            return cycle
        with _Scratch(self, batch):
            parts = [part for part in self._halves(cycle) if part is not None]
            for part in parts:
                part()
            if self.capture:
                torch.cuda.synchronize(self.device)
                graphs = [self._captured(part) for part in parts]
                self._graphs[key], parts = graphs[0], [g.replay for g in graphs]
                if len(parts) > 1:
                    self._second[key] = parts[1]
            ms = self._time(lambda: [part() for part in parts])
        self._cycles[key] = cycle
        self.times.setdefault((batch, processors), {})[shape.name] = ms
        return cycle

    def _captured(self, part: Callable) -> "torch.cuda.CUDAGraph":
        before, graph = torch.cuda.current_stream(self.device), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):  # NCCL's threads go on meanwhile
                part()
        except BaseException:
            self._abandon(graph)
            torch.cuda.set_stream(before)
            raise
        return graph

    def _abandon(self, graph: "torch.cuda.CUDAGraph") -> None:
        """After a capture that was lost, or left half way, torch's stream and allocator are still in it: ends that. The next capture takes
        another pool."""
        with contextlib.suppress(RuntimeError):
            if torch.cuda.is_current_stream_capturing():
                graph.capture_end()
        with contextlib.suppress(AttributeError, RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._memory)
        self._memory = torch.cuda.graph_pool_handle()

    def _time(self, run: Callable) -> float:
        """Milliseconds of one cycle in the calibration state."""
        run()
        if not self.capture:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        best = float("inf")
        for _ in range(2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(4):
                run()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 4)
        return best

    def _make_processors(self) -> None:
        r, (first, end), batch = self.state.requests, self.target.vocab_range, len(self.pool.slots)
        if r.counts is None:
            r.penalties = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float32, device=self.device).repeat(batch, 1)
            r.counts = torch.zeros(batch, end - first, dtype=torch.int32, device=self.device)
            r.bias = torch.zeros(batch, end - first, dtype=torch.float32, device=self.device)

    # ---- admission -------------------------------------------------------------------------------------------------

    def _send(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        """Host values on the device, without waiting for it."""
        t = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=self.device.type == "cuda")
        return t.to(self.device, non_blocking=True)

    def _prefill(self, job: Job) -> None:
        """Takes over the slot and runs the prompt in chunks; the first token comes from the same verify as all others."""
        b, state = job.slot, self.state
        if job.processors:
            self._make_processors()
        req = state.requests.row(b)
        self._set_request(req, job)
        tokens = self._send(job.prompt, torch.int32)
        for start in range(0, len(job.prompt), self.prefill_chunk):
            chunk = tokens[start:start + self.prefill_chunk]
            n, final = chunk.numel(), start + chunk.numel() == len(job.prompt)
            batch = self._chain(chunk, req.prefix_len, req)
            hidden, aux = self.target.forward(batch, state.cache, self.aux_layers)
            if final:  # the last prompt token is the root of a one-node tree at position len(prompt) - 1
                req.prefix_len.fill_(len(job.prompt) - 1)
                self._first_token(hidden[-1:], chunk[-1:], req, job)
            else:
                req.prefix_len.fill_(start + n)
            if self.draft is not None:
                shifted = torch.cat([chunk[1:], req.root if final else tokens[start + n:start + n + 1]])
                pairs = self._chain(shifted, req.draft_len, req)
                h2 = self.draft.forward(pairs, self.draft.fuse(aux), state.draft_cache)
                req.draft_len.fill_(start + n)
        if self.draft is not None:
            state.last_hidden[b:b + 1].copy_(h2[-1:])
            state.pair_count[b:b + 1].fill_(0)
        self._issue(None, [job], 1)

    def _first_token(self, hidden: torch.Tensor, token: torch.Tensor, req, job: Job) -> None:
        plan, processors = self._prefill_plan, job.processors
        t = plan.tree
        t.tokens.copy_(token)
        t.parents.fill_(-1)
        t.cu_nodes.copy_(self._one())
        row = req if processors else replace(req, bias=None, penalties=None, counts=None)
        mask = None
        if self.grammar is not None:
            words = self.grammar(job, [])
            mask = None if words is None else self._send(words.tolist(), torch.int32)[None]
        accept(self.target, self.target.logits(hidden), plan, row, mask)
        next_inputs(plan.out, t, req.active, req.prefix_len, req.root, ring=self.state.ring, first=job.slot)

    def _one(self) -> torch.Tensor:
        """[0, 1] on the device, made there."""
        return torch.arange(2, dtype=torch.int32, device=self.device)

    def _set_request(self, req, job: Job) -> None:
        p = job.params
        req.page_table[0, :len(job.pages)].copy_(self._send(job.pages, torch.int32))
        s = req.sampling
        for tensor, value in ((req.prefix_len, 0), (req.draft_len, 0), (req.root, job.prompt[-1]), (req.remaining, job.max_new_tokens),
                              (req.active, 1), (s.temperature, p.temperature), (s.top_k, p.top_k), (s.top_p, p.top_p),
                              (s.min_p, p.min_p), (s.seed, p.seed)):
            tensor.fill_(value)
        if req.counts is not None:
            req.counts.zero_()
            req.bias.zero_()
            req.penalties.copy_(self._send([[p.repetition_penalty, p.frequency_penalty, p.presence_penalty]], torch.float32))
            for token, value in p.bias.items():
                req.bias[0, token - self.target.vocab_range[0]].fill_(value)

    def _chain(self, tokens: torch.Tensor, base: torch.Tensor, req) -> ForwardBatch:
        """A causal stretch of one request behind `base` [1] tokens of its cache."""
        n = tokens.numel()
        cu = self._one() * n
        p = Prepared(positions=torch.zeros(n, dtype=torch.int32, device=self.device),
                     slots=torch.zeros(n, dtype=torch.int64, device=self.device))
        prepare_tree(None, cu, base, req.page_table, self.state.cache.page_size, p)
        return ForwardBatch(tokens, p.positions, p.slots, cu, base, req.page_table)

    # ---- the host side -----------------------------------------------------------------------------------------------

    def _collect(self) -> list:
        """Reads the oldest record; jobs that it ends leave the pool."""
        flight = self._flight.popleft()
        waited = not self._known(flight)
        rows = flight.rows if flight.rows is not None else self.state.ring.read(flight.number)[1]
        now, shape = time.perf_counter(), flight.shape
        spans, accepted, depths, nodes = [], [], [], []
        for job, row in zip(flight.jobs, rows.tolist()):
            n, flags, taken, count, depth = row[:FIELDS]
            if job is None or job.finish is not None:
                continue
            if shape is not None and count:
                accepted.append(taken)
                depths.append(depth)
                nodes.append(count)
            if n:
                job.tokens += row[FIELDS:FIELDS + n]
                spans.append((job, row[FIELDS:FIELDS + n]))
            if flags & _DONE:
                job.finish = next(name for bits, name in _REASONS if flags & bits)
                self.pool.leave(job)
        self._count(shape, flight.bucket, accepted, depths, nodes, spans, now if waited else None)
        return spans

    def _known(self, flight: "_Flight") -> bool:
        return flight.rows is not None or self.state.ring.ready(flight.number)

    def _hold(self) -> None:
        """Reads every record in flight and keeps it for _collect: afterwards the device is idle and the ring free."""
        for flight in self._flight:
            if flight.rows is None:
                flight.rows = self.state.ring.read(flight.number)[1]
        self._read_at = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _count(self, shape: Optional[Shape], bucket: int, accepted: list, depths: list, nodes: list, spans: list,
               now: Optional[float]) -> None:
        emitted = sum(len(t) for _, t in spans)
        self.stats.emitted += emitted
        if shape is None:
            self.stats.first_tokens += emitted
            self._read_at = now
            return
        self.stats.count(accepted, depths, nodes)
        self.stats.steps[shape.name] += 1
        # two records that the host had to wait for, one after the other: the device was busy with the second in between
        ms = (now - self._read_at) * 1e3 if now is not None and self._read_at is not None else None
        self._read_at = now
        for (batch, _), controller in self.controllers.items():
            if accepted:
                controller.observe(shape, sum(accepted) / len(accepted), ms if batch == bucket else None, accepted)


@dataclass
class _Flight:
    """One record that the device owes: of a cycle, or of a prefill (shape None). jobs: by slot; rows: the record, once read."""

    number: int
    shape: Optional[Shape]
    jobs: list
    bucket: int
    rows: Optional[object] = None


class _Scratch:
    """Puts every slot of a bucket at the calibration length on scratch pages, and everything back afterwards."""

    def __init__(self, loop: GraphLoop, batch: int) -> None:
        self.loop, self.batch = loop, batch

    def __enter__(self) -> None:
        loop, r = self.loop, self.loop.state.requests
        loop._hold()
        self.tensors = [*loop.state.tensors(), r.stop_ids]
        self.saved = [t.clone() for t in self.tensors]
        r.page_table[:, :len(loop.scratch)] = loop._send(list(loop.scratch), torch.int32)
        r.stop_ids.fill_(-1)
        r.active.fill_(0)
        r.active[:self.batch].fill_(1)
        length = loop.calibration_length
        for t, value in ((r.prefix_len, length), (r.draft_len, length), (r.remaining, 1 << 20), (r.root, 1)):
            t.fill_(value)
        if loop.state.pair_count is not None:  # the pairs of running requests would be appended behind the scratch pages
            loop.state.pair_count.zero_()

    def __exit__(self, *_) -> None:
        for t, value in zip(self.tensors, self.saved):
            t.copy_(value)
        if self.loop.device.type == "cuda":
            torch.cuda.synchronize(self.loop.device)
        self.loop.state.ring.words[:, 0] = 0  # the numbers that calibration has used will come again
