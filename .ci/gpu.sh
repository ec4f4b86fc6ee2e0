#!/usr/bin/env bash
# gpu.sh PYTHON: on a GPU machine, build for the card present, run every test that touches it, then the benchmarks.
# Needs no network: the given Python must hold a CUDA build of torch, cmake, pytest and hypothesis.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
"$python" - <<'PY'
import sys
try:
    import torch
    found = torch.cuda.device_count()
except ImportError:
    sys.exit(f"gpu: torch must be importable by {sys.executable}; it is not. Fix: make gpu PYTHON=... or pip install torch")
if not found:
    sys.exit(f"gpu: torch must see a CUDA GPU; torch {torch.__version__} sees none. Fix: use a GPU machine; make test needs none")
for i in range(found):
    p = torch.cuda.get_device_properties(i)
    print(f"gpu: cuda:{i} {p.name} sm_{p.major}{p.minor} {p.total_memory / 2**30:.0f} GiB, torch {torch.__version__}")
PY
"$python" setup.py -q build_ext --inplace
# shellcheck disable=SC2086
"$python" -m pytest tests -k "cuda or gpu" ${PYTEST_ARGS:-}
mkdir -p benchmarks/results
shopt -s nullglob
for bench in benchmarks/bench_*.py benchmarks/*/bench_*.py; do
    echo "== $bench"
    "$python" "$bench" --out benchmarks/results
done
