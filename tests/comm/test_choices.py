"""How collectives are cut into blocks: pure functions of shape and device, for every architecture, on the CPU."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the driver")
HERE = Path(__file__).resolve().parent
DEVICES = {"sm_80": (8, 108), "sm_89": (8, 142), "sm_90": (9, 132), "sm_100": (10, 148), "sm_120": (12, 188)}
ONE_SHOT, TWO_SHOT = 0, 1
NO_REGISTERS = 1 << 9


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    driver = tmp_path_factory.mktemp("choices") / "driver"
    subprocess.run(["g++", "-std=c++20", "-O1", f"-I{HERE.parents[1] / 'csrc'}", str(HERE / "choice_driver.cpp"), "-o", str(driver)], check=True)

    def run(lines: list) -> list:
        text = "\n".join(" ".join(map(str, line)) for line in lines)
        out = subprocess.run([str(driver)], input=text, capture_output=True, text=True, check=True).stdout
        return [tuple(map(int, line.split())) for line in out.splitlines()]
    return run


def test_sums(ask):
    cases = list(itertools.product((1, 2, 16, 64), (1, 127, 128, 896, 1024, 1025, 4096, 57344, 1 << 22)))
    for (most, vectors), (blocks, threads) in zip(cases, ask([("sum", *c) for c in cases])):
        assert 1 <= blocks <= most and threads in (128, 256, 512)
        assert (blocks - 1) * threads < vectors, "no block without a vector"
        assert blocks * threads >= vectors or (blocks == most and threads == 512)


def test_norms(ask):
    cases = list(itertools.product(
        DEVICES, ((2, 1), (3, 1), (8, 1), (2, 2), (8, 8)), (1, 16, 64), (0, 1), (0, 1, 4, NO_REGISTERS), (ONE_SHOT, TWO_SHOT), (0, 1),
        (1, 4, 16, 64, 200), (1, 128, 360, 896, 1792, 4096)))
    found = ask([("norm", *DEVICES[d], *ranks, blocks, hooks, forced, form, pre, rows, vectors)
                 for d, ranks, blocks, hooks, forced, form, pre, rows, vectors in cases])
    assert len(found) == len(cases)
    for case, (work, threads, cluster, prefetch, registers) in zip(cases, found):
        device, (world, local), blocks, hooks, forced, form, pre, rows, vectors = case
        major, sms = DEVICES[device]
        assert cluster in ((1, 2, 4, 8) if major in (9, 10) or (major == 12 and forced & 0xFF) else (1,)), case
        assert work >= cluster and work % cluster == 0 and work // cluster <= rows and prefetch % cluster == 0, case
        most_threads = 1024 if registers and world <= 2 else 512 if registers or (world <= 4 and not hooks) else 256
        assert 128 <= threads <= most_threads, case
        assert not forced & 0xFF or cluster <= (forced & 0xFF), case
        if registers:  # a thread per vector, a team per row
            assert form == ONE_SHOT and not hooks and forced != NO_REGISTERS and cluster * threads >= vectors and work == rows * cluster, case
        if local > 1:  # virtual ranks wait for each other: all resident, one block per multiprocessor
            assert (work + prefetch) * local <= sms or work == cluster, case
            assert cluster <= 4 and (cluster == 1 or work * local <= sms * 7 // 8 + 1 or work == cluster), case
        assert bool(prefetch) == bool(pre), case


def test_a_row_of_7168(ask):
    """The sizes that count: one row, bf16, two ranks."""
    for device, want in {"sm_80": (1, 1024, 1), "sm_89": (1, 1024, 1), "sm_90": (8, 128, 8), "sm_100": (8, 128, 8), "sm_120": (1, 1024, 1)}.items():
        (work, threads, cluster, _, registers), = ask([("norm", *DEVICES[device], 2, 1, 64, 0, 0, ONE_SHOT, 0, 1, 896)])
        assert (work, threads, cluster) == want and registers
