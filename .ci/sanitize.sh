#!/usr/bin/env bash
# sanitize.sh PYTHON: ASan + UBSan build of csrc/algo and the CPU ops, and their tests under it. Reads PYTEST_ARGS.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
work=$PWD/build/sanitize
rm -rf "$work/lib"
FASTVERIFY_SANITIZE=1 FASTVERIFY_NO_CUDA=1 \
    "$python" setup.py -q build --build-lib "$work/lib" --build-temp "$work/tmp"
nm -D "$work/lib/fastverify/_C.abi3.so" | grep -q __asan_report || { echo "sanitize: _C is not instrumented"; exit 1; }

# libstdc++ comes along because ASan must find __cxa_throw when Python starts. Python itself never frees everything
# (detect_leaks=0), and torch's OpenMP threads live to the end.
cxx=${CXX:-c++}
export FV_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0:strict_init_order=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONPATH=$work/lib OMP_NUM_THREADS=2
"$python" -c 'import os, fastverify; assert fastverify.__file__.startswith(os.environ["PYTHONPATH"]), fastverify.__file__' </dev/null
# shellcheck disable=SC2086
exec bash .ci/run_tests.sh "$python" . "$work/run" tests/test_probe.py tests/tree tests/attention tests/accept tests/kv \
    tests/comm -m "not slow" ${PYTEST_ARGS:-}
