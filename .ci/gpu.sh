#!/usr/bin/env bash
# gpu.sh PYTHON [--quick]: on a GPU machine, build for the card present, run every test that touches it, then the benchmarks
# of every op and of the step, and make the tables of README and docs anew. Ends with the seconds of each part.
# --quick: two shapes per op, results into build/bench-quick, no tables.
# Needs no network: the given Python must hold a CUDA build of torch, and what the build, the package and its tests import.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
quick=${2:-}
case $quick in "" | --quick) ;; *) echo "gpu: the option must be --quick; got $quick. Fix: leave it out"; exit 2 ;; esac
"$python" - <<'PY'
import importlib.util
import re
import sys
sys.path.insert(0, ".ci")
from requirements import project
try:
    import torch
    found = torch.cuda.device_count()
except ImportError:
    sys.exit(f"gpu: torch must be importable by {sys.executable}; it is not. Fix: make gpu PYTHON=... or pip install torch")
needed = [re.split(r"\W", text)[0] for text in project["dependencies"]] + ["cmake", "pybind11", "pytest", "hypothesis"]
absent = [name for name in needed if importlib.util.find_spec(name) is None]
if absent:
    sys.exit(f"gpu: {sys.executable} must have every package that the tests import; got none of {', '.join(absent)}. Fix: pip install {' '.join(absent)}")
if not found:
    sys.exit(f"gpu: torch must see a CUDA GPU; torch {torch.__version__} sees none. Fix: use a GPU machine; make test needs none")
for i in range(found):
    p = torch.cuda.get_device_properties(i)
    print(f"gpu: cuda:{i} {p.name} sm_{p.major}{p.minor} {p.total_memory / 2**30:.0f} GiB, torch {torch.__version__}")
PY
start=$SECONDS
"$python" setup.py -q build_ext --inplace
build=$((SECONDS - start)) start=$SECONDS
# the tests wait for the CPU more than for the GPU; a process takes 0.5 GiB of it, a few tests take 8
parallel=$("$python" -c 'import os, torch, xdist
cores, memory = len(os.sched_getaffinity(0)), torch.cuda.get_device_properties(0).total_memory >> 30
print("-n", max(1, min(cores, memory // 4, 24)), "--maxschedchunk 1")' 2>/dev/null || true)
# processes that wait for one another on the GPU have deadlines of seconds: they come after the crowd
# and what compares times comes last, alone
timed=(tests/benchmarks/test_harness.py)
ranks=(tests/comm/test_comm_gpu.py tests/comm/test_environments.py tests/comm/test_real_ranks.py tests/comm/test_nccl.py)
status=0  # the benchmarks are worth having even if a test fails
run_tests() {
	# shellcheck disable=SC2086
	"$python" -m pytest "$@" -q -k "cuda or gpu or triton" ${PYTEST_ARGS:-} || [ $? -eq 5 ] || status=1  # 5: PYTEST_ARGS has left none
}
# shellcheck disable=SC2086
run_tests tests "${ranks[@]/#/--ignore=}" "${timed[@]/#/--ignore=}" $parallel
# shellcheck disable=SC2086
run_tests "${ranks[@]}" ${parallel:+-n 4}
run_tests "${timed[@]}"
tests=$((SECONDS - start)) start=$SECONDS
out=benchmarks/results
[ -n "$quick" ] && out=build/bench-quick
mkdir -p "$out"
# shellcheck disable=SC2086
"$python" -m fastverify bench run $quick --out "$out" || status=1
[ -n "$quick" ] || "$python" benchmarks/readme.py
echo "gpu: build $build s, tests $tests s, benchmarks $((SECONDS - start)) s; results in $out"
exit $status
