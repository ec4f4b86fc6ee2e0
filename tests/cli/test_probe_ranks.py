"""fastverify probe under torchrun: two gloo processes on the golden pair; what every rank's round is made of."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from cli_fixtures import cli  # noqa: F401
from cli_run import PAIR, environment
from ports import free_port

from fastverify import load_draft, load_target
from fastverify.cli import ranks
from fastverify.eagle3.decode import Decoder

PROMPTS = [[3, 4, 5], [9, 8], [9, 8, 7, 100], [50, 60, 70]]


def start(folder, world: int, *flags: str) -> list:
    port = free_port()
    base = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "fastverify", "probe", *PAIR, "--prompts", str(folder / "ids.jsonl"), "--max-new-tokens", "16",
               "--ignore-eos", *flags]
    (folder / "ids.jsonl").write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in PROMPTS))
    return [subprocess.Popen(command, env=base | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True) for r in range(world)]


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
def test_two_ranks(tmp_path):
    """Both ranks emit what one rank alone does; rank 0 alone prints; communication is told apart on each."""
    result = tmp_path / "probe.json"
    processes = start(tmp_path, 2, "--tree", "chain-2", "--draft", "ngram", "--out", str(result), "--seconds", "60")
    printed = [p.communicate(timeout=150) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], printed
    assert printed[1][0] == "" and "Traceback" not in printed[1][1]
    data = json.loads(result.read_text())
    assert data["world_size"] == 2 and [(r["draft"], r["shape"]) for r in data["rows"]] == [
        ("none", "off"), ("draft", "chain-2"), ("ngram", "chain-2")]
    for row in data["rows"]:
        assert [p["rank"] for p in row["ranks"]] == [0, 1] and row["equal"] == row["prompts"] == 4
        for p in row["ranks"]:
            assert 0 < p["communication"] and 0 < p["verify"] and p["other"] >= 0
            assert p["draft"] > 0 or row["shape"] == "off" or not row["speculative_share"]
        mine = {k: v for k, v in row["ranks"][0].items() if k != "rank"}
        assert mine == {k: row["ms"][k] for k in mine}, "the row is rank 0's"
    alone = Decoder(target := load_target(PAIR[1]), load_draft(PAIR[3], target), tree="chain-2")
    stats = [alone.generate([ids], 16, stop_ids=[]).stats for ids in PROMPTS]
    chain = data["rows"][1]
    assert (chain["accepted"], chain["drafted"]) == (sum(s.accepted for s in stats), sum(s.drafted for s in stats))
    assert "world size 2: plain step" in printed[0][0] and "the round on every rank" in printed[0][0]
    lines = [line.split() for line in printed[0][0].splitlines() if line.startswith("draft  chain-2")]
    assert [line[2] for line in lines[1:3]] == ["0", "1"]


def test_a_group_that_cannot_be_joined(cli, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [3, 4]}\n{"token_ids": [5, 4]}\n')
    code, out, err = cli("probe", *PAIR, "--prompts", tmp_path / "ids.jsonl", "--tree", "chain-2", "--max-new-tokens", "16")
    assert code == 2 and "probe: WORLD_SIZE=2 must come with a group that can be joined; got no MASTER_ADDR, MASTER_PORT. Fix: torchrun" in err


class Slow:
    """A communicator of one rank whose gathers take 2 ms of a clock of its own."""

    gathers, now = True, 100.0

    def gather(self, x):
        self.now += 0.002
        return x


def test_gathers_are_clocked_by_round(monkeypatch):
    comm = Slow()
    monkeypatch.setattr(ranks.time, "perf_counter", lambda: comm.now)
    stats = ranks.GatherStats(comm)
    with stats.clocking():
        for stage, gathers in (("prefill", 3), ("draft", 0), ("target", 2), ("verify", 1), ("draft", 0), ("target", 1), ("verify", 0)):
            with stats.timer(stage):
                comm.now += 0.001
                for _ in range(gathers):
                    comm.gather(torch.ones(1))
    assert stats.communication == pytest.approx([6, 2]) and "gather" not in vars(comm)
    assert stats.ms == pytest.approx({"prefill": 7, "draft": 2, "target": 8, "verify": 4, "other": 0})


def test_kernels_are_shared_out_by_round():
    name = "void fv::all_reduce_rms_norm_kernel<__nv_bfloat16>(fv::Args)"
    kernels = [(float(t), 10.0 + t, name) for t in (5, 1, 3, 2, 4, 0)] + [(0.5, 900.0, "gemm")]
    assert ranks.by_round(kernels, 3) == pytest.approx([0.021, 0.025, 0.029])
    assert ranks.by_round(kernels, 4) == pytest.approx([0.075 / 4] * 4) and ranks.by_round([], 2) == [0.0, 0.0]


def test_one_rank_is_a_run_like_any_other():
    alone = ranks.Ranks()
    assert (alone.rank, alone.world, alone.agree(True), alone.gathered(3)) == (0, 1, True, [3])
    assert alone.shard("target") == "target" and ranks.split_of([], alone) is None
    assert ranks.world_size() == int(os.environ.get("WORLD_SIZE", "1"))
