#!/usr/bin/env bash
# Every measurement on one Hopper GPU, in parts of at most ten minutes: bash benchmarks/one_gpu.sh speed|rollouts|memory
# Results and logs lie under $OUT. What is timed has the GPU to itself; a step that fails or is cut off leaves the others theirs.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
out=${OUT:?set OUT to a directory for the results}
limit=${LIMIT_S:-570} # seconds for the part
python=${PYTHON:-python3}
export PYTHONPATH=$PWD:$PWD/patches:${PYTHONPATH:-} PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
mkdir -p "$out"

step() { # name, most seconds, command: its last lines are shown
    local name=$1 most=$2 left=$((limit - SECONDS)) code=0
    shift 2
    if ((left < 20)); then
        echo "== $name: no time was left"
        return
    fi
    local began=$SECONDS
    timeout -k 10 "$((most < left ? most : left))" "$@" >"$out/$name.log" 2>&1 || code=$?
    echo "== $name: exit $code, $((SECONDS - began)) s"
    tail -n "${SHOW:-12}" "$out/$name.log" | cut -c1-400
}

case ${1:-} in
speed) # the layer, log-probs, a cut of Flash, the kernels' property tests, FlexAttention
    step layer 110 "$python" benchmarks/layer.py --budget-s 80 --out "$out/layer_h200.json"
    step train 210 "$python" -m moe_rl.cli bench train dsv4-flash --hw h200 --layers 4 --experts 64 --profile \
        --by-length 512 --by-length 2048 --by-length 8192 --by-length 16384 --out "$out/bench_train_h200.json" \
        engine.recompute=off engine.max_tokens_per_micro_batch=8192 optimizer.offload_fraction=0
    step flex 60 "$python" benchmarks/attention.py --only flex --out "$out/flex_h200.json"
    step kernels 200 "$python" -m pytest -q -m gpu -n 6 --no-header -p no:cacheprovider tests/test_kernels_gpu.py
    ;;
rollouts) # GRPO with vLLM on the trainer's GPU; what the update leaves in vLLM; ablation
    step grpo "$limit" "$python" benchmarks/vllm_grpo.py --budget-s "$((limit - 10))" --work "${WORK:-$(mktemp -d)}" --out "$out"
    ;;
memory) # weight update by part, the planner against measured peaks, optimizers, the other GPU tests
    step sync 90 "$python" -m moe_rl.cli bench sync dsv4-pro --hw h200 --layers 5 --experts 64 --out "$out/bench_sync_h200.json"
    step tests 140 "$python" -m pytest -q -m gpu -n 5 --no-header -p no:cacheprovider tests/test_gpu.py \
        tests/test_gpu_patches.py tests/test_codec_gpu.py tests/test_qwen_gpu.py
    step optimizers 190 "$python" benchmarks/optimizers.py --phases curves timed --resume same_layout --budget-s 180 \
        --cases fp32-states aware-offload-half aware-offload --out "$out/optimizers_h200.json"
    step planner 180 "$python" benchmarks/planner_memory.py --size half --parallel 6 --budget-s 160 \
        --out "$out/planner_memory_h200.json"
    ;;
*)
    echo "usage: OUT=DIR bash benchmarks/one_gpu.sh speed|rollouts|memory" >&2
    exit 2
    ;;
esac
