#!/usr/bin/env bash
# test.sh: sdist -> wheel (once) -> fresh venv -> pytest on the installed wheel. Reads PYTHON, TORCH, TRITON, NCCL,
# PYTEST_ARGS.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/test
rm -rf "$work"
mkdir -p "$work/source"
start=$SECONDS
"${PYTHON:-python3}" -m venv "$work/venv"
python=$work/venv/bin/python
bash .ci/install_torch.sh "$python" "${TORCH:-}"
"$python" -m pip --disable-pip-version-check install -q 'setuptools>=77' cmake ninja pybind11
echo "environment: $((SECONDS - start)) s"

start=$SECONDS
"$python" setup.py -q sdist -d "$work" 2>"$work/sdist.log" || { cat "$work/sdist.log"; exit 1; }
tar xzf "$work"/fastverify-*.tar.gz -C "$work/source" --strip-components 1
(cd "$work/source" && "$python" -m pip --disable-pip-version-check wheel -v --no-build-isolation --no-deps -w "$work" .)
echo "build: $((SECONDS - start)) s, $(du -h "$work"/fastverify-*.whl | cut -f1) wheel"

start=$SECONDS
"$python" -m pip --disable-pip-version-check install -q "$(echo "$work"/fastverify-*.whl)[dev]"
touch "$work"/venv/.{torch,installed,dev}  # what make looks at: `make sanitize VENV=build/test/venv` may use it
echo "install: $((SECONDS - start)) s"
"$work/venv/bin/fastverify" fetch-demo || echo "The demo model could not be fetched: the tests that need it are skipped."
if command -v nvcc >/dev/null; then
  start=$SECONDS
  (cd "$work/source" && bash tests/emulator/build.sh "$python")
  export FASTVERIFY_EMULATED=$work/source/build/emulator/fastverify_emulated.so
  echo "CUDA kernels for the emulator: $((SECONDS - start)) s"
else
  echo "No CUDA headers (nvcc): the tests of the CUDA kernels on the emulator are skipped."
fi
if [ -n "${TRITON:-}" ]; then
  "$python" -m pip --disable-pip-version-check install -q "$TRITON" || echo "pip could not install $TRITON."
fi
if "$python" -c 'import triton' 2>/dev/null; then
  start=$SECONDS
  TRITON_INTERPRET=1 bash .ci/run_tests.sh "$python" "$work/source" "$work/interpreted" tests/test_triton.py -q
  echo "Triton's kernels in its interpreter: $((SECONDS - start)) s"
else
  echo "Triton is not installed: its kernels are not run in its interpreter."
fi
if [ -n "${NCCL:-}" ]; then  # the library alone: loaded and asked, never run without a GPU
  "$python" -m pip --disable-pip-version-check install -q --no-deps "$NCCL" || echo "pip could not install $NCCL: its tests are skipped."
fi
# shellcheck disable=SC2086
exec bash .ci/run_tests.sh "$python" "$work/source" "$work/run" tests ${PYTEST_ARGS:-}
