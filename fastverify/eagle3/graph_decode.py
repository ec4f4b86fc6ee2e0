"""GraphDecoder: Decoder's interface over GraphLoop, for whole batches that start together."""

import time
from dataclasses import replace
from typing import Iterator, Optional

from .decode import Decoder, Result, SamplingParams, check_prompts, check_sampling
from .graph_loop import GraphLoop
from .shapes import Controller, parse_shape
from .stats import Stats

AUTO_SHAPES = ("off", "chain-3", "chain-5", "tree-8", "tree-20")
_ROUND = 512  # positions: loops are made for a multiple, so that the next run finds one


class GraphDecoder(Decoder):
    """Decoder whose runs are cycles captured as CUDA graphs (graph_loop.py); same arguments, same tokens.

    The target must be whole (no tensor parallelism), the drafter an EAGLE-3 draft or None. Loops with their caches are kept per
    batch size; the first run of one captures and measures its shapes. Stage times are not known: `other` is all of a cycle.
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
            self.shapes = tuple(parse_shape(s) for s in AUTO_SHAPES)
        self.options = options
        self._loops: dict = {}  # batch -> GraphLoop

    def loop(self, batch: int, length: int, sampled: bool = False) -> GraphLoop:
        """The loop for `batch` requests of at most `length` positions each. Its cycles are coupled from the first sampled run on."""
        have, coupled = self._loops.get(batch), sampled and self.coupled
        if have is None or have.max_length < length or (coupled and not have.coupled):
            self._loops.pop(batch, None)
            wanted = min(-(-length // _ROUND) * _ROUND, self.limit - max(s.columns for s in self.shapes) - 1)
            self._loops[batch] = GraphLoop(
                self.target, self.draft, shapes=self.shapes, max_batch=batch, max_length=max(length, wanted), page_size=self.page_size,
                prefill_chunk=self.prefill_chunk, coupled=coupled or (have is not None and have.coupled), **self.options)
        return self._loops[batch]

    def controller(self, batch: int) -> Optional[Controller]:
        if len(self.shapes) == 1:
            return None
        loop = self._loops.get(batch)
        return (loop or self.loop(batch, 1)).controller(batch)

    def generate(self, prompts: list, max_new_tokens: int = 128, sampling: SamplingParams = SamplingParams(),
                 stop_ids: Optional[list] = None) -> Result:
        spans = self.stream(prompts, max_new_tokens, sampling, stop_ids)
        while True:
            try:
                next(spans)
            except StopIteration as end:
                return end.value

    def stream(self, prompts: list, max_new_tokens: int = 128, sampling: SamplingParams = SamplingParams(),
               stop_ids: Optional[list] = None) -> Iterator[tuple]:
        config = self.target.config
        check_prompts(prompts, max_new_tokens, max(s.columns for s in self.shapes) + 1, config.vocab_size, self.limit)
        check_sampling(sampling, config.vocab_size)
        loop = self.loop(len(prompts), max(len(p) for p in prompts) + max_new_tokens, sampling.temperature > 0)
        loop.reset()
        loop.set_stop_ids(list(config.eos_ids) if stop_ids is None else list(stop_ids))
        loop.stats = stats = Stats()
        start, decoding = time.perf_counter(), None
        jobs = [loop.submit(p, max_new_tokens, replace(sampling, seed=sampling.seed + b)) for b, p in enumerate(prompts)]
        place = {id(job): b for b, job in enumerate(jobs)}
        try:
            while any(job.finish is None for job in jobs):
                for job, tokens in loop.step():
                    yield place[id(job)], tokens
                if decoding is None and all(job.tokens or job.finish for job in jobs):
                    decoding = time.perf_counter()
                    stats.ms["prefill"] = (decoding - start) * 1e3
        except BaseException:  # Ctrl-C, out of memory, a stream that was left: the next run starts clean
            loop.reset()
            raise
        stats.decode_ms = (time.perf_counter() - (decoding or start)) * 1e3
        stats.ms["other"] = stats.decode_ms
        controller = loop.controllers.get((len(prompts), any(job.processors for job in jobs)))
        if controller is not None:
            stats.plain_ms, stats.controller = controller.round_ms["off"], controller.reason
        return Result([job.tokens for job in jobs], [job.finish for job in jobs], stats)
