"""fastverify plan: the reported numbers of an 8-GPU PCIe machine, a MoE and a dense model by hand, wrong input."""

import json
import re
from pathlib import Path

import pytest

from cli_fixtures import cli  # noqa: F401
from fastverify import cost_model as cm

USER = ["--plain-ms", "11.6", "--verify-ms", "30", "--draft-ms", "0.66,5"]
COMM = ["--allreduces", "122", "--allreduce-us", "205"]
K2 = dict(num_hidden_layers=61, hidden_size=7168, num_attention_heads=64, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
          qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=384, num_experts_per_tok=8, n_shared_experts=1,
          first_k_dense_replace=1, intermediate_size=18432, moe_intermediate_size=2048, vocab_size=163840)
LLAMA = dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
             vocab_size=128256)


@pytest.fixture
def plan(cli):  # noqa: F811
    def run(*args) -> dict:
        code, out, err = cli("plan", *args, "--json")
        assert (code, err) == (0, ""), err
        return json.loads(out)
    return run


@pytest.fixture
def k2(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(K2))
    return ["--config", str(tmp_path), "--memory-gbs", "1790", "--ranks", "8", "--expert-bits", "4", "--draft-step-ms", "0.5"]


def test_break_even_of_the_users_numbers(plan):
    rows = plan(*USER, "--tau", "1.5,2,2.3,3")["rows"]
    assert [round(r["break_even_tau"], 2) for r in rows] == [2.64, 3.02]
    assert [[round(v) for v in r["tokens_per_second"].values()] for r in rows] == [[49, 65, 75, 98], [43, 57, 66, 86]]
    assert plan(*USER, "--other-ms", "1.16")["rows"][0]["break_even_tau"] == pytest.approx((30 + 0.66 + 1.16) / 11.6)


def test_reported_speeds_are_not_one_configuration(plan, cli):  # noqa: F811
    data = plan(*USER, "--reported", "52@1.5,60@2.0,94@2.0")
    assert [round(r["round_ms"], 1) for r in data["reported"]] == [28.8, 33.3, 21.3] and data["one_configuration"] is False
    code, out, err = cli("plan", *USER, "--reported", "52@1.5,60@2.0,94@2.0")
    assert code == 0 and "28.8 ms" in out and "33.3 ms" in out and "21.3 ms" in out and "these are not one configuration" in out
    assert "tau 2 < break-even 2.64: speculation loses 24%" in out
    same = plan(*USER, "--reported", "50@1.5,66.6@2.0")
    assert same["one_configuration"] is True and not any("configuration" in v for v in same["verdicts"])
    assert plan(*USER, "--reported", "52@1.5")["one_configuration"] is None
    assert "tau 3 >= break-even 2.64: speculation wins 14%" in plan(*USER, "--reported", "98@3")["verdicts"][0]


def test_allreduce_times(plan):
    data = plan(*USER, *COMM, "--tau", "2")
    got = {(r["allreduce_us"], r["draft_ms"]): r for r in data["rows"]}
    verify = {us: round(got[us, 0.66]["verify_ms"], 2) for us in (205, 24, 56, 10)}
    assert verify == {205: 30.0, 24: 7.92, 56: 11.82, 10: 6.21}
    assert {us: round(got[us, 5.0]["tokens_per_second"]["2"]) for us in verify} == {205: 57, 24: 155, 56: 119, 10: 178}
    assert data["change_first"][0]["part"] == "communication" and data["change_first"][0]["saves_ms"] == pytest.approx(23.79)
    assert data["change_first"][1] == {"part": "draft", "saves_ms": pytest.approx(4.34), "what": "draft in 0.66 ms",
                                       "break_even_tau": pytest.approx(2.643, abs=1e-3)}
    assert any("at most 95 us each" in n for n in data["notes"])
    assert len(plan(*USER, *COMM, "--allreduce", "kernel,33")["rows"]) == 6
    quick = plan(*USER, "--allreduces", "122", "--allreduce-us", "50")
    assert not any("not what the wire costs" in n for n in quick["notes"])


