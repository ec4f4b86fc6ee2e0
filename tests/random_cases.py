"""Random cases on a GPU until the time is up, in several processes. A check that is run by hand, not collected by pytest.

    python tests/random_cases.py verify_tree,partials,tree_attention,mla_tree_attention,exact --seconds 60 --processes 8
    FASTVERIFY_PROFILE=sm_120 python tests/random_cases.py tree_attention

verify_tree, partials: every output bit for bit as the CPU op's whole call, requests are counted. tree_attention, mla_tree_attention: the float64
oracle within the tolerance of the tests, NaN wherever no row may look, every call repeated bit for bit. exact: a node's row has the bits
of the plain decoding row at its position. The seed of a failing case is printed; --only SEED runs that one. Exit status 1 if one failed.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "attention"), str(HERE / "accept"), str(HERE.parent)]

VOCABS = (32000, 49152, 128256, 151936, 163840, 50257, 33333, 5003, 257, 37)
ENTRIES = 3_000_000  # of the logits of one case: what the CPU op takes a fraction of a second for
FP8 = torch.float8_e4m3fn


def differ(want: dict, got: dict) -> list:
    """Names of the outputs whose bytes are not equal."""
    return [n for n, v in want.items() if v is not None and not torch.equal(v.contiguous().view(torch.uint8), got[n].contiguous().view(torch.uint8))]


def verify_inputs(pick: random.Random, rng, vocab: int) -> dict:
    from cases import verify_case
    rows = max(1, min(1024, ENTRIES // vocab))
    nodes = min(rows, pick.choice((1, 2, 3, 5, 8, 16, 33, 64, 200, 1024)))
    batch = max(1, min(pick.choice((1, 1, 2, 3, 8, 32, 80, 256)), rows // nodes))
    filters = pick.random() < 0.5
    return verify_case(rng, batch=batch, nodes=nodes, vocab=vocab, dtype=pick.choice((torch.bfloat16, torch.float16, torch.float32)),
                       temperature=pick.choice((0.0, 0.7, 0.9, 1.0, 1.5)), filters=filters, extras=pick.random() < 0.3, agree=pick.choice((0.5, 0.9, 1.0)),
                       pad=pick.choice((0, 0, 3, 8)), ids=pick.choice((torch.int64, torch.int32)), scale=pick.choice((0.3, 2.0, 6.0)))


def verify_tree(pick: random.Random, rng) -> tuple:
    """Path only, then twice with one workspace. (requests, names that differ)"""
    from conftest import run_op
    from fastverify import verify_tree_workspace
    case = verify_inputs(pick, rng, pick.choice(VOCABS))
    want, memory, bad = run_op("cpu", "verify_tree", **case), verify_tree_workspace(), []
    for workspace in (None, memory, memory):
        bad += differ(want, run_op("cuda", "verify_tree", **{**case, "workspace": workspace}))
    return len(case["active"]), bad


def partials(pick: random.Random, rng) -> tuple:
    """1 to 8 shards of the vocabulary, every rank's outputs as the whole call's on the CPU."""
    import test_verify_tree_partials as tests
    from conftest import run_op
    case = verify_inputs(pick, rng, pick.choice((37, 257, 5003, 33333)))
    filters = bool((case["top_k"] > 0).any() or (case["top_p"] < 1).any() or (case["min_p"] > 0).any())
    cuts = tests.boundaries(case["vocab_size"], pick.choice((1, 2, 3, 8)), rng)
    try:
        tests.assert_same(run_op("cpu", "verify_tree", **case), tests.run_sharded("cuda", case, cuts, filters), cuts)
    except AssertionError as e:
        return len(case["active"]), [str(e)[:120]]
    return len(case["active"]), []


def lengths(pick: random.Random, most_nodes: int) -> tuple:
    batch = pick.choice((1, 1, 2, 3, 5, 9))
    most_prefix = pick.choice((0, 40, 300, 1500, 6000 // batch))
    some = lambda high: pick.randint(0, high) * (pick.random() < 0.85)  # noqa: E731
    return [some(most_nodes) for _ in range(batch)], [some(most_prefix) for _ in range(batch)]


def attention_options(pick: random.Random, most_nodes: int) -> tuple:
    counts, prefixes = lengths(pick, pick.choice((1, 4, 8, 16, 30, 64, most_nodes)))
    base = pick.choice((0, 0, 0, 1, 5, 20))
    return counts, prefixes, dict(chain=pick.random() < 0.25, row_base=base, spare_words=pick.choice((0, 1)))


def checked(tests, backend: str, case: dict, run) -> list:
    got, again = tests.compare(backend, case), run(backend, case)
    return [n for n in ("out", "lse") if not torch.equal(got[n], again[n])]


def tree_attention(pick: random.Random, rng) -> tuple:
    import test_tree_attention_tiles as tests
    from cases import attention_case
    counts, prefixes, more = attention_options(pick, 100)
    group, cache = pick.choice((1, 2, 3, 4, 7, 8)), pick.choice((None, None, FP8))
    case = attention_case(rng, counts, prefixes, pick.choice((1, 16, 17, 64, 1072)), 2 * group, 2, pick.choice((64, 128, 128, 256)),
                          pick.choice((torch.float16, torch.bfloat16)), cache, window=pick.choice((0, 0, 1, 9, 100, 700)),
                          softcap=pick.choice((0.0, 0.0, 4.0)), sinks=pick.random() < 0.4, scales=cache is not None, **more)
    return 1, checked(tests, "cuda", case, tests.run)


def mla_tree_attention(pick: random.Random, rng) -> tuple:
    import test_mla_tree_attention as tests
    counts, prefixes, more = attention_options(pick, 30)
    case = tests.mla_case(rng, counts, prefixes, pick.choice((1, 16, 17, 64, 1072)), pick.choice((1, 8, 8, 16, 24)), 576, 512,
                          pick.choice((torch.float16, torch.bfloat16)), **more)
    run = lambda backend, c: tests.run(backend, c, workspace=tests.workspace(c))  # noqa: E731
    got, again = tests.compare("cuda", case, workspace=tests.workspace(case)), run("cuda", case)
    return 1, [n for n in ("out", "lse") if not torch.equal(got[n], again[n])]


def exact(pick: random.Random, rng) -> tuple:
    import test_tree_attention_exact as tests
    from cases import attention_case
    cache = pick.choice((None, FP8))
    case = attention_case(rng, [pick.randint(1, 8), pick.randint(0, 5)], [pick.choice((0, 3, 60, 64, 1021, 2100)), pick.randint(0, 70)], 16, 4, 2,
                          pick.choice((64, 128, 256)), pick.choice((torch.float16, torch.bfloat16)), cache, chain=pick.random() < 0.3,
                          row_base=pick.choice((0, 2)), window=pick.choice((0, 9, 40)), sinks=pick.random() < 0.5, scales=cache is not None)
    got, bad = tests.run("cuda", case), []
    for b in range(2):
        for node in range(int(case["cu_nodes"][b + 1] - case["cu_nodes"][b])):
            row, one = int(case["cu_nodes"][b]) + node, tests.run("cuda", tests.decode_case(case, b, node))
            bad += [f"{n} of row {row}" for n in ("out", "lse") if not torch.equal(got[n][row], one[n][0])]
    return 1, bad


OPS = {f.__name__: f for f in (verify_tree, partials, tree_attention, mla_tree_attention, exact)}


def one(name: str, seed: int) -> tuple:
    """(what was counted, what was wrong) of one case."""
    try:
        return OPS[name](random.Random(seed), torch.Generator().manual_seed(seed))
    except AssertionError as e:
        return 1, [f"assertion {str(e)[:120]}"]


def work(rank: int, name: str, seconds: float, seed: int, processes: int, results) -> None:
    torch.set_num_threads(1)
    end, cases, counted, failed, i = time.perf_counter() + seconds, 0, 0, [], 0
    while time.perf_counter() < end:
        this = seed + rank + processes * i
        n, bad = one(name, this)
        cases, counted, i = cases + 1, counted + n, i + 1
        if bad:
            failed.append((this, bad))
            print(f"{name}: seed {this} fails: {bad[:4]}", flush=True)
    results.put((cases, counted, len(failed)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", help=",".join(OPS))
    parser.add_argument("--seconds", type=float, default=60, help="per op")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="SEED", help="this case alone")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed; torch sees none")
    status, context = 0, mp.get_context("spawn")
    for name in args.ops.split(","):
        if args.only is not None:
            n, bad = one(name, args.only)
            print(f"{name}: seed {args.only}, {n} counted, {len(bad)} wrong {bad}")
            status |= bool(bad)
            continue
        results = context.SimpleQueue()
        ranks = [context.Process(target=work, args=(r, name, args.seconds, args.seed, args.processes, results)) for r in range(args.processes)]
        for p in ranks:
            p.start()
        for p in ranks:
            p.join()
        died = sum(p.exitcode != 0 for p in ranks)
        totals = [results.get() for _ in range(args.processes - died)]
        cases, counted, failed = map(sum, zip(*totals)) if totals else (0, 0, 0)
        print(f"{name}: {cases} cases, {counted} counted, {failed} failing, {died} processes died ({torch.cuda.get_device_name()}, "
              f"{args.seconds:.0f} s, seed {args.seed})", flush=True)
        status |= bool(failed or died)
    return status


if __name__ == "__main__":
    sys.exit(main())
