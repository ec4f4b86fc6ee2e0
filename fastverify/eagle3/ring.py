"""The ring of records in host memory that cycles write and the host reads some cycles behind."""

import time

import torch

from ..kv.next_inputs import FIELDS, HEADER


class Ring:
    """Records of cycles in host memory, pinned where the device is a GPU: written by next_inputs, read by polling.

    `words` int32 [slots, words] is the memory, `sequence` int64 [1] the device's counter of records. A copy has its own of both.
    """

    def __init__(self, batch: int, max_path: int, device: "torch.device | str" = "cpu", slots: int = 16) -> None:
        pinned = torch.device(device).type == "cuda"
        self.words = torch.zeros(slots, HEADER + batch * (FIELDS + max_path), dtype=torch.int32, device="cpu", pin_memory=pinned)
        self.sequence = torch.zeros(1, dtype=torch.int64, device=device)
        self._host = self.words.numpy()

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "_host"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        if self.sequence.is_cuda and not self.words.is_pinned():  # a copy of pinned memory is not pinned
            self.words = self.words.pin_memory()
        self._host = self.words.numpy()

    def ready(self, number: int) -> bool:
        """Whether record `number` (the first is 1) has been written."""
        return int(self._host[(number - 1) % len(self._host), 0]) == number

    def read(self, number: int, timeout_s: float = 60.0) -> tuple:
        """Waits for record `number`: (first row, int32 [B, 5 + D]: tokens out, flags, accepted drafts, nodes, depth, tokens).

        Errors: TimeoutError when it does not come (a failed kernel; the next CUDA call says which).
        """
        if not self.ready(number):
            end = time.perf_counter() + timeout_s
            while not self.ready(number):
                if time.perf_counter() > end:
                    raise TimeoutError(f"Ring: record {number} must come within {timeout_s:g} s; got nothing. "
                                       "Fix: look for an earlier CUDA error.")
        record = self._host[(number - 1) % len(self._host)]
        batch, width, first = (int(x) for x in record[1:4])
        return first, record[HEADER:HEADER + batch * (FIELDS + width)].reshape(batch, FIELDS + width).copy()
