# Sourced by the scripts when SMOKE=1: they run on CPU processes, with a tiny model and few steps. Whatever is set in the
# environment wins.
: "${RUN:=runs/smoke_${SLURM_JOB_NAME:-preview}}"
: "${SMOKE_FILES:=runs/smoke}" # model and data, made once
: "${NODES:=$((${SLURM_NNODES:-2} < 2 ? SLURM_NNODES : 2))}" "${RANKS_PER_NODE:=2}"
: "${MODEL:=$SMOKE_FILES/sft/hf}" "${PROMPTS:=$SMOKE_FILES/data/train.jsonl}"
: "${EVAL_PROMPTS:=$SMOKE_FILES/data/heldout.jsonl}" "${EVAL_MAX_PROMPTS:=64}"
: "${REWARD:=sorted_digits}" "${DTYPE:=fp32}" "${TP:=2}" "${PP:=1}"
: "${PROMPTS_PER_STEP:=8}" "${GROUP_SIZE:=8}" "${NUM_MINI_BATCHES:=2}"
: "${MAX_PROMPT_TOKENS:=40}" "${MAX_NEW_TOKENS:=12}" "${OVERLONG_CACHE_TOKENS:=4}" "${MAX_TOKENS_PER_PACK:=1024}"
: "${NUM_STEPS:=8}" "${LR:=7e-4}" "${LR_WARMUP_STEPS:=4}" "${SAVE_EVERY:=2}"
: "${CRITIC_LR:=1e-3}" "${CRITIC_WARMUP_STEPS:=1}"
: "${HEALTH:=true}" "${WANDB:=disabled}"

# A tiny Qwen2 that half knows how to sort digits, as in examples/demo.py, and prompts.
make_smoke_files() {
  if [ -e "$SMOKE_FILES" ]; then return; fi
  local folder
  mkdir -p "$(dirname -- "$SMOKE_FILES")"
  folder=$(mktemp -d -- "$SMOKE_FILES.XXXXXX")
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  {
    "$PYTHON" examples/make_tiny_qwen.py --out "$folder/tiny"
    "$PYTHON" examples/make_sort_data.py --out "$folder/data" --num-train 2048 --num-preferences 1
    CUDA_VISIBLE_DEVICES='' "$PYTHON" examples/train_sft.py --model "$folder/tiny" --output "$folder/sft" --lr 3e-3 \
      --demonstrations "$folder/data/demonstrations.jsonl" --num-steps 150 --lr-warmup-steps 20 --weight-decay 0 \
      --adam-beta2 0.98 --save-every 0
  } >"$folder/log" 2>&1 || { cat "$folder/log" >&2 && exit 1; }
  mv -T -- "$folder" "$SMOKE_FILES" 2>/dev/null || rm -rf -- "$folder" # another job was faster
}