def test_what_follows_from_each_allreduce_time(plan):
    """205, 56, 24 and 10 us: (30 - 122 x 0.205) + 122 x us, and 1000 tau over it and the draft; the docs hold the same numbers."""
    rows = {(r["allreduce_us"], r["draft_ms"]): r for r in plan(*USER, *COMM, "--tau", "1.5,2")["rows"]}
    by_hand = {205: (30.0, 49, 65, 43, 57), 56: (11.82, 120, 160, 89, 119), 24: (7.92, 175, 233, 116, 155), 10: (6.21, 218, 291, 134, 178)}
    for us, (verify, *speeds) in by_hand.items():
        assert rows[us, 0.66]["verify_ms"] == pytest.approx(4.99 + 122 * us / 1e3) and round(rows[us, 0.66]["verify_ms"], 2) == verify
        assert [round(rows[us, d]["tokens_per_second"][t]) for d in (0.66, 5.0) for t in ("1.5", "2")] == speeds
    page = Path(__file__).resolve().parents[2] / "docs/plan_and_trace.md"
    if page.exists():
        table = re.findall(r"\| (\d+) \| ([\d.]+) \| (\d+) \| (\d+) \|$", page.read_text(), re.M)
        assert {int(us): (float(v), int(a), int(b)) for us, v, a, b in table} == {
            us: (round(v, 1), a, b) for us, (v, _, a, _, b) in by_hand.items()}


def test_without_communication_the_verify_is_named(plan):
    assert plan(*USER)["change_first"][0]["part"] == "verify"
    assert plan("--plain-ms", "10", "--verify-ms", "12", "--draft-ms", "9")["change_first"][0]["part"] == "draft"
    assert plan(*USER, "--other-ms", "40")["change_first"][0]["part"] == "other"


def test_expected_experts():
    """384 experts, top-8: 384 (1 - (376/384)^n)."""
    assert [round(cm.distinct_experts(384, 8, n)) for n in (1, 4, 8, 16, 60)] == [8, 31, 60, 110, 275]
    assert cm.distinct_experts(8, 8, 5) == 8


def test_moe_by_hand(plan, k2):
    w = cm.read_config(K2)
    assert (w.layers, w.allreduces, w.moe_layers, w.experts, w.top_k, w.kv_values) == (61, 122, 60, 384, 8, 61 * 576)
    assert w.expert == 3 * 7168 * 2048
    assert w.expert_bytes(1, 4) / 1e9 == pytest.approx(10.57, abs=0.01)  # 8 of 384 experts, 60 layers
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    assert w.shared == (61 * attention + 60 * (3 * 7168 * 2048 + 7168 * 384) + 3 * 7168 * 18432 + 7168 * 163840)
    rows = {r["shape"]: r for r in plan(*k2, "--allreduce", "kernel", "--shapes", "off,chain-3,tree-60")["rows"]}
    assert rows["off"]["experts_ms"] == pytest.approx(10.57 / 8 / 1.79, rel=1e-3)
    assert rows["off"]["verify_ms"] == rows["off"]["plain_ms"] == rows["off"]["round_ms"]
    assert rows["chain-3"]["draft_ms"] == 1.5 and rows["chain-3"]["allreduce_ms"] == pytest.approx(1.22)
    assert rows["tree-60"]["message_bytes"] == 860160
    assert rows["tree-60"]["experts_ms"] / rows["off"]["experts_ms"] == pytest.approx(34.4, abs=0.1)


def test_allreduce_model_against_calibrated_values():
    """W = 8, hidden 7168, PCIe 5: 20.5 us at 16 rows, 36.3 at 32, 68 at 64, the kernel's 10 us for small ones."""
    for rows, us in ((1, 10), (16, 20.5), (32, 36.3), (64, 68.0)):
        assert cm.allreduce_us(10, rows * 14336, 8, cm.LINK_GB_S["pcie5"]) == pytest.approx(us, rel=0.05)


def test_acceptance_gives_chains_their_tau(plan, k2):
    assert [round(cm.chain_tau([0.645, 0.61], n), 2) for n in (1, 2, 3, 5)] == [1.65, 2.04, 2.28, 2.51]
    data = plan(*k2, "--accept", "0.645,0.61")
    for r in data["rows"]:
        assert (r["tau"] is None) == r["shape"].startswith("tree")
        if r["tau"]:
            assert r["speed_up"] == pytest.approx(r["tau"] / r["break_even_tau"])
    assert len({(r["allreduce"], r["allreduce_us"]) for r in data["rows"]}) == len(data["change_first"]) == 4
    assert data["change_first"][0].startswith("nccl-misconfigured (205 us), chain-5: all-reduces take 25.2")


def test_dense_by_hand(plan, tmp_path, cli):  # noqa: F811
    w = cm.read_config(LLAMA)
    assert w.shared == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    args = ["--config", path, "--memory-gbs", "3000", "--draft-step-ms", "0.3", "--context", "8192"]
    data = plan(*args)
    assert data["allreduces"] == 0 and data["experts"] == 0 and {r["allreduce_ms"] for r in data["rows"]} == {0.0}
    first = data["rows"][0]
    assert first["shared_ms"] == pytest.approx(w.shared * 2 / 3e9) and first["kv_ms"] == pytest.approx(8192 * 32 * 2048 * 2 / 3e9)
    assert "other weights take" in data["change_first"][0]
    code, out, err = cli("plan", *args, "--accept", "0.7")
    assert code == 0 and err == "" and "tree-60" in out and "break-even tau" in out and "speed-up" in out and " experts " not in out
    assert plan(*args, "--plain-ms", "9")["rows"][0]["plain_ms"] == 9


