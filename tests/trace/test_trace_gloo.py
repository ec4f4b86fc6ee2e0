"""fastverify trace on a real profile: two gloo processes, the second of which comes late."""

import json
import subprocess
import sys

import pytest
import torch.distributed as dist

from fastverify.cli.main import main

PROCESS = """
import sys, time, torch, torch.distributed as dist
from torch.profiler import profile, ProfilerActivity, record_function
rank, folder, late = int(sys.argv[1]), sys.argv[2], 0.02
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
x, calls = torch.ones(3584), []
dist.all_reduce(x)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
    for step in range(3):
        with record_function(f"step {step}"):
            for _ in range(10):
                time.sleep(late * rank)
                start = time.perf_counter()
                dist.all_reduce(x)
                calls.append((start, time.perf_counter()))
with open(f"{folder}/calls{rank}.json", "w") as f:
    f.write(repr(calls).replace("(", "[").replace(")", "]"))
prof.export_chrome_trace(f"{folder}/rank{rank}.json.gz")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
def test_two_gloo_processes(tmp_path, capsys):
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(r), str(tmp_path)], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE) for r in (0, 1)]
    for p in processes:
        assert p.wait(timeout=100) == 0, p.stderr.read().decode()
        p.stderr.close()
    capsys.readouterr()
    assert main(["trace", str(tmp_path / "rank0.json.gz"), str(tmp_path / "rank1.json.gz"), "--json"]) == 0
    r = json.loads(capsys.readouterr().out)
    assert (r["source"], r["collectives"], r["number_of_steps"], r["notes"]) == ("host", 30, 3, [])
    assert [s["name"] for s in r["steps"]] == ["step 0", "step 1", "step 2"]
    calls = [json.loads((tmp_path / f"calls{k}.json").read_text()) for k in (0, 1)]
    took = [[1e3 * (end - start) for start, end in c] for c in calls]  # ms, as the processes themselves saw it
    waited = [sum(a - min(a, b) for a, b in zip(took[k], took[1 - k])) / 3 for k in (0, 1)]
    # The same definition on the clock of the calls; a call holds the way to gloo's thread and back on top (0.1 ms of 20).
    assert r["late_rank"] == 1 and r["shown_rank"] == 0 and r["gaps"] == 0
    assert r["waiting"] == pytest.approx(waited[0], rel=0.03) and r["waiting"] > 150
    last = sum(b[0] > a[0] + 0.002 for a, b in zip(*calls))
    assert abs(r["late_count"] - last) <= 1 and r["waiting_for"]["1"] == pytest.approx(r["waiting"], rel=0.02)
    assert 0 < r["wire"] < sum(map(min, *took)) / 3 + 0.5
    assert abs(r["ranks"][1]["clock_offset_us"]) < 20000  # one clock: the two ends differ by less than a collective
    assert r["communication"] == pytest.approx(r["wire"] + r["waiting"])
    assert "rank 1 arrives last" in r["advice"][0]
