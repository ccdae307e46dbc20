# SMOKE=1: a tiny model, warmed up on the demo's task, in place of the real one; sourced after ARGS is set. Whatever
# flags ARGS has stay, but for those that say how large everything is: of two the later one counts.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
SMOKE_FILES=$RUN/smoke
if [[ ! -f $SMOKE_FILES/sft/hf/config.json ]]; then
    (
        cd "${MEGARL_ROOT:-$SLURM_SUBMIT_DIR}"
        export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
        unset SLURM_PROCID SLURM_NTASKS
        rm -rf "$SMOKE_FILES"
        python=${PYTHON:-python}
        $python examples/make_tiny_qwen.py --out "$SMOKE_FILES/tiny"
        $python examples/make_sort_data.py --out "$SMOKE_FILES/data" --num-train 1024 --num-demonstrations 4096
        $python examples/train_sft.py --model "$SMOKE_FILES/tiny" --output "$SMOKE_FILES/sft" --lr 3e-3 --save-every 0 \
            --demonstrations "$SMOKE_FILES/data/demonstrations.jsonl" --num-steps 120 --batch-size 64 --lr-warmup-steps 20
    )
fi
ARGS+=(
    --model "$SMOKE_FILES/sft/hf" --prompts "$SMOKE_FILES/data/train.jsonl" --reward exact_match --dtype fp32
    --prompts-per-step 8 --group-size 4 --num-mini-batches 2 --max-prompt-tokens 40 --max-new-tokens 8
    --max-tokens-per-pack 512 --lr 1e-4 --lr-warmup-steps 0 --num-steps "${SMOKE_STEPS:-20}" --save-every 2
)
case $EXAMPLE in
    train_dapo.py) ARGS+=(--overlong-cache-tokens 2) ;;
    train_ppo.py) ARGS+=(--group-size 1) ;;
esac
