"""Times torch's all-reduce between processes of this machine, one per GPU (NCCL) or on the CPU (gloo), and on GPUs ours.

    python -m fastverify.doctor.allreduce RANK WORLD BACKEND STORE HIDDEN BYTES,...     one rank; started by `measure`

The parent needs the standard library only; the ranks need torch, and for our communicators the compiled libraries.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CALLS, REPEATS = 50, 5
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def measure(world: int, backend: str, sizes: list, seconds: float, hidden: int = 0) -> dict:
    """{"rows": [{"bytes", "eager_us", "graph_us" or None, "ours"}]}, or {"error": why not}. Median over ranks of the median call.

    ours: {"peer", "peer + norm", "host", "host + norm": us in a CUDA graph, None where it does not work}, {} on the CPU; the forms
    with the norm are all_reduce_rms_norm of rows of `hidden` elements (0: not measured).
    sizes: message bytes of one rank (multiples of 2). Every process is ended after `seconds`.
    """
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fastverify.doctor.allreduce"]
        tail = [str(world), backend, f"{folder}/store", str(hidden), ",".join(map(str, sizes))]
        outputs = [open(f"{folder}/{kind}{r}", "w+") for r in range(world) for kind in ("out", "err")]
        ranks = [subprocess.Popen([*command, str(r), *tail], stdout=outputs[2 * r], stderr=outputs[2 * r + 1], env=env,
                                  stdin=subprocess.DEVNULL) for r in range(world)]
        error = _wait(ranks, seconds)
        for f in outputs:
            f.seek(0)
        texts = [f.read() for f in outputs]
        for f in outputs:
            f.close()
    facts = [[json.loads(line[5:]) for line in text.splitlines() if line.startswith("FACTS")] for text in texts[::2]]
    if error and all(facts):  # torch's times are there, ours did not end
        for rows in facts:
            rows[-1][0]["reasons"].append(error)
    elif error:
        said = [line.strip() for text in texts[1::2] for line in text.splitlines() if "Error" in line]
        return {"error": f"{error}: {said[-1]}" if said else error}
    done = min(map(len, facts))
    per_rank = [rows[done - 1] for rows in facts]
    middle = lambda values: statistics.median(values) if None not in values else None  # noqa: E731
    ours = [{k: middle([rank[i]["ours"].get(k) for rank in per_rank]) for k in per_rank[0][i]["ours"]} for i in range(len(sizes))]
    return {"world": world, "backend": backend, "reasons": sorted({r for rank in per_rank for r in rank[0]["reasons"]}), "rows": [
        {"bytes": n, **{k: middle([rank[i][k] for rank in per_rank]) for k in ("eager_us", "graph_us")}, "ours": ours[i]}
        for i, n in enumerate(sizes)]}


def _wait(ranks: list, seconds: float) -> str:
    """"" when all ranks ended well in time; else why not. All are ended, whatever happens."""
    end = time.monotonic() + seconds
    try:
        while any(p.poll() is None for p in ranks):
            failed = [r for r, p in enumerate(ranks) if p.poll() not in (None, 0)]
            if failed:
                return f"rank {failed[0]} failed"
            if time.monotonic() > end:
                late = [r for r, p in enumerate(ranks) if p.poll() is None]
                return f"no answer from ranks {', '.join(map(str, late))} within {seconds:g} s"
            time.sleep(0.02)
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
            p.wait()
    failed = [r for r, p in enumerate(ranks) if p.returncode]
    return f"rank {failed[0]} failed" if failed else ""


def _rank(rank: int, world: int, backend: str, store: str, hidden: int, sizes: list) -> None:
    import torch
    import torch.distributed as dist
    cuda = backend == "nccl"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    rows = []
    for nbytes in sizes:
        x = torch.zeros(max(1, nbytes // 2), dtype=torch.bfloat16, device="cuda" if cuda else "cpu")
        for _ in range(5):
            dist.all_reduce(x)
        rows.append({"bytes": nbytes, "eager_us": _timed(lambda: [dist.all_reduce(x) for _ in range(CALLS)], cuda),
                     "graph_us": _timed(_captured(torch, lambda x=x: dist.all_reduce(x)), cuda) if cuda else None, "ours": {}, "reasons": []})
    print("FACTS" + json.dumps(rows), flush=True)
    if cuda:
        _ours(torch, hidden, sizes, rows)
        print("FACTS" + json.dumps(rows), flush=True)
    sys.stdout.flush()
    os._exit(0)  # a group that was captured may hang in its destructor


def _ours(torch, hidden: int, sizes: list, rows: list) -> None:
    """Adds the times of our communicators to the rows; what does not work is None, with a reason."""
    for backend in ("peer", "host"):
        names = (backend, f"{backend} + norm")
        try:
            _our_times(torch, backend, hidden, sizes, rows)
        except Exception as exc:
            for row in rows:
                row["ours"] |= dict.fromkeys(names)
                row["reasons"].append(f"{backend}: {(str(exc) or type(exc).__name__).splitlines()[0]}")


def _our_times(torch, backend: str, hidden: int, sizes: list, rows: list) -> None:
    from fastverify import Communicator, all_reduce, all_reduce_rms_norm
    comm = Communicator(device=torch.device("cuda", torch.cuda.current_device()), backend=backend, max_bytes=max(sizes))
    for nbytes, row in zip(sizes, rows):
        x = torch.zeros(max(1, nbytes // 2), dtype=torch.bfloat16, device="cuda")
        row["ours"][backend] = _timed(_captured(torch, lambda: all_reduce(x, comm, out=x)), True)
        if hidden and nbytes % (2 * hidden) == 0:
            x = x.view(-1, hidden)
            residual, weight, out = torch.zeros_like(x), torch.ones(hidden, dtype=x.dtype, device="cuda"), torch.empty_like(x)
            run = _captured(torch, lambda: all_reduce_rms_norm(x, residual, weight, comm, out=out))
            row["ours"][f"{backend} + norm"] = _timed(run, True)


def _captured(torch, call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    graph.replay()
    return graph.replay


def _timed(run, cuda: bool) -> float:
    """us of one of the CALLS calls in `run`: the median of REPEATS."""
    import torch
    found = []
    for _ in range(REPEATS):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e6 / CALLS)
    return statistics.median(found)


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), [int(n) for n in sys.argv[6].split(",")])
