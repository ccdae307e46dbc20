#!/usr/bin/env bash
# PPO (arXiv 1707.06347; critic of the policy's size, KL to the starting model in the reward) on Qwen2.5-7B, 2 nodes of
# 8 H100.
#
#     sbatch slurm/ppo_7b.sh                      # from the repository; docs/slurm.md has the rest
#     SMOKE=1 sbatch slurm/ppo_7b.sh              # a tiny model on CPU processes
#     bash slurm/ppo_7b.sh                        # prints what would run
#
# Not yet run on a GPU cluster.
#SBATCH --job-name=ppo_7b --dependency=singleton
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 --exclusive
#SBATCH --time=24:00:00 --signal=B:USR1@900 --requeue
#SBATCH --output=%x-%j.out --open-mode=append
set -euo pipefail
cd -- "${SLURM_SUBMIT_DIR:-$(dirname -- "$0")/..}"
if [ "${SMOKE:-0}" = 1 ]; then source slurm/smoke.sh; fi

# What you change; each can be set when the job is submitted, and so can those of slurm/job.sh.
: "${RUN:=runs/ppo_7b}"                     # run folder; a job with the same one goes on with that run
: "${MODEL:=models/Qwen2.5-7B}"             # HF folder
: "${CRITIC_MODEL:=}"                       # HF folder to start the critic from; empty: the policy's
: "${REWARD_MODEL:=}"                       # HF folder of a trained reward model; empty: the rule alone
: "${PROMPTS:=data/dapo-math-17k.parquet}"  # JSONL or parquet
: "${EVAL_PROMPTS:=}" "${EVAL_EVERY:=10}" "${EVAL_MAX_PROMPTS:=512}" # held-out prompts; empty: no evaluation
: "${REWARD:=slurm/dapo_reward.py:score}"   # +1 or -1 by the answer after "Answer:"
: "${TP:=4}" "${PP:=1}"                     # 16 GPUs: 4 copies of policy, critic and reference
: "${DTYPE:=bf16}"
: "${NUM_STEPS:=300}" "${SAVE_EVERY:=10}"
: "${MAX_PROMPT_TOKENS:=1024}" "${MAX_NEW_TOKENS:=8192}"
: "${MAX_TOKENS_PER_PACK:=16384}"
: "${PROMPTS_PER_STEP:=1024}" "${NUM_MINI_BATCHES:=4}"
: "${GAMMA:=1.0}" "${LAMBDA:=1.0}"          # rewards come at the end of long responses only: no bootstrapping
: "${KL_COEFFICIENT:=0.001}"
: "${LR:=1e-6}" "${LR_WARMUP_STEPS:=40}"    # optimizer steps
: "${CRITIC_LR:=1e-5}" "${CRITIC_WARMUP_STEPS:=10}" # steps that train the critic alone
: "${TIMEOUT_SECONDS:=3000}"                # longest wait of a collective: the slowest rank's rollout

source slurm/job.sh
if [ "${SMOKE:-0}" = 1 ] && [ -n "${SLURM_JOB_ID:-}" ]; then make_smoke_files; fi

FLAGS=(
  --model "$MODEL" --prompts "$PROMPTS" --reward "$REWARD" --dtype "$DTYPE" --no-require-finished
  --prompts-per-step "$PROMPTS_PER_STEP" --num-mini-batches "$NUM_MINI_BATCHES"
  --max-prompt-tokens "$MAX_PROMPT_TOKENS" --max-new-tokens "$MAX_NEW_TOKENS"
  --max-tokens-per-pack "$MAX_TOKENS_PER_PACK"
  --gamma "$GAMMA" --lam "$LAMBDA" --clip 0.2 --value-clip 0.2 --kl-coefficient "$KL_COEFFICIENT"
  --critic-lr "$CRITIC_LR" --critic-warmup-steps "$CRITIC_WARMUP_STEPS"
  --lr "$LR" --lr-warmup-steps "$LR_WARMUP_STEPS" --weight-decay 0.1 --clip-grad 1.0
  --num-steps "$NUM_STEPS" --save-every "$SAVE_EVERY" --timeout-seconds "$TIMEOUT_SECONDS"
)
if [ -n "$CRITIC_MODEL" ]; then FLAGS+=(--critic-model "$CRITIC_MODEL"); fi
if [ -n "$REWARD_MODEL" ]; then FLAGS+=(--reward-model "$REWARD_MODEL"); fi
if [ -n "$EVAL_PROMPTS" ]; then
  FLAGS+=(--eval-prompts "$EVAL_PROMPTS" --eval-every "$EVAL_EVERY" --eval-max-prompts "$EVAL_MAX_PROMPTS")
fi
run_job examples/train_ppo.py "${FLAGS[@]}"
