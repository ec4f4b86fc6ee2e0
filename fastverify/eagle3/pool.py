"""Host bookkeeping of the loop on the GPU: requests, slots, pages and the choice of the batch bucket. No tensor in it."""

from collections import deque
from dataclasses import dataclass, field
from typing import Optional


@dataclass(eq=False)
class Job:
    """One request as the host knows it. tokens and finish lag behind the device by at most the run-ahead."""

    number: int
    prompt: list
    max_new_tokens: int
    params: object                 # SamplingParams; the request's own seed
    tokens: list = field(default_factory=list)
    finish: Optional[str] = None   # "stop", "length", "bad_logits", "cancelled"
    slot: int = -1                 # -1: waiting, or left
    pages: list = field(default_factory=list)
    processors: bool = False       # penalties or bias


class PagePool:
    """Free pages of the paged caches; the lowest ids are given out first."""

    def __init__(self, pages: range) -> None:
        self._free = list(reversed(pages))
        self.total = len(pages)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> Optional[list]:
        """`count` pages, or None when there are not as many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list) -> None:
        self._free.extend(reversed(pages))


class RequestPool:
    """Slots and pages of at most `max_batch` running requests, and the queue before them (first come, first served).

    A request takes the lowest free slot and keeps it; a cycle runs over the slots of the smallest bucket that covers all that
    are taken. Pages are reserved on admission for everything the request may ever need, so that a running one cannot fail.
    """

    def __init__(self, max_batch: int, pages: range, page_size: int, extra: int) -> None:
        self.page_size, self.extra = page_size, extra
        self.pages = PagePool(pages)
        self.slots: list = [None] * max_batch
        self.waiting: deque = deque()
        self.buckets = tuple(b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if b < max_batch) + (max_batch,)

    def pages_for(self, prompt: int, max_new_tokens: int) -> int:
        return -(-(prompt + max_new_tokens + self.extra) // self.page_size)

    def admit(self) -> Optional[Job]:
        """The next waiting job with its slot and pages, or None (nothing waits, or there is no room yet)."""
        if not self.waiting or None not in self.slots:
            return None
        job = self.waiting[0]
        pages = self.pages.take(self.pages_for(len(job.prompt), job.max_new_tokens))
        if pages is None:
            return None
        self.waiting.popleft()
        job.slot, job.pages = self.slots.index(None), pages
        self.slots[job.slot] = job
        return job

    def leave(self, job: Job) -> None:
        """Gives slot and pages back. Safe while cycles are in flight: an inactive request touches neither."""
        if job.slot >= 0:
            self.slots[job.slot] = None
            self.pages.give(job.pages)
            job.slot, job.pages = -1, []

    @property
    def running(self) -> list:
        return [j for j in self.slots if j is not None]

    def bucket(self) -> int:
        """Batch of the next cycle: the smallest bucket that holds every taken slot."""
        top = max((j.slot for j in self.running), default=0) + 1
        return next(b for b in self.buckets if b >= top)
