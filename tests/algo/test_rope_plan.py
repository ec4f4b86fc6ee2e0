"""csrc/algo/rope_plan.h: the launch of rope_append on every kind of device."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SMS = {"sm_80": 108, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 188}
EACH, THREADS, RESIDENT = 8, 128, 8  # elements of a lane, threads and blocks per multiprocessor

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the driver")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """plan(list of (head_dim, rows, full, kv_blocks, sms)) -> list of (team, q_blocks)."""
    binary = tmp_path_factory.mktemp("plan") / "driver"
    subprocess.run(["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(HERE.parents[1] / "csrc"),
                    str(HERE / "rope_plan_driver.cpp"), "-o", str(binary)], check=True)

    def run(cases: list) -> list:
        text = "\n".join(" ".join(map(str, c)) for c in cases)
        out = subprocess.run([str(binary)], input=text, capture_output=True, text=True, check=True).stdout
        return [tuple(map(int, line.split())) for line in out.splitlines()]

    return run


@pytest.mark.parametrize("device", SMS)
def test_launch_choices(plan, device):
    cases = [(d, rows, full, kv, SMS[device]) for d, rows, full, kv in itertools.product(
        (8, 64, 80, 128, 192, 256), (1, 16, 128, 256, 1000, 10**6, 2**33), (0, 1, 4, 16), (0, 1, 4))]
    got = plan(cases)
    assert len(got) == len(cases)
    for (d, rows, full, kv, sms), (team, q_blocks) in zip(cases, got):
        assert team & (team - 1) == 0 and team <= 32 and team * EACH >= d > team * EACH // 2 - (team == 1) * EACH
        assert min(1, full) <= q_blocks <= full
        if 1 < q_blocks:  # more than one block of a row only while everything is resident at once
            assert rows * (q_blocks + 2 * kv) <= sms * RESIDENT
        if q_blocks < full:  # and no fewer blocks than fit
            assert rows * (q_blocks + 1 + 2 * kv) > sms * RESIDENT
    few = plan([(128, 16, 4, 1, SMS[device])])[0]
    assert few == (16, 4)  # 16 rows of 32 + 8 heads spread over the device
