"""GraphDecoder: Decoder's interface over GraphLoop, for whole batches that start together."""

import time
from dataclasses import replace
from typing import Iterator, Optional

from .cycle import STOP_IDS
from .decode import Decoder, Result, SamplingParams, check_prompts, check_sampling, check_stop_ids, fitting
from .graph_loop import GraphLoop
from .shapes import Controller
from .stats import Stats

AUTO_SHAPES = ("off", "chain-3", "chain-5", "tree-8", "tree-20")
_ROUND = 512  # positions: loops are made for a multiple, so that the next run finds one


class GraphDecoder(Decoder):
    """Decoder whose runs are cycles captured as CUDA graphs (graph_loop.py); same arguments, same tokens.

    The target must be whole (no tensor parallelism), the drafter an EAGLE-3 draft or None. Loops with their caches are kept per
    batch size; the first run of one captures and measures its shapes. Stage times are not known: `other` is all of a cycle.
    One run at a time and batch size: a second is refused (RuntimeError) while a stream of that size is neither at its end nor closed.
    One thread at a time, as Decoder.
    options  further arguments of GraphLoop
    """

    interleaves = False  # two runs side by side would wait for each other's cycles

    def __init__(self, target, draft=None, *, tree: str = "auto", page_size: int = 16, prefill_chunk: int = 512, coupled: bool = True,
                 **options) -> None:
        super().__init__(target, draft, tree=tree, page_size=page_size, prefill_chunk=prefill_chunk, coupled=coupled)
        if target.comm is not None or (self.draft is not None and not self.eagle):
            raise ValueError("GraphDecoder: the target must be whole and the drafter EAGLE-3 or None; got a sharded target or an n-gram "
                             "drafter. Fix: use Decoder.")
        if tree == "auto" and self.draft is not None:
            self.shapes = fitting(AUTO_SHAPES, self.draft)
        self.options = options
        self._loops: dict = {}  # batch -> GraphLoop
        self._runs: dict = {}   # loops that a run has in hand, by id

    def loop(self, batch: int, length: int, sampled: bool = False, stop_ids: int = 0) -> GraphLoop:
        """The loop for `batch` requests of at most `length` positions each and so many stop ids. Its cycles are coupled from the first
        sampled run on."""
        have, coupled = self._loops.get(batch), sampled and self.coupled
        if have is None or have.max_length < length or have.max_stop_ids < stop_ids or (coupled and not have.coupled):
            self._loops.pop(batch, None)
            wanted = min(-(-length // _ROUND) * _ROUND, self.limit - max(s.columns for s in self.shapes) - 1)
            most = max(1, stop_ids, len(self.target.config.eos_ids), have.max_stop_ids if have is not None else 0)
            self._loops[batch] = GraphLoop(
                self.target, self.draft, shapes=self.shapes, max_batch=batch, max_length=max(length, wanted), page_size=self.page_size,
                prefill_chunk=self.prefill_chunk, coupled=coupled or (have is not None and have.coupled),
                **{"max_stop_ids": -(-most // STOP_IDS) * STOP_IDS, **self.options})
        return self._loops[batch]

    def controller(self, batch: int) -> Optional[Controller]:
        if len(self.shapes) == 1:
            return None
        with self._alone:
            loop = self._loops.get(batch)
            return (loop or self.loop(batch, 1)).controller(batch)

    def generate(self, prompts: list, max_new_tokens: int = 128, sampling: SamplingParams = SamplingParams(),
                 stop_ids: Optional[list] = None) -> Result:
        with self._alone:
            spans = self.stream(prompts, max_new_tokens, sampling, stop_ids)
            while True:
                try:
                    next(spans)
                except StopIteration as end:
                    return end.value

    def stream(self, prompts: list, max_new_tokens: int = 128, sampling: SamplingParams = SamplingParams(),
               stop_ids: Optional[list] = None) -> Iterator[tuple]:
        config = self.target.config
        prompts = check_prompts(prompts, max_new_tokens, max(s.columns for s in self.shapes) + 1, config.vocab_size, self.limit)
        check_sampling(sampling, config.vocab_size, len(prompts))
        stops = check_stop_ids(config.eos_ids if stop_ids is None else stop_ids)
        loop = None
        try:
            with self._alone:
                found = self.loop(len(prompts), max(len(p) for p in prompts) + max_new_tokens, sampling.temperature > 0, len(stops))
                if id(found) in self._runs:
                    raise RuntimeError(f"{type(self).__name__}: a run must be at its end or closed before the next of as many prompts "
                                       f"begins; got a stream of {len(prompts)} under way. Fix: finish or close() it, or make another decoder.")
                loop = self._runs[id(found)] = found
            return (yield from self._spans(loop, prompts, max_new_tokens, sampling, stops))
        except BaseException:  # Ctrl-C, out of memory, a stream that was left: the next run starts clean
            if loop is not None:
                loop.reset()
            raise
        finally:
            if loop is not None:
                self._runs.pop(id(loop), None)

    def _spans(self, loop: GraphLoop, prompts: list, max_new_tokens: int, sampling: SamplingParams, stops: list) -> Iterator[tuple]:
        with self._alone:
            loop.reset()
            loop.set_stop_ids(stops)
            jobs = [loop.submit(p, max_new_tokens, replace(sampling, seed=sampling.seed + b)) for b, p in enumerate(prompts)]
            processors = any(job.processors for job in jobs)
            loop.controller(len(prompts), processors)  # what is measured once belongs to no run's times
            loop.stats = stats = Stats()
        place = {id(job): b for b, job in enumerate(jobs)}
        start, decoding = time.perf_counter(), None
        while any(job.finish is None for job in jobs):
            with self._alone:
                begun, cycles = time.perf_counter(), sum(stats.steps.values())
                spans = loop.step()
                ms = (time.perf_counter() - begun) * 1e3
            if not loop.capture:  # a step is then prefill or a cycle
                if decoding is None and sum(stats.steps.values()) == cycles:
                    stats.ms["prefill"] += ms
                else:
                    stats.decode_ms += ms
            for job, tokens in spans:
                yield place[id(job)], tokens
            if decoding is None and all(job.tokens or job.finish for job in jobs):
                decoding = time.perf_counter()
                if loop.capture:
                    stats.ms["prefill"] = (decoding - start) * 1e3
        if loop.capture:  # the device goes on while the caller has the tokens: by the clock
            stats.decode_ms = (time.perf_counter() - (decoding or start)) * 1e3
        stats.ms["other"] = stats.decode_ms
        controller = loop.controllers.get((len(prompts), processors))
        if controller is not None:
            stats.plain_ms, stats.controller = controller.round_ms["off"], controller.reason
        return Result([job.tokens for job in jobs], [job.finish for job in jobs], stats)
