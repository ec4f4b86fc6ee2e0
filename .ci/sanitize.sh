#!/usr/bin/env bash
# sanitize.sh PYTHON: ASan + UBSan build of csrc/algo and the CPU ops, and their tests under it. Reads PYTEST_ARGS.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "$1")
work=$PWD/build/sanitize
rm -rf "$work/lib"
FASTVERIFY_SANITIZE=1 FASTVERIFY_NO_CUDA=1 \
    "$python" setup.py -q build --build-lib "$work/lib" --build-temp "$work/tmp"
for library in "$work"/lib/fastverify/*.so; do
    nm -D "$library" | grep __asan_report >/dev/null || { echo "sanitize: $library is not instrumented"; exit 1; }
done

# libstdc++ comes along because ASan must find __cxa_throw when Python starts. Python itself never frees everything
# (detect_leaks=0), and torch's OpenMP threads live to the end.
cxx=${CXX:-c++}
export FV_PRELOAD="$($cxx -print-file-name=libasan.so) $($cxx -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS=detect_leaks=0:strict_init_order=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONPATH=$work/lib OMP_NUM_THREADS=2
(cd "$work" && "$python" -c 'import os, fastverify as f; assert f.__file__.startswith(os.environ["PYTHONPATH"]), f.__file__')
folders=()
for stage in tree attention accept kv comm; do
    [ -d "tests/$stage" ] && folders+=("tests/$stage")
done
# --capture=sys leaves file descriptor 2, where the sanitizers report, alone.
# shellcheck disable=SC2086
exec bash .ci/run_tests.sh "$python" . "$work/run" tests/test_probe.py "${folders[@]}" --capture=sys -m "not slow" ${PYTEST_ARGS:-}
