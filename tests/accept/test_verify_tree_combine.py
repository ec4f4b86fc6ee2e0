"""verify_tree_combine on its own: arguments and schema (what it computes: test_verify_tree_partials.py)."""

import pytest
import torch

from cases import verify_case
from conftest import positional
from fastverify import _ops

KEYS = ("tokens", "parents", "cu_nodes", "prefix_len", "active", "remaining", "stop_ids", "temperature", "top_k", "top_p",
        "min_p", "out_tokens", "num_tokens_out", "path", "next_root", "flags")


def arguments(**over):
    case = verify_case(torch.Generator().manual_seed(1), batch=2, nodes=4, vocab=11, fixed_nodes=True)
    rows = case["logits"].shape[0]
    good = dict(partials=torch.zeros(3, rows, 256, dtype=torch.int64), state=torch.zeros(rows, 8, dtype=torch.int64),
                vocab_offset=0, vocab_size=11, round=9, num_rounds=10, rule=1, **{k: case[k] for k in KEYS})
    return positional("verify_tree_combine", **{**good, **over})


@pytest.mark.parametrize("over,message", [
    (dict(partials=torch.zeros(3, 9, dtype=torch.int64)), "verify_tree_combine: partials must be int64 .any, any, any."),
    (dict(num_rounds=4), "verify_tree_combine: num_rounds must be 1, 2 or 10; got 4. Fix: "),
    (dict(round=-1), r"verify_tree_combine: round must be in \[0, 10\); got -1. Fix: "),
    (dict(partials=torch.zeros(3, 9, 2, dtype=torch.int64)), "verify_tree_combine: partials must have at least 256 columns"),
    (dict(num_rounds=1, round=0, logprobs=torch.zeros(2, 4)), "verify_tree_combine: num_rounds must be 2 or 10 when logprobs are asked; got 1"),
    (dict(state=torch.zeros(9, 8)), "verify_tree_combine: state must be int64"),
])
def test_bad_arguments_raise_in_words(over, message):
    with pytest.raises(RuntimeError, match=message):
        _ops.get("verify_tree_combine")(*arguments(**over))


def test_words_without_a_token_emit_nothing():
    args = arguments()
    _ops.get("verify_tree_combine")(*args)  # all keys zero: every row is empty
    names = [a.name for a in _ops.get("verify_tree_combine")._schema.arguments]
    out = dict(zip(names, args))
    assert (out["num_tokens_out"] == 0).all() and (out["out_tokens"] == -1).all()


def test_opcheck():
    torch.library.opcheck(_ops.get("verify_tree_combine"), arguments())
