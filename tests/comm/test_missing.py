"""Who is named after a lost call: every survivor names the ranks that are missing and none that stopped because of them."""

from itertools import permutations

import pytest
import torch
from comm_cases import KERNELS, virtual
from conftest import run_op

from fastverify import CommunicatorError
from fastverify.comm.missing import lost_call

TIMEOUT, POISONED = 1, 2
OWN_PRODUCT, INPUTS, OTHER_ISLAND, RESULTS = range(4)
DEAD = 5
PATIENCE, AWAY, BYTES = 5, 6, 8  # words of the hooks
NO_INPUTS, NO_RESULTS = -1 << 31, 1 << 30  # to a peer
LATER = 150_000_000  # ns: more than a grace


def waits(**stages) -> int:
    return sum(1 << 8 * globals()[stage] + rank for stage, ranks in stages.items() for rank in ranks)


def status(reader: int, said: dict) -> list:
    """said: {rank: (why, call, waits)}, as the reader has heard it."""
    words = [said[reader][0], reader, 0, 0] + [0] * 32
    for rank, (why, call, bits) in said.items():
        words[4 + 4 * rank:7 + 4 * rank] = [why, call - (1 << 32) if call >> 31 else call, bits - (1 << 32) if bits >> 31 else bits]
    return words


@pytest.mark.parametrize("first", [5, (1 << 31) - 1, (1 << 32) - 1])
def test_every_order_of_the_ends_of_deadlines(first):
    """Rank 2 of 3 or of 4 is dead; whoever else ends at its own deadline or because of another, the names are the same."""
    after = first % ((1 << 32) - 1) + 1
    for said in (
        {0: (first, waits(INPUTS=[2])), 1: (first, waits(INPUTS=[2]))},
        {0: (first, waits(RESULTS=[1])), 1: (first, waits(INPUTS=[2]))},  # its sum comes from 1, which waits for 2
        {0: (first, waits(INPUTS=[2], RESULTS=[1])), 1: (first, waits(INPUTS=[2], RESULTS=[0, 2]))},
        {0: (first, waits(RESULTS=[1, 2])), 1: (first, waits(INPUTS=[2], RESULTS=[0, 2]))},  # 1 gave up when 0's sum was on its way
        {0: (first, waits(INPUTS=[2])), 1: (after, waits(INPUTS=[0, 2]))},  # 1 had all that it needs and went on
        {0: (first, waits(RESULTS=[2])), 1: (after, waits(INPUTS=[0, 2], RESULTS=[0]))},
        {0: (after, waits(INPUTS=[1, 2])), 1: (first, waits(RESULTS=[3])), 3: (first, waits(INPUTS=[2]))},  # through two
        {0: (after, waits(INPUTS=[1, 2])), 1: (first, waits(OTHER_ISLAND=[3])), 3: (first, waits(INPUTS=[2]))},
    ):
        ranks = sorted(said)
        for ended in range(1, 1 << len(ranks)):
            why = {r: TIMEOUT if ended >> i & 1 else POISONED for i, r in enumerate(ranks)}
            for order in permutations(ranks):
                for reader in ranks:
                    found = lost_call(status(reader, {r: (why[r], *said[r]) for r in order}), 4)
                    assert found.ranks == [2] and found.call in (first, after) and found.seen_by in ranks


def test_what_is_no_death():
    nothing = [0] * 36
    assert lost_call(nothing, 8) is None
    everyone = {0: (POISONED, 9, waits(RESULTS=[2])), 1: (TIMEOUT, 9, waits(RESULTS=[2])), 2: (POISONED, 9, waits(INPUTS=[1]))}
    for reader in range(3):
        assert lost_call(status(reader, everyone), 3) == ([1], 2, 9), "a lost word: all live, 1 has sent it and 2 never had it"
    late = {0: (TIMEOUT, 9, waits(INPUTS=[2])), 1: (POISONED, 9, waits(INPUTS=[2, 3])), 2: (POISONED, 9, waits(RESULTS=[0, 1])),
            3: (POISONED, 9, waits(INPUTS=[2]))}
    assert lost_call(status(0, late), 4) == ([2], 0, 9), "it came when the deadline was over; 1 had just begun to wait for 3"
    assert lost_call(status(2, late), 4).ranks == [2]
    product = {0: (TIMEOUT, 9, waits(INPUTS=[1])), 1: (TIMEOUT, 9, waits(OWN_PRODUCT=[1]))}
    assert lost_call(status(0, product), 2) == ([1], 1, 9)
    assert lost_call(status(0, {0: (TIMEOUT, 9, waits(INPUTS=[7, 3])), 1: (POISONED, 9, waits(INPUTS=[3, 7]))}), 8).ranks == [3, 7]
    assert lost_call(status(1, {1: (POISONED, 9, waits(INPUTS=[2]))}), 3).ranks == [2], "what the poisoner said was lost with it"


