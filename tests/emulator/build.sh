#!/usr/bin/env bash
# Builds build/emulator/fastverify_emulated.so: every CUDA source of CMakeLists.txt compiled for the emulator.
# Usage: build.sh [python with torch]. Needs g++ and the CUDA headers (no GPU, no nvcc run). Only sources that changed are compiled again.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=build/emulator
python=${1:-python}
mkdir -p "$out"
echo > build/emulator/empty.cu
dryrun=$(nvcc --dryrun build/emulator/empty.cu 2>&1)
cuda_include=$(sed -n 's/^#$ INCLUDES="-I\([^"]*\)".*/\1/p' <<<"$dryrun")
cuda_lib=$(find -L "$(dirname "$cuda_include")" "$cuda_include/.." -name libcudart_static.a 2>/dev/null | head -n 1)
torch=$("$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent)')
sources=$("$python" - <<'PY'
import re
text = open("CMakeLists.txt").read()
print(*re.search(r"set\(CUDA_SOURCES\n?([^)]*)\)", text).group(1).split())
PY
)
flags=(-std=c++20 -O2 -g1 -fPIC -ffp-contract=off -w -I csrc -I csrc/common -I tests/emulator -isystem "$cuda_include"
  -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" -DTORCH_TARGET_VERSION=0x020A000000000000ULL
  -DUSE_CUDA=1 -DFV_SM90A '-DFV_CUDA_ARCHS="emulated"' ${EMULATOR_FLAGS:-})
newest() { find csrc tests/emulator -name '*.h' -newer "$1" -o -name '*.cuh' -newer "$1" | head -n 1; }
pids=()
objects=()
for source in csrc/ops.cpp tests/emulator/emulator.cpp tests/emulator/selftest.cu csrc/accept/verify_args.cpp $sources; do
  object=$out/$(echo "$source" | tr / _).o
  objects+=("$object")
  if [ -f "$object" ] && [ "$object" -nt "$source" ] && [ -z "$(newest "$object")" ]; then continue; fi
  (g++ -x c++ "${flags[@]}" -include tests/emulator/emulator.h -c "$source" -o "$object.tmp" && mv "$object.tmp" "$object") &
  pids+=($!)
  if [ ${#pids[@]} -ge "${JOBS:-2}" ]; then wait "${pids[0]}"; pids=("${pids[@]:1}"); fi
done
for pid in ${pids[@]+"${pids[@]}"}; do wait "$pid"; done
g++ -shared -o "$out/fastverify_emulated.so" "${objects[@]}" -L "$torch/lib" -ltorch_cpu -Wl,-rpath,"$torch/lib" \
  -Wl,--exclude-libs,ALL "$cuda_lib" -ldl -lrt -lpthread
echo "$out/fastverify_emulated.so"
