#!/usr/bin/env bash
# DAPO on Qwen2.5-32B, 16 nodes of 8 H100: the recipe of arXiv 2503.14476, where that is silent of verl's published one.
#
#     sbatch slurm/dapo_32b.sh                    # from the repository; docs/slurm.md has the rest
#     SMOKE=1 sbatch slurm/dapo_32b.sh            # a tiny model on CPU processes
#     bash slurm/dapo_32b.sh                      # prints what would run
#
# Not yet run on a GPU cluster.
#SBATCH --job-name=dapo_32b --dependency=singleton
#SBATCH --nodes=16 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 --exclusive
#SBATCH --time=24:00:00 --signal=B:USR1@900 --requeue
#SBATCH --output=%x-%j.out --open-mode=append
set -euo pipefail
cd -- "${SLURM_SUBMIT_DIR:-$(dirname -- "$0")/..}"
if [ "${SMOKE:-0}" = 1 ]; then source slurm/smoke.sh; fi

# What you change; each can be set when the job is submitted, and so can those of slurm/job.sh.
: "${RUN:=runs/dapo_32b}"                   # run folder; a job with the same one goes on with that run
: "${MODEL:=models/Qwen2.5-32B}"            # HF folder
: "${PROMPTS:=data/dapo-math-17k.parquet}"  # DAPO-Math-17k
: "${EVAL_PROMPTS:=}" "${EVAL_EVERY:=10}" "${EVAL_MAX_PROMPTS:=512}" # held-out prompts; empty: no evaluation
: "${REWARD:=slurm/dapo_reward.py:score}"   # +1 or -1 by the answer after "Answer:"
: "${TP:=8}" "${PP:=2}"                     # 128 GPUs: 8 model copies
: "${DTYPE:=bf16}"
: "${NUM_STEPS:=600}" "${SAVE_EVERY:=5}"
: "${MAX_PROMPT_TOKENS:=2048}" "${MAX_NEW_TOKENS:=20480}"
: "${MAX_TOKENS_PER_PACK:=$((MAX_PROMPT_TOKENS + MAX_NEW_TOKENS))}"
: "${PROMPTS_PER_STEP:=512}" "${GROUP_SIZE:=16}"
: "${NUM_MINI_BATCHES:=16}"                 # of 32 prompts, 512 responses
: "${LR:=1e-6}" "${LR_WARMUP_STEPS:=320}"   # 20 steps of 16 optimizer steps
: "${OVERLONG_CACHE_TOKENS:=4096}"          # soft overlong punishment of the last tokens
: "${CLIP_LOW:=0.2}" "${CLIP_HIGH:=0.28}"   # clip-higher
: "${TIMEOUT_SECONDS:=3000}"                # longest wait of a collective: the slowest rank's rollout

source slurm/job.sh
if [ "${SMOKE:-0}" = 1 ] && [ -n "${SLURM_JOB_ID:-}" ]; then make_smoke_files; fi

FLAGS=(
  --model "$MODEL" --prompts "$PROMPTS" --reward "$REWARD" --dtype "$DTYPE"
  --no-require-finished                      # a response that is cut off has no answer, which scores -1
  --prompts-per-step "$PROMPTS_PER_STEP" --group-size "$GROUP_SIZE" --num-mini-batches "$NUM_MINI_BATCHES"
  --max-prompt-tokens "$MAX_PROMPT_TOKENS" --max-new-tokens "$MAX_NEW_TOKENS"
  --max-tokens-per-pack "$MAX_TOKENS_PER_PACK"
  --clip-low "$CLIP_LOW" --clip-high "$CLIP_HIGH" --dual-clip 10
  --adaptive-oversampling --max-generation-rounds 10 # dynamic sampling
  --overlong-cache-tokens "$OVERLONG_CACHE_TOKENS" --overlong-filtering
  --lr "$LR" --lr-warmup-steps "$LR_WARMUP_STEPS" --weight-decay 0.1 --clip-grad 1.0
  --num-steps "$NUM_STEPS" --save-every "$SAVE_EVERY" --timeout-seconds "$TIMEOUT_SECONDS"
)
if [ -n "$EVAL_PROMPTS" ]; then
  FLAGS+=(--eval-prompts "$EVAL_PROMPTS" --eval-every "$EVAL_EVERY" --eval-max-prompts "$EVAL_MAX_PROMPTS")
fi
# The fifth ingredient, the token-level loss, is the recipe's own and has no flag.
run_job examples/train_dapo.py "${FLAGS[@]}"
