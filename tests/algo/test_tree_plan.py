"""csrc/algo/tree_plan.h: how the tree ops are spread over every kind of device."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEVICES = {"sm_80": (8, 108, 163), "sm_89": (8, 142, 99), "sm_90": (9, 132, 227), "sm_100": (10, 148, 227), "sm_120": (12, 188, 99)}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the driver")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """run(mode, rows of numbers) -> rows of numbers of the small program that includes the header."""
    binary = tmp_path_factory.mktemp("plan") / "driver"
    subprocess.run(["g++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-I", str(HERE.parents[1] / "csrc"),
                    str(HERE / "tree_plan_driver.cpp"), "-o", str(binary)], check=True)

    def run(mode: str, rows: list) -> list:
        text = "\n".join(" ".join(map(str, r)) for r in rows)
        done = subprocess.run([str(binary), mode], input=text, capture_output=True, text=True, check=True)
        return [list(map(int, line.split())) for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize("device", DEVICES)
def test_clusters_fit_the_device(driver, device):
    major, sms, _ = DEVICES[device]
    rows = [(items, size, k, major, sms) for items in (0, 1, 2, 8, 16, 17, 80, 640) for size in (1, 4096, 32000, 163840)
            for k in (1, 10, 64)]
    for (items, size, k, *_), (topk, grow) in zip(rows, driver("cluster", rows)):
        for blocks in (topk, grow):
            assert blocks in ((1,) if major < 9 else (1, 2, 4, 8)) and (blocks == 1 or 0 < blocks * items <= sms)
        assert topk * k <= 256 and (topk == 1 or size // topk >= 2048) and (grow == 1 or k * size // grow >= 16384)


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_batch_of_eight_gets(driver, device):
    """8 rows of 32000 logits, k = 10; 8 requests with 10 hidden rows of 7168 bfloat16."""
    major, sms, _ = DEVICES[device]
    (topk, _), (_, grow) = driver("cluster", [(8, 32000, 10, major, sms), (8, 14336, 10, major, sms)])
    assert (topk, grow) == ((8, 8) if major >= 9 else (1, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_build_tree_fits_shared_memory(driver, device):
    room = DEVICES[device][2] * 1024
    pools = [0, 1, 31, 255, 700, 1024, 7210, 18_000, 20_000, 40_000, 65_536, 2**19]
    for pool, (threads, warps, smem, stored) in zip(pools, driver("build", [(p, room) for p in pools])):
        assert threads % 32 == 0 and 256 <= threads <= 1024 and (pool > 1024 or threads >= min(pool, 1024))
        assert 1 <= warps <= threads // 32 and smem + 24 * 1024 <= room
        assert smem >= warps * 4 * -(-pool // 32) and (not stored or smem >= 4 * pool)
        assert stored == (4 * 32 * -(-pool // 32) + 24 * 1024 <= room)
