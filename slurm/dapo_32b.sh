#!/bin/bash
#SBATCH --job-name=dapo_32b
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# DAPO (arXiv 2503.14476) on Qwen2.5-32B, 16 nodes x 8 H100, all five ingredients. From the repository's folder:
#
#   sbatch slurm/dapo_32b.sh
#   MODEL=/models/Qwen2.5-32B PROMPTS=/data/dapo.parquet RUN=/scratch/dapo LAUNCHER=torchrun sbatch slurm/dapo_32b.sh
#   SMOKE=1 sbatch slurm/dapo_32b.sh          # the same script, a tiny model on the CPU: does the machinery work?
#
# Stopping, requeueing, health checks, logs: slurm/job.sh, docs/slurm.md.
set -euo pipefail

MODEL=${MODEL:-models/Qwen2.5-32B}                    # HF folder
PROMPTS=${PROMPTS:-data/dapo-math-17k.parquet}        # JSONL or parquet
EVAL_PROMPTS=${EVAL_PROMPTS:-}                        # such as AIME 2024; empty: no evaluation
REWARD=${REWARD:-examples/math_reward.py:answer_line} # 1 or -1
TP=${TP:-8}
PP=${PP:-4}                                           # 128 ranks / (8 x 4) = 4 replicas
NUM_STEPS=${NUM_STEPS:-300}
PROMPTS_PER_STEP=${PROMPTS_PER_STEP:-512}
GROUP_SIZE=${GROUP_SIZE:-16}
NUM_MINI_BATCHES=${NUM_MINI_BATCHES:-16}              # of 32 prompts, 512 responses
MAX_PROMPT_TOKENS=${MAX_PROMPT_TOKENS:-2048}
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-20480}
OVERLONG_CACHE=${OVERLONG_CACHE:-4096}                # the last tokens before MAX_NEW_TOKENS are punished softly
MAX_TOKENS_PER_PACK=${MAX_TOKENS_PER_PACK:-22528}
WARMUP=${WARMUP:-320}                                 # 20 steps of 16 optimizer steps
LR=${LR:-1e-6}
SAVE_EVERY=${SAVE_EVERY:-5}

EXAMPLE=train_dapo.py
ARGS=(
    --dtype bf16 --sequence-parallel
    --prompts-per-step "$PROMPTS_PER_STEP" --group-size "$GROUP_SIZE" --num-mini-batches "$NUM_MINI_BATCHES"
    --max-prompt-tokens "$MAX_PROMPT_TOKENS" --max-new-tokens "$MAX_NEW_TOKENS" --temperature 1.0
    --clip-low 0.2 --clip-high 0.28 --dual-clip 10                         # 1 clip-higher
    --adaptive-oversampling --max-generation-rounds 10                     # 2 dynamic sampling
    # 3 token-level loss: the recipe's own aggregation
    --overlong-cache-tokens "$OVERLONG_CACHE" --overlong-filtering         # 4, 5 overlong punishment and filtering
    --reward "$REWARD" --no-require-finished
    --lr "$LR" --lr-warmup-steps "$WARMUP" --weight-decay 0.1 --clip-grad 1.0
    --max-tokens-per-pack "$MAX_TOKENS_PER_PACK" --num-steps "$NUM_STEPS" --save-every "$SAVE_EVERY"
)

cd "${MEGARL_ROOT:-$SLURM_SUBMIT_DIR}"
if [[ ${SMOKE:-0} == 1 ]]; then
    TP=${SMOKE_TP:-2} PP=${SMOKE_PP:-1}
    RUN=${RUN:-runs/smoke_$SLURM_JOB_ID}
    source slurm/smoke.sh
else
    ARGS+=(--model "$MODEL" --prompts "$PROMPTS")
    [[ -z $EVAL_PROMPTS ]] || ARGS+=(--eval-prompts "$EVAL_PROMPTS" --eval-every 10)
fi
source slurm/job.sh