def refused(result: tuple, message: str) -> None:
    code, out, err = result
    assert code == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err, err
    assert message in err and "Fix: " in err, err


@pytest.mark.parametrize("flags,message", [
    ([], "plan: --plain-ms must be given; got none. Fix: add --plain-ms, or plan from a model with --config."),
    (["--plain-ms", "11.6", "--verify-ms", "30"], "plan: --draft-ms must be given; got none."),
    ([*USER, "--plain-ms", "0"], "plan: plain_ms must be a finite number > 0; got 0.0. Fix: change --plain-ms."),
    ([*USER, "--verify-ms", "nan"], "plan: verify_ms must be a finite number > 0; got nan."),
    ([*USER, "--other-ms", "-1"], "plan: other_ms must be a finite number >= 0; got -1.0."),
    ([*USER, "--draft-ms", "a"], "plan: draft_ms must be numbers >= 0, comma separated; got 'a'. Fix: change --draft-ms."),
    ([*USER, "--draft-ms=-1"], "plan: draft_ms must be numbers >= 0, comma separated; got '-1'."),
    ([*USER, "--tau", "0.5"], "plan: tau must be numbers >= 1, comma separated; got '0.5'."),
    ([*USER, "--tau", "inf"], "plan: tau must be numbers >= 1, comma separated; got 'inf'."),
    ([*USER, "--reported", "52"], "plan: reported must be TOKS@TAU with tok/s > 0 and tau >= 1, as 52@1.5; got '52'."),
    ([*USER, "--reported", "52@0.5"], "got '52@0.5'."),
    ([*USER, "--allreduce", "kernel"], "plan: allreduce_us must be given with --allreduce and --allreduces; got none."),
    ([*USER, "--allreduce-us", "205"], "plan: allreduces must be given with --allreduce-us; got none."),
    ([*USER, "--allreduces", "-1"], "plan: allreduces must be at least 0; got -1."),
    ([*USER, "--allreduces", "200", "--allreduce-us", "205"],
     "plan: the all-reduces must fit into the verify; got 200 x 205 us = 41.0 ms in 30 ms."),
    ([*USER, *COMM, "--allreduce", "fast"], "plan: allreduce must be microseconds > 0 or one of nccl-misconfigured, nccl-p2p"),
    (["--config", "x", "--verify-ms", "3"], "plan: --verify-ms must go without --config; got both."),
    (["--config", "x"], "plan: --memory-gbs must be given with --config; got none. Fix: add --memory-gbs."),
])
def test_arguments(cli, flags, message):  # noqa: F811
    refused(cli("plan", *flags), message)


@pytest.mark.parametrize("change,message", [
    ({"hidden_size": None}, "plan: the model's config must have hidden_size as an integer; got none."),
    ({"num_attention_heads": 0}, "must be at least 1; got 0."),
    ({"num_experts_per_tok": 400}, "plan: num_experts_per_tok must be in 1..384; got 400."),
])
def test_configs(cli, k2, tmp_path, change, message):  # noqa: F811
    (tmp_path / "config.json").write_text(json.dumps(K2 | change))
    refused(cli("plan", *k2), message)


def test_other_files(cli, k2, tmp_path):  # noqa: F811
    refused(cli("plan", *k2, "--shapes", "bush"), "tree: the shape must be off, auto, chain-K")
    refused(cli("plan", *k2, "--shapes", "auto"), "plan: shapes must be fixed ones; got auto.")
    refused(cli("plan", *k2, "--accept", "1.5"), "plan: accept must be numbers in [0, 1], comma separated; got '1.5'.")
    refused(cli("plan", *k2, "--ranks", "0"), "plan: ranks must be at least 1; got 0.")
    (tmp_path / "config.json").write_text("[1]")
    refused(cli("plan", *k2), "plan: config must be a JSON object; got ")
    refused(cli("plan", "--config", tmp_path / "none.json", *k2[2:]), "plan: config must be an existing file, or a folder")


def test_table_of_times(cli):  # noqa: F811
    code, out, err = cli("plan", *USER, *COMM, "--tau", "2")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and ["nccl-p2p", "56", "11.82", "0.66", "12.48", "1.08", "160"] in lines
    assert [line[:2] for line in lines if line and line[0] == "kernel"] == [["kernel", "10"]] * 2
