#!/usr/bin/env bash
# sanitize_gpu.sh [SECONDS [PYTHON]]: tests/sanitizer_cases.py under memcheck, racecheck, initcheck and synccheck at once, on the visible
# GPU; a built tree, about two minutes. Exit status 1 if a tool reported something or a case failed.
# (initcheck leaves copies alone: torch may copy what nobody has written.)
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-30} python=${2:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_WAIT_POLICY=PASSIVE
logs=$(mktemp -d)
declare -A pids
for tool in memcheck racecheck initcheck synccheck; do
  more=(); [ "$tool" = initcheck ] && more=(--check-api-memory-access no)
  compute-sanitizer --tool "$tool" --error-exitcode 9 ${more[@]+"${more[@]}"} "$python" tests/sanitizer_cases.py "$seconds" > "$logs/$tool" 2>&1 &
  pids[$tool]=$!
done
status=0
for tool in "${!pids[@]}"; do
  wait "${pids[$tool]}"; code=$?
  [ "$code" -eq 0 ] || status=1
  echo "$tool: exit $code; $(grep -E 'random cases|SUMMARY' "$logs/$tool" | tr '\n' ' ')"
  [ "$code" -eq 0 ] || grep -vE '^(OK|SKIP)' "$logs/$tool" | head -n 40
done
exit "$status"
