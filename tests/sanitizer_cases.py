"""A covering set of calls for compute-sanitizer: every op that has a CUDA kernel against its oracle, then random cases for some seconds.

    compute-sanitizer --tool memcheck python tests/sanitizer_cases.py [SECONDS]      # tests/sanitize_gpu.sh runs all four tools
"""

import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import random_cases  # noqa: E402

from fastverify import _ops  # noqa: E402
from fastverify.cli import check_cases  # noqa: E402
from fastverify.cli.check import check_op  # noqa: E402

RANDOM = ("verify_tree", "tree_attention", "mla_tree_attention", "partials")
random_cases.ENTRIES = 300_000  # a tool makes each call some hundred times slower


def main() -> int:
    bad = cases = 0
    for op in sorted(_ops._NAMES):
        state, detail = check_op(check_cases, op, "cuda", 0)
        print(state, op, detail, flush=True)
        bad += state == "FAIL"
    end, seed = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 30), 31
    while time.monotonic() < end:
        for name in RANDOM:
            _, wrong = random_cases.one(name, seed)
            cases += 1
            bad += bool(wrong)
            if wrong:
                print(f"{name}: seed {seed} fails: {wrong[:4]}", flush=True)
        seed += 1
    print(f"{cases} random cases, {bad} failing")
    return int(bad != 0)


if __name__ == "__main__":
    sys.exit(main())
