"""Who is missing after a lost call, from what the ranks said when they gave up (CommRecord of csrc/comm/fv_comm.h)."""

from typing import NamedTuple

_FAILURE, _FAILED_RANK, _RECORDS, _RECORD_WORDS = 0, 1, 4, 4  # CommStatus
_TIMEOUT, _STAGES, _STAGE_BITS = 1, 4, 8


class Lost(NamedTuple):
    ranks: list   # that did not come; none: unknown
    seen_by: int  # a rank that waited for the first of them
    call: int


def lost_call(status: list, world: int) -> "Lost | None":
    """status: the status words of one rank. None: it has not given up.

    Every rank whose deadline ended accuses those it waited for. One of them that said itself that it waits, for something that comes
    earlier, is a victim, and those it waits for are accused in its place. So it does not matter whose deadline ended first, nor in which
    hop or call.
    """
    words = [w & 0xFFFFFFFF for w in status]
    if not words[_FAILURE]:
        return None
    reader = words[_FAILED_RANK]
    said = {r: words[at:at + 3] for r, at in ((r, _RECORDS + r * _RECORD_WORDS) for r in range(world)) if words[at]}
    base = said[reader if reader in said else min(said)][1] if said else 0

    def waits(rank: int) -> list:
        """[((call, stage), peer)]; calls count from the reader's, for their number wraps."""
        if rank not in said:
            return []
        _, epoch, bits = said[rank]
        call = (epoch - base + (1 << 31)) % (1 << 32) - (1 << 31)
        return [((call, stage), peer) for stage in range(_STAGES) for peer in range(world) if bits >> (_STAGE_BITS * stage + peer) & 1]

    accusers = [r for r, (why, _, bits) in said.items() if why == _TIMEOUT and bits] or [reader]
    accused, known, missing = [(r, *w) for r in accusers for w in waits(r)], set(), {}
    while accused:
        by, at, rank = accused.pop()
        if (at, rank) not in known:
            known.add((at, rank))
            earlier = [(rank, *w) for w in waits(rank) if w[0] < at]
            accused += earlier
            if not earlier:
                missing.setdefault(rank, []).append((by != reader, by, at[0]))
    if not missing:  # nothing was heard, not even from this rank's own thread: kept from its place on the GPU for the whole grace
        return Lost([], reader, base)
    ranks = sorted(missing.keys() - said.keys() or missing)  # who gave up too is there, and is named only where nobody is silent
    _, seen_by, call = min(missing[ranks[0]])
    return Lost(ranks, seen_by, (base + call) & 0xFFFFFFFF)
