"""The model of a verify on a machine that was not to be had: its arithmetic, and that the documentation shows its output."""

import importlib.util
import json
from pathlib import Path

import pytest

HERE = Path(__file__).resolve()
ROOT = next((p for p in HERE.parents if (p / "benchmarks/comm/model_page.py").exists()), None)
if ROOT is None:
    pytest.skip("benchmarks/ is not beside these tests", allow_module_level=True)
spec = importlib.util.spec_from_file_location("fastverify_model_page", ROOT / "benchmarks/comm/model_page.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)


def test_the_documentation_shows_what_it_prints():
    text = (ROOT / "docs/performance.md").read_text()
    assert text.split("<!-- model: kimi -->\n")[1].split("\n<!-- /model -->")[0].splitlines() == page.table(page.WAYS)


def test_lines_between_measured_sizes():
    points = {100: 10.0, 200: 20.0, 400: 30.0}
    assert [page.between(points, n) for n in (1, 100, 150, 300, 600)] == [10, 10, 15, 25, 40]


def test_ours_is_what_the_formula_says():
    assert page.ours_p2p(14336) == pytest.approx(2.6 + 2.14 + 25088 / 25400)
    assert page.ours_mailbox(57344) == pytest.approx(8.8 + 28 * 57344 / 114e3)


def test_a_report_of_the_doctor_takes_its_place(tmp_path, capsys):
    row = lambda n, us: dict(bytes=n, eager_us=us + 9, graph_us=us, ours={"peer": 1.0, "peer + norm": us / 10, "host": None, "host + norm": None})  # noqa: E731
    file = tmp_path / "doctor.json"
    file.write_text(json.dumps({"facts": {"allreduce": {"rows": [row(14336, 60.0), row(917504, 300.0)]}}}))
    assert page.main(["--doctor", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].count("us |") == 2 and "NCCL here" in lines[0] and "ours, peer" in lines[0], "what did not work is left out"
    assert lines[2].split(" | ")[3:] == ["62", "10.4", "6.0", "3.5 |"], lines[2]
    file.write_text(json.dumps({"facts": {"allreduce": {"rows": []}}}))
    assert page.main(["--doctor", str(file)]) == 2
