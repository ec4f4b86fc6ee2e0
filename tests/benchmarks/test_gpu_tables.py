"""benchmarks/gpu_tables.py: the newest file of a GPU, one line per shape, wrong results marked."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = next((p / "benchmarks" for p in Path(__file__).resolve().parents if (p / "benchmarks/gpu_tables.py").exists()), None)
if FOLDER is None:
    pytest.skip("benchmarks/ is not beside these tests", allow_module_level=True)


@pytest.fixture
def gpu_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpu_tables
    yield gpu_tables
    sys.modules.pop("gpu_tables")


def row(provider: str, us, shape: dict, **changes) -> dict:
    return dict(op="op", provider=provider, shape=shape, dtype="bfloat16", median_us=us, floor_us=1.5, cold=True, correct=True,
                device="NVIDIA X", device_type="cuda", date="2026-01-02T03:04:05+00:00", versions=dict(torch="2.11", python="3.12"),
                command="python bench_op.py", copy_gb_s=4000.0, empty_us=0.5) | changes


def write(folder: Path, name: str, rows: list) -> None:
    (folder / name).write_text(json.dumps(dict(rows=rows)))


def test_lines_are_shapes_and_columns_providers(gpu_tables, tmp_path):
    write(tmp_path, "nvidia-x-2026-01-02.json", [
        row("ours", 2.345, dict(B=1)), row("peer", None, dict(B=1), correct=None), row("ours", 12.34, dict(B=2)),
        row("peer", 123.4, dict(B=2), correct=False), row("other op", 1.0, dict(B=2), op="another")])
    lines = gpu_tables.gpu_part(tmp_path, "op").splitlines()
    assert "NVIDIA X, 2026-01-02, torch 2.11" in lines[0] and "python 3.12" not in lines[0] and "nvidia-x-2026-01-02.json" in lines[0]
    assert lines[2:6] == ["| B | dtype | L2 | floor | ours | peer |", "|---|---|---|---|---|---|",
                          "| 1 | bfloat16 | cold | 1.50 | 2.35 | - |", "| 2 | bfloat16 | cold | 1.50 | 12.3 | 123* |"]
    assert lines[-1] == "3 of 4 rows were checked in that run, 1 were wrong."


def test_newest_gpu_file_wins_and_others_are_ignored(gpu_tables, tmp_path):
    write(tmp_path, "nvidia-x-2026-01-02.json", [row("old", 1.0, dict(B=1))])
    write(tmp_path, "nvidia-a-2026-01-03.json", [row("new", 1.0, dict(B=1))])
    write(tmp_path, "cpu-2026-01-04.json", [row("cpu", 1.0, dict(B=1), device_type="cpu")])
    (tmp_path / "cpu-evaluate-auto-2026-01-05.json").write_text('{"environment": {}, "rows": [{"set": "qa"}]}')
    assert gpu_tables.newest(tmp_path, "op")[0] == "nvidia-x-2026-01-02.json", "by the date of rows"
    write(tmp_path, "nvidia-a-2026-01-03.json", [row("new", 1.0, dict(B=1), date="2026-01-03T00:00:00+00:00")])
    assert gpu_tables.newest(tmp_path, "op")[0] == "nvidia-a-2026-01-03.json"
    assert gpu_tables.gpu_part(tmp_path, "absent") == ""


def test_what_the_newest_file_has_not_measured_comes_from_the_one_before(gpu_tables, tmp_path):
    then = dict(date="2026-01-01T00:00:00+00:00")
    write(tmp_path, "nvidia-x-2026-01-01.json", [
        row("ours", 1.0, dict(B=1), **then), row("peer", 4.0, dict(B=1), **then), row("ours, fp8", 3.0, dict(B=2), correct=False, **then),
        row("ours", 5.0, dict(B=2), **then), row("ours", 6.0, dict(B=3), **then), row("gone", None, dict(B=3), **then)])
    write(tmp_path, "nvidia-y-2026-01-01.json", [row("of another device", 1.0, dict(B=1), device="NVIDIA Y", **then)])
    write(tmp_path, "nvidia-x-2026-01-02.json", [row("ours", 2.0, dict(B=1)), row("peer", None, dict(B=1), correct=None)])
    lines = gpu_tables.gpu_part(tmp_path, "op").splitlines()
    assert lines[2:6] == ["| B | dtype | L2 | floor | ours | peer | ours, fp8 |", "|---|---|---|---|---|---|---|",
                          "| 1 | bfloat16 | cold | 1.50 | 2.00 | 4.00+ | - |", "| 2 | bfloat16 | cold | 1.50 | 5.00+ | - | 3.00*+ |"]
    assert lines[-1] == ("1 of 2 rows were checked in that run, 0 were wrong. +: of 2026-01-01, `benchmarks/results/nvidia-x-2026-01-01.json`, 1 wrong."), \
        "a shape that only providers of the newest file have is not brought back"


def test_summary_has_ours_and_the_fastest_peer_that_is_right(gpu_tables, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_tables, "SUMMARY", (("op", "cuda", dict(B=1), "one"), ("op", "cuda", dict(B=2), "two"), ("gone", "cuda", {}, "none")))
    assert gpu_tables.summary(tmp_path) == ""
    write(tmp_path, "nvidia-x-2026-01-02.json", [
        row("cuda", 4.0, dict(B=1, N=3)), row("triton", 1.0, dict(B=1, N=3)), row("peer", 8.0, dict(B=1, N=3)), row("slow", 9.0, dict(B=1, N=3)),
        row("wrong", 2.0, dict(B=1, N=3), correct=False), row("absent", None, dict(B=1, N=3), correct=None), row("GEMM alone", 3.0, dict(B=1, N=3)),
        row("other", 3.0, dict(B=1, N=4)), row("cuda", 12.34, dict(B=2), floor_us=0.1, correct=False)])
    lines = gpu_tables.summary(tmp_path).splitlines()
    assert "NVIDIA X, 2026-01-02, torch 2.11, `benchmarks/results/nvidia-x-2026-01-02.json`" in lines[0]
    assert lines[4:6] == ["| `op` | one | 1.50 | 4.00 | peer 8.00 | 2.0x |", "| `op` | two | 0.50* | 12.3 (WRONG) | - | - |"]


def test_summary_names_shapes_that_the_benchmarks_have(gpu_tables):
    """Every line of the README's table is a shape of its benchmark's own table."""
    for op, provider, shape, what in gpu_tables.SUMMARY:
        (script,) = FOLDER.glob(f"*/bench_{op}.py")
        text = script.read_text()
        assert f'"{provider}"' in text, op
        for axis, value in shape.items():
            assert str(value) in text or axis in ("norm", "logits", "accepted", "R"), (op, axis, value)