def call_of(op: str, backend: str, comm, world: int, rng):
    if op == "all_gather_small":
        return lambda: run_op(backend, op, x=torch.ones(world, 300), out=torch.zeros(world, world, 300), comm=comm.handle)
    if op == "all_reduce_columns":
        return lambda: run_op(backend, op, x=torch.ones(world, 2, 4, 104), out=torch.zeros(world, 4, 208), ready=None, add=False, comm=comm.handle)
    if op == "all_reduce_rms_norm":
        return lambda: run_op(backend, op, x=torch.ones(world, 4, 512), residual=torch.zeros(world, 4, 512), weight=torch.ones(512),
                              out=torch.zeros(world, 4, 512), prefetch=None, eps=1e-6, comm=comm.handle)
    return lambda: run_op(backend, op, x=torch.ones(world, 1500), out=torch.zeros(world, 1500), comm=comm.handle)


def named_by_each(comm, survivors: list) -> dict:
    """As each survivor's host would say it, which sees its own status only."""
    every, named = comm.status, {}
    for rank in survivors:
        comm.status = every[rank:rank + 1]
        try:
            comm.check()
        except CommunicatorError as error:
            named[rank] = str(error).split("got: ")[1].split(" (seen")[0]
    comm.status = every
    return named


# What the dead rank has sent before it died, to whom: of its inputs and of its results.
DEATHS = {"nothing": ([], []), "inputs to the first": ([0], []), "inputs to all but the first": (range(1, 8), []),
          "all inputs": (range(8), []), "results to the first": (range(8), [0])}
# (patience, away) of the first survivor and of the others, ns
ORDERS = {"together": ((0, 0), (0, 0)), "first": ((0, 0), (LATER, 0)), "last": ((LATER, 0), (0, 0)), "away": ((0, 15_000_000), (0, 0)),
          "others away": ((0, 0), (LATER, 15_000_000))}


def test_a_rank_that_heard_nothing_still_tells():
    """Its thread was kept from the GPU for the whole grace: no record, not even its own; or only another's."""
    words = [POISONED, 1, 0, 0] + [0] * 32
    assert lost_call(words, 3) == ([], 1, 0)
    words[4:7] = [TIMEOUT, 9, waits(INPUTS=[2])]
    assert lost_call(words, 3) == ([2], 0, 9)
    assert lost_call([0] * 36, 3) is None


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("world, limit, transport", [(3, 0, "peer"), (3, 1 << 16, "peer"), (4, 0, "host")])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_rank_that_dies_at_work(rng, backend, world, limit, transport, death, order):
    lost_rank_is_named(rng, backend, "all_reduce", world, limit, transport, death, order)


@pytest.mark.parametrize("op, world, limit", [("all_reduce_rms_norm", 3, 0), ("all_reduce_rms_norm", 3, 1 << 16), ("all_gather_small", 3, 0),
                                              ("all_reduce_columns", 3, 0), ("all_reduce", 8, 0), ("islands", 4, 0), ("fp8", 3, 0)])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_rank_that_dies_in_any_op(rng, backend, op, world, limit):
    for death, order in (("inputs to the first", "last"), ("inputs to all but the first", "together")):
        lost_rank_is_named(rng, backend, op, world, limit, "peer", death, order)


def lost_rank_is_named(rng, backend, op, world, limit, transport, death, order) -> None:
    comm = virtual(backend, world, transport=transport, hooks=True, one_shot_bytes=limit, deadline=0.1)
    if op == "islands":
        comm._handle.set_island_bytes(0)
    if op == "fp8":
        comm._handle.set_fp8_bytes(0)
    dead, (inputs, results), (first, others) = world - 1, DEATHS[death], ORDERS[order]
    comm.hooks[:dead, PATIENCE], comm.hooks[:dead, AWAY] = others
    comm.hooks[0, PATIENCE], comm.hooks[0, AWAY] = first
    comm.hooks[dead, 0], comm.hooks[dead, 1] = DEAD, -1
    for peer in range(world):
        comm.hooks[dead, BYTES + peer] = (0 if peer in inputs else NO_INPUTS) + (0 if peer in results else NO_RESULTS)
    call = call_of(op if op.startswith("all_") else "all_reduce", backend, comm, world, rng)
    call()
    comm.hooks[dead, BYTES:] = NO_INPUTS + NO_RESULTS
    for _ in range(2):  # a rank that had all it needed comes to the next call, or the one after
        call()
    named = named_by_each(comm, range(dead))
    assert named == {rank: f"rank(s) [{dead}] did not come" for rank in range(dead)}
