"""How skinny_linear cuts products over long K: no GPU needed. The choice knows N and K alone, so every architecture sums alike."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# (outer, inner) -> (takes it, blocks that share the K of 64 weight rows)
WANT = {(4096, 4096): (1, 2), (6144, 4096): (1, 2), (28672, 4096): (1, 1), (4096, 14336): (1, 2), (128256, 4096): (1, 1), (1024, 4096): (1, 4),
        (3072, 2080): (1, 2), (3008, 2080): (1, 4), (12288, 4096): (1, 1), (12224, 4096): (1, 2), (576, 2048): (0, 4), (4112, 4096): (0, 2), (0, 4096): (0, 4)}

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to build the driver")


def test_long_inner(tmp_path):
    program = tmp_path / "driver"
    subprocess.run(["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{HERE.parents[1] / 'csrc'}", str(HERE / "linear_plan_driver.cpp"), "-o",
                    str(program)], check=True)
    lines = subprocess.run([str(program)], input="\n".join(f"{n} {k}" for n, k in WANT), check=True, capture_output=True, text=True).stdout.split("\n")
    assert [tuple(map(int, line.split())) for line in lines if line] == list(WANT.values())
