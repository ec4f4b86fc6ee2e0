"""How verify_tree is spread over a GPU: csrc/algo/verify_plan.h over shapes and devices, on the CPU."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from fastverify import verify_tree_workspace_bytes

ROOT = Path(__file__).parents[2]
DEVICES = [(8, 108), (8, 142), (9, 132), (10, 148), (12, 188), (12, 84)]  # compute capability, multiprocessors
SHAPES = list(itertools.product([1, 2, 3, 8, 32, 64, 256, 5000], [1, 2, 16, 64, 1024], [1, 37, 2048, 32000, 128256, 1 << 20]))
DRIVER = r"""
#include <cstdio>
#include "algo/verify_plan.h"
int main() {
    long long b, r, v; int major, sms, w;
    while (std::scanf("%lld %lld %lld %d %d %d", &b, &r, &v, &major, &sms, &w) == 6) {
        const fv::VerifyShape s = fv::verify_shape(b, r, v, sms, w != 0);
        std::printf("%d %d %d %lld\n", s.blocks, s.all_rows, fv::partials_cluster(r, v, major, sms),
                    (long long)fv::kAreaBytes);
    }
}
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the driver")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """{(B, N, V, major, sms, workspace): (blocks, all_rows, cluster of verify_tree_partials, bytes)}"""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "driver.cpp").write_text(DRIVER)
    subprocess.run(["g++", "-std=c++20", "-O1", f"-I{ROOT / 'csrc'}", str(folder / "driver.cpp"), "-o", str(folder / "driver")], check=True)
    keys = [(b, n, v, major, sms, w) for (b, n, v), (major, sms), w in itertools.product(SHAPES, DEVICES, [0, 1])]
    lines = "\n".join(f"{b} {b * n} {v} {major} {sms} {w}" for b, n, v, major, sms, w in keys)
    out = subprocess.run([str(folder / "driver")], input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(zip(keys, (tuple(map(int, line.split())) for line in out)))


def test_every_choice_is_launchable(plan):
    for (b, n, v, major, sms, w), (blocks, all_rows, cluster, _) in plan.items():
        assert blocks == 1 or (w and blocks * b <= sms)  # all blocks of a launch with teams run at the same time
        assert blocks == 1 or (blocks - 1) * 512 < v  # no block without ids to speak of
        assert not all_rows or blocks > 1
        assert 1 <= cluster <= {8: 1, 9: 8, 10: 8, 12: 8}[major] and cluster & (cluster - 1) == 0
        assert cluster == 1 or cluster * b * n <= sms


def test_no_teams_without_a_workspace(plan):
    assert all(p[:2] == (1, 0) for key, p in plan.items() if not key[5])


def test_choices_that_were_measured(plan):
    """H200: small batches take all rows at once, larger ones follow the path."""
    assert plan[1, 16, 128256, 9, 132, 1][:2] == (132, 1)
    assert plan[1, 64, 128256, 9, 132, 1][:2] == (132, 1)
    assert plan[1, 1024, 128256, 9, 132, 1][:2] == (132, 0)
    assert plan[8, 64, 128256, 9, 132, 1][:2] == (16, 0)
    assert plan[32, 16, 128256, 9, 132, 1][:2] == (4, 0)
    assert plan[256, 16, 128256, 9, 132, 1][:2] == (1, 0)


def test_workspace_bytes_are_the_same_in_python(plan):
    assert {p[3] for p in plan.values()} == {verify_tree_workspace_bytes()}
