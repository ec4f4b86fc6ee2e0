#!/usr/bin/env bash
# one_gpu.sh OUT [STEP...]: what the documentation says of one GPU beside `make gpu`, each step with a limit and a log in OUT; without STEP all
# of them, about 20 minutes. A built tree (python setup.py -q build_ext --inplace). The visible GPU; nothing else should run on it.
# PYTHON (python3); FASTVERIFY_DEMO_TARGET or `fastverify fetch-demo`: the steps of the loop and of real logits need it, and PROMPTS, a JSON
# file {"set": [[token ids], ...]}. Peers where they are: EAGLE (a checkout of SafeAILab/EAGLE), sglang-kernel or SGL_KERNEL_LIBRARY,
# FlashInfer, FASTVERIFY_NCCL_LIB (NCCL >= 2.30, for two ranks on one GPU).
set -uo pipefail
if [ $# -lt 1 ]; then echo "one_gpu: OUT must be given. Fix: benchmarks/one_gpu.sh OUT [STEP...]" >&2; exit 2; fi
mkdir -p "$1" && out=$(cd "$1" && pwd) && shift || exit 2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1
model=${FASTVERIFY_DEMO_TARGET:-$("$python" -c 'from fastverify.models.demo import demo_target_path as p; print(p() or "")')}
draft=fastverify/data/smollm2-135m-instruct-eagle3
wanted=" $* " status=0
step() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  [ "$wanted" = "  " ] || [[ $wanted == *" $name "* ]] || return 0
  timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
  local code=$?
  [ "$code" -eq 0 ] || status=1
  echo "$(date +%T) $name: exit $code, $((SECONDS - start)) s"
}
absent() { [ "$wanted" = "  " ] || [[ $wanted == *" $1 "* ]] || return 0; echo "$1: not run: $2"; }
b=benchmarks
step verify_tree 150 "$python" $b/accept/bench_verify_tree.py --out "$out"
step lm_head 80 "$python" $b/accept/bench_lm_head_verify_tree.py --out "$out"
step attention 300 "$python" $b/attention/bench_tree_attention.py --out "$out"
step fp8_cache 60 "$python" $b/attention/bench_tree_attention.py --fp8 --only cuda --shapes 8,16,8192 8,4,8192 --out "$out"
step mla 200 "$python" $b/attention/bench_mla_tree_attention.py --out "$out"
step sm_120 100 env FASTVERIFY_PROFILE=sm_120 bash -c "'$python' $b/attention/bench_tree_attention.py --only cuda --out '$out' &&
  '$python' $b/attention/bench_mla_tree_attention.py --only cuda --out '$out'"
step random 400 "$python" tests/random_cases.py verify_tree,partials,tree_attention,mla_tree_attention,exact --seconds 60
step random_sm_120 300 env FASTVERIFY_PROFILE=sm_120 "$python" tests/random_cases.py verify_tree,tree_attention,mla_tree_attention --seconds 40
step sanitizers 300 bash tests/sanitize_gpu.sh 30 "$python"
step virtual_ranks 120 "$python" $b/comm/virtual_checks.py --json "$out/virtual.json"
step comm_soak 150 "$python" $b/comm/soak_virtual.py 1010000 3 120
step llama_8b 200 "$python" $b/loop/bench_loop.py --dummy llama-3-8b --tree off,tree-16 --length 2048,16384 --profile
step llama_8b_batches 120 "$python" $b/loop/bench_loop.py --dummy llama-3-8b --tree tree-16 --length 2048 --requests 8,32
step smollm2_cycle 80 "$python" $b/loop/bench_loop.py --dummy smollm2-135m --tree off,chain-3,tree-20 --profile
step controller 150 "$python" $b/loop/bench_controller.py --tokens 500 --runs 3 --json "$out/controller.json"
if [ -n "$model" ] && [ -n "${PROMPTS:-}" ]; then
  peers=eager,static; [ -z "${EAGLE:-}" ] || peers+=,safeailab
  step loop_speed 300 "$python" $b/loop/bench_smollm2.py --target "$model" --prompts "$PROMPTS" --limit 1 --part speed --tree off,chain-3,tree-8,tree-20,auto \
    --peers $peers --peer-prompts 2 ${EAGLE:+--eagle "$EAGLE"} --json "$out/smollm2-loop.json"
  step loop_texts 200 "$python" $b/loop/bench_smollm2.py --target "$model" --prompts "$PROMPTS" --limit 2 --part equal,exact --tree chain-3,tree-8 --json "$out/smollm2-exact.json"
  step loop_soak 500 "$python" $b/loop/bench_soak.py --exact --requests 2000 --in-turn 8 --stop-ids 2,284 --prompts "$PROMPTS" --alone 2000 --target "$model" --draft $draft
else
  for name in loop_speed loop_texts loop_soak; do absent $name "no demo model or no PROMPTS"; done
fi
if [ -n "$model" ]; then
  step real_logits 200 bash -c "'$python' $b/accept/save_logits.py '$out/logits.xz' --target '$model' && '$python' $b/accept/bench_verify_tree.py --logits '$out/logits.xz' --out '$out'"
  step gpu_against_cpu 300 "$python" tests/attention/smollm2_tokens.py --target "$model" --draft $draft
else
  for name in real_logits gpu_against_cpu; do absent $name "no demo model"; done
fi
# Two ranks on this GPU. Without MPS they would take turns of milliseconds.
if command -v nvidia-cuda-mps-control > /dev/null; then
  step raw_exchange 90 bash -c "nvcc -O3 -arch=native -o '$out/raw_exchange' $b/comm/raw_exchange.cu && '$out/raw_exchange'"
  step overlap 130 "$python" $b/comm/multi_gpu.py --world 2 --sections one-card:host --linear-rows 256,1024,64,16 --inner 18432 --repeats 6 --seconds 110 --section-seconds 110 --out "$out"
  pipe=$(mktemp -d)
  visible=${CUDA_VISIBLE_DEVICES:-}
  env -u CUDA_VISIBLE_DEVICES CUDA_MPS_PIPE_DIRECTORY="$pipe" CUDA_MPS_LOG_DIRECTORY="$pipe" nvidia-cuda-mps-control -d
  export CUDA_MPS_PIPE_DIRECTORY=$pipe CUDA_MPS_LOG_DIRECTORY=$pipe CUDA_VISIBLE_DEVICES=${visible:-0}
  step one_card 120 "$python" $b/comm/bench_all_reduce.py --world 2 --same-gpu --out "$out"
  step lost_peers 90 "$python" -m pytest tests/comm/test_comm_gpu.py -k lost_peer -q -p no:cacheprovider
  if [ -n "${FASTVERIFY_NCCL_LIB:-}" ]; then step nccl_one_card 120 env NCCL_MULTI_RANK_GPU_ENABLE=1 "$python" tests/comm/nccl_one_card.py
  else absent nccl_one_card "no FASTVERIFY_NCCL_LIB"; fi
  echo quit | nvidia-cuda-mps-control > /dev/null
else
  for name in raw_exchange overlap one_card lost_peers nccl_one_card; do absent $name "no nvidia-cuda-mps-control"; done
fi
exit "$status"
