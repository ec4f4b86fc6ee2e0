"""The loop on a GPU after a real interrupt, a real lack of memory and a failed capture: the same decoder goes on as if nothing were."""

import signal

import pytest
import torch

from fastverify import GraphDecoder
from loop_checks import PROMPTS
from test_graph_loop import pair

pytestmark = pytest.mark.gpu


def one_bucket(decoder: GraphDecoder, batch: int = len(PROMPTS)) -> GraphDecoder:
    """The decoder, its loop kept in one bucket: in bfloat16 the rows of a product decide its rounding, and the clock would decide the bucket."""
    decoder.loop(batch, 1).pool.buckets = (batch,)
    return decoder


class Timer:
    """A KeyboardInterrupt after `seconds`, wherever the host is then; as Ctrl-C brings it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.old = signal.signal(signal.SIGALRM, self.fire)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def fire(self, *_) -> None:
        raise KeyboardInterrupt

    def __exit__(self, *_) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.old)


def test_an_interrupt_at_any_moment_leaves_a_usable_decoder():
    target, draft = pair("cuda", torch.bfloat16)
    decoder = one_bucket(GraphDecoder(target, draft, tree="chain-3"))
    hit, want = 0, None
    for step in range(24):  # from before the first capture to the middle of replays
        try:
            with Timer(0.004 + 0.02 * step if step < 12 else 0.003 * (step - 11)):
                decoder.generate(PROMPTS, 2000 // len(PROMPTS[2]), stop_ids=[])
        except KeyboardInterrupt:
            hit += 1
        if step % 6 == 5:
            got = decoder.generate(PROMPTS, 40, stop_ids=[]).tokens
            want = want or got
            assert got == want
            loop = decoder.loop(4, 1)
            assert not loop.pool.running and loop.pool.pages.free == loop.pool.pages.total
    assert hit >= 8 and want == one_bucket(GraphDecoder(target, draft, tree="chain-3")).generate(PROMPTS, 40, stop_ids=[]).tokens


@pytest.fixture
def memory_limit():
    """limit(bytes): at most so much beyond what torch has reserved now."""
    total = torch.cuda.get_device_properties(0).total_memory

    def limit(room: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + room) / total))

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_lack_of_memory_leaves_a_usable_decoder(memory_limit):
    target, draft = pair("cuda", torch.bfloat16)
    decoder = one_bucket(GraphDecoder(target, draft, tree="tree-20"))
    want = decoder.generate(PROMPTS, 40, stop_ids=[]).tokens
    failed, many = 0, PROMPTS * 16
    for room in (0, 2 << 20, 32 << 20, 64 << 20, 96 << 20, 112 << 20, 128 << 20, 160 << 20):
        memory_limit(room)
        try:
            decoder.generate(many, 900, stop_ids=[])  # caches, buffers, then a capture of 64 requests
        except torch.cuda.OutOfMemoryError:
            failed += 1
        memory_limit(1 << 40)
        assert decoder.generate(PROMPTS, 40, stop_ids=[]).tokens == want
        decoder._loops.pop(len(many), None)
    assert failed >= 2


def test_a_capture_that_fails_leaves_a_usable_decoder(monkeypatch):
    from fastverify.eagle3 import cycle
    target, draft = pair("cuda", torch.bfloat16)
    decoder, real = one_bucket(GraphDecoder(target, draft, tree="chain-3")), cycle.verify_tree

    def synchronising(*args, **kw):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()  # not allowed there: the capture is lost
        return real(*args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(cycle, "verify_tree", synchronising)
        with pytest.raises(RuntimeError):
            decoder.generate(PROMPTS, 40, stop_ids=[])
    assert decoder.generate(PROMPTS, 40, stop_ids=[]).tokens == one_bucket(GraphDecoder(target, draft, tree="chain-3")).generate(PROMPTS, 40, stop_ids=[]).tokens
