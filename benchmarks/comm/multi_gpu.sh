#!/usr/bin/env bash
# multi_gpu.sh [--quick] [options of multi_gpu.py]: on a host with two or more GPUs, build, test and measure the communicators in
# under 9 minutes (--quick: about 3), largest world first, one JSON per world in benchmarks/results (--out DIR).
# PYTHON: an interpreter with a CUDA build of torch, pybind11, cmake, ninja, pytest (default python3); with pytest-xdist the tests
# share the time. SKIP_BUILD=1 (a built tree), SKIP_TESTS=1, SKIP_MEASURING=1; --sections takes parts of the measuring, --seconds limits it.
# Peers: FlashInfer's
# headers (or --peers-lib), sglang-kernel (or SGL_KERNEL_LIBRARY), a demo model (fastverify fetch-demo, or FASTVERIFY_DEMO_TARGET).
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
start=$SECONDS
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 2
if [ "$gpus" -lt 2 ]; then echo "multi_gpu: at least 2 GPUs are needed; this machine shows $gpus." >&2; exit 2; fi
quick=0
for a in "$@"; do [ "$a" = --quick ] && quick=1; done
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_WAIT_POLICY=PASSIVE NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
if [ -z "${SKIP_BUILD:-}" ]; then  # for the GPUs present only
  "$python" setup.py -q build_ext --inplace || exit 1
  echo "build: $((SECONDS - start)) s"
fi
status=0
if [ -z "${SKIP_TESTS:-}" ]; then
  tests=(tests/comm/test_nccl.py tests/comm/test_comm_gpu.py tests/comm/test_real_ranks.py tests/comm/test_environments.py)
  side=()
  if "$python" -c 'import xdist' 2> /dev/null; then side=(-n 6); fi
  timeout $((quick ? 90 : 170)) "$python" -m pytest "${tests[@]}" ${side[@]+"${side[@]}"} -q -p no:cacheprovider || status=1
  echo "tests: exit $status, $((SECONDS - start)) s"
fi
left=$(((quick ? 175 : 500) - (SECONDS - start)))
[ "$left" -gt 30 ] || left=30
if [ -z "${SKIP_MEASURING:-}" ]; then
  timeout -k 5 540 "$python" benchmarks/comm/multi_gpu.py --seconds "$left" "$@" || status=1
fi
echo "multi_gpu: exit $status, $((SECONDS - start)) s"
exit "$status"
