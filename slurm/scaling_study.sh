#!/usr/bin/env bash
# Short DAPO runs of Qwen2.5 from 1.5B to 32B on the same 4 nodes of 8 H100, a layout for each: how fast is a step?
#
#     sbatch slurm/scaling_study.sh               # all cases; from the repository, docs/slurm.md has the rest
#     sbatch --array=2 slurm/scaling_study.sh     # the third
#     CASES="7B:2:1 7B:4:1 7B:1:4" sbatch --array=0-2 slurm/scaling_study.sh
#     SMOKE=1 sbatch --array=0-1 slurm/scaling_study.sh
#
# Each case has its run folder; metrics.jsonl there has rollout_seconds, train_seconds, tokens_per_second and memory_gib
# of every step. Leave out the first two steps: kernels are compiled and caches grow in them.
#
# Not yet run on a GPU cluster.
#SBATCH --job-name=scaling_study --array=0-4
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 --exclusive
#SBATCH --time=04:00:00 --signal=B:USR1@900 --requeue
#SBATCH --output=%x-%A_%a.out --open-mode=append
set -euo pipefail
cd -- "${SLURM_SUBMIT_DIR:-$(dirname -- "$0")/..}"

# What you change; each can be set when the job is submitted, and so can those of slurm/job.sh.
: "${CASES:=1.5B:1:1 3B:2:1 7B:4:1 14B:8:1 32B:8:2}" # SIZE:TP:PP, one for each index of --array
: "${RUNS:=runs/scaling}"                   # folder of the cases' run folders
: "${MODELS:=models}"                       # folder of Qwen2.5-1.5B, Qwen2.5-3B, ...

read -ra cases <<<"$CASES"
index=${SLURM_ARRAY_TASK_ID:-0}
if ((index >= ${#cases[@]})); then
  echo "error: --array has $index, allowed: 0 to $((${#cases[@]} - 1)), one for each of CASES '$CASES'" >&2
  exit 2
fi
IFS=: read -r size tp pp <<<"${cases[index]}"
: "${RUN:=$RUNS/${index}_${size}_tp${tp}_pp${pp}}"
if [ "${SMOKE:-0}" = 1 ]; then source slurm/smoke.sh; fi

: "${MODEL:=$MODELS/Qwen2.5-$size}"
: "${TP:=$tp}" "${PP:=$pp}"
: "${PROMPTS:=data/dapo-math-17k.parquet}"
: "${REWARD:=slurm/dapo_reward.py:score}"
: "${DTYPE:=bf16}"
: "${NUM_STEPS:=8}" "${SAVE_EVERY:=4}"
: "${MAX_PROMPT_TOKENS:=1024}" "${MAX_NEW_TOKENS:=4096}"
: "${MAX_TOKENS_PER_PACK:=16384}"
: "${PROMPTS_PER_STEP:=128}" "${GROUP_SIZE:=16}" "${NUM_MINI_BATCHES:=4}"
: "${OVERLONG_CACHE_TOKENS:=1024}"
: "${LR:=1e-6}"
: "${TIMEOUT_SECONDS:=3000}"                # longest wait of a collective: the slowest rank's rollout
: "${MAX_RESTARTS:=3}"

source slurm/job.sh
if [ "${SMOKE:-0}" = 1 ] && [ -n "${SLURM_JOB_ID:-}" ]; then make_smoke_files; fi

run_job examples/train_dapo.py \
  --model "$MODEL" --prompts "$PROMPTS" --reward "$REWARD" --dtype "$DTYPE" --no-require-finished \
  --prompts-per-step "$PROMPTS_PER_STEP" --group-size "$GROUP_SIZE" --num-mini-batches "$NUM_MINI_BATCHES" \
  --max-prompt-tokens "$MAX_PROMPT_TOKENS" --max-new-tokens "$MAX_NEW_TOKENS" \
  --max-tokens-per-pack "$MAX_TOKENS_PER_PACK" --overlong-cache-tokens "$OVERLONG_CACHE_TOKENS" \
  --lr "$LR" --num-steps "$NUM_STEPS" --save-every "$SAVE_EVERY" --timeout-seconds "$TIMEOUT_SECONDS"
