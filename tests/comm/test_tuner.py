"""The tuner's decisions and its files: pure, no GPU."""

import json

import pytest

from fastverify.comm import tuner


def test_message_sizes_cover_up_to_the_largest():
    assert tuner.message_sizes(16384) == [4096, 8192, 16384]
    assert tuner.message_sizes(20001) == [4096, 8192, 16384, 20000]
    assert tuner.message_sizes(100) == [96] and tuner.message_sizes(1) == [16]


@pytest.mark.parametrize("low, high, cut", [
    ([1, 2, 3], [5, 5, 5], 400), ([5, 5, 5], [1, 2, 3], 0), ([1, 4, 9], [3, 4, 5], 200), ([1, 5, 2], [4, 4, 4], 400),
    ([1, 50, 2], [4, 4, 4], 100), ([1, None, 2], [4, 4, 4], 100), ([None] * 3, [4, 4, 4], 0), ([1, 1, 1], [1, 1, 1], 400),
    ([2, 2, 2], [None, None, None], 400)])
def test_the_cut_with_the_least_time(low, high, cut):
    assert tuner.best_split([100, 200, 400], low, high) == cut


def test_the_whole_plan():
    sizes = [4096, 8192, 16384, 32768]
    plan = tuner.choose(sizes, [3, 5, 9, 17], [5, 6, 7, 12], [10, 10, 10, 10])
    assert plan == {"one_shot_bytes": 8192, "nccl_bytes": 16385}, "two-shot from 16 KiB, NCCL above it"
    assert tuner.choose(sizes, [3, 5, 9, 17], [5, 6, 7, 10.3], [20, 20, 20, 10])["nccl_bytes"] == 32769, "NCCL must be clearly faster"
    assert tuner.choose(sizes, [3] * 4, [4] * 4, None) == {"one_shot_bytes": 32768, "nccl_bytes": None}
    assert tuner.choose(sizes, [30] * 4, [40] * 4, [10] * 4)["nccl_bytes"] == 1, "NCCL may win everywhere"


def test_the_key_changes_with_every_fact():
    facts = dict(format=1, world=2, driver="580.1", links=[["X", "SYS"], ["SYS", "X"]], variables={})
    keys = {tuner.plan_key(facts)}
    for change in (dict(format=2), dict(world=4), dict(driver="580.2"), dict(links=[["X", "PIX"], ["PIX", "X"]]), dict(variables={"NCCL_PROTO": "LL"})):
        keys.add(tuner.plan_key({**facts, **change}))
    assert len(keys) == 6 and tuner.plan_key(dict(reversed(list(facts.items())))) in keys, "the order of facts does not matter"


def test_files_are_whole_or_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTVERIFY_CACHE", str(tmp_path))
    plan = {"one_shot_bytes": 8192, "nccl_bytes": 65537, "linear": {"7168,1024,bfloat16": [[256, "columns", 4]]}}
    assert tuner.load_plan("k") is None
    tuner.save_plan("k", plan)
    assert tuner.load_plan("k") == plan and [p.name for p in (tmp_path / "comm").iterdir()] == ["k.json"]
    for broken in ("", "{", "[]", json.dumps({"one_shot_bytes": "8192", "linear": {}}), json.dumps({"one_shot_bytes": 1})):
        tuner.cache_file("k").write_text(broken)
        assert tuner.load_plan("k") is None, "a file that is no plan is measured again"
    monkeypatch.setenv("FASTVERIFY_CACHE", str(tmp_path / "comm/k.json"))
    tuner.save_plan("k", plan)  # no folder can be made there: not an error


def test_modes(monkeypatch):
    monkeypatch.delenv("FASTVERIFY_TUNE", raising=False)
    assert tuner.mode() == "1"
    monkeypatch.setenv("FASTVERIFY_TUNE", "never")
    with pytest.raises(ValueError, match="FASTVERIFY_TUNE must be 0|1|again; got 'never'. Fix: "):
        tuner.mode()
