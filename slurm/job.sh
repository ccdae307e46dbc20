# What every job script of this folder does after it has said what to run: sourced, not submitted.
#
#   checks the layout -> health check of the nodes -> starts the ranks -> watches them -> ends or requeues the job
#
# The script that sources it sets EXAMPLE (file of examples/) and ARGS (array of its flags), and may set any variable
# below; so may the environment of sbatch. Files: $RUN is the run folder, $LOG the log folder of this attempt.

# --- what users change ------------------------------------------------------------------------------------------------
RUN=${RUN:-runs/$SLURM_JOB_NAME}                 # run folder; the same one goes on after a requeue
TP=${TP:-1}                                      # tensor-parallel ranks
PP=${PP:-1}                                      # pipeline stages; data parallelism is what remains of the ranks
NODES=${NODES:-$SLURM_JOB_NUM_NODES}             # nodes used of those allocated
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_NTASKS_PER_NODE:-1}}
LAUNCHER=${LAUNCHER:-srun}                       # srun, torchrun or mpirun
PYTHON=${PYTHON:-python}                         # of the environment that has megarl
MPIRUN=${MPIRUN:-mpirun}                         # with its own flags, if need be
CONTAINER=${CONTAINER:-}                         # image for pyxis (srun and torchrun); empty: none
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-$PWD:$PWD}
HEALTH=${HEALTH:-}                               # command that succeeds on a good node; empty: see below
MAX_RESTARTS=${MAX_RESTARTS:-20}                 # then the job fails
HANG_SECONDS=${HANG_SECONDS:-1800}               # without a sign of life
FIRST_HANG_SECONDS=${FIRST_HANG_SECONDS:-3600}   # the same before the first one: imports, loading, compiling
POLL_SECONDS=${POLL_SECONDS:-5}                  # between two looks at the ranks
WANDB=${WANDB:-$([[ -n ${WANDB_API_KEY:-} ]] && echo online || echo offline)}
EXTRA_ARGS=${EXTRA_ARGS:-}                       # more flags, split at spaces
SMOKE=${SMOKE:-0}                                # 1: a tiny model on the CPU, on 2 nodes with 2 ranks each

# --- network of NCCL: what your cluster needs; all of it can be overridden in the environment ---------------------------
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# export NCCL_SOCKET_IFNAME=... NCCL_IB_HCA=... GLOO_SOCKET_IFNAME=...

# ------------------------------------------------------------------------------------------------------------------------
TRY=${SLURM_RESTART_COUNT:-0}
LOG=$RUN/logs/$SLURM_JOB_ID.$TRY
GPUS_PER_NODE=${SLURM_GPUS_PER_NODE:-0}
if [[ $SMOKE == 1 ]]; then
    NODES=$((NODES < 2 ? NODES : 2)) RANKS_PER_NODE=2 GPUS_PER_NODE=0 WANDB=disabled
    export CUDA_VISIBLE_DEVICES=
fi
WORLD=$((NODES * RANKS_PER_NODE))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} PYTHONFAULTHANDLER=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

say() { echo "$(date +%FT%T) [$SLURM_JOB_ID.$TRY] $*"; }
refuse() { say "error: $*"; exit 2; }

check_settings() {
    [[ $LAUNCHER =~ ^(srun|torchrun|mpirun)$ ]] || refuse "LAUNCHER: got '$LAUNCHER', allowed: srun, torchrun, mpirun"
    [[ $WANDB =~ ^(online|offline|disabled)$ ]] || refuse "WANDB: got '$WANDB', allowed: online, offline, disabled"
    local name
    for name in TP PP NODES RANKS_PER_NODE MAX_RESTARTS HANG_SECONDS FIRST_HANG_SECONDS POLL_SECONDS; do
        [[ ${!name} =~ ^[0-9]+$ ]] || refuse "$name: got '${!name}', allowed: whole numbers"
    done
    ((TP >= 1 && PP >= 1)) || refuse "TP, PP: got $TP, $PP, allowed: from 1"
    ((NODES <= SLURM_JOB_NUM_NODES)) || refuse "NODES: got $NODES, allowed: up to the $SLURM_JOB_NUM_NODES allocated"
    ((WORLD % (TP * PP) == 0)) ||
        refuse "TP x PP: got $TP x $PP, but $NODES nodes x $RANKS_PER_NODE ranks = $WORLD ranks are no multiple of it"
    if ((GPUS_PER_NODE > 0 && RANKS_PER_NODE != GPUS_PER_NODE)); then
        refuse "ranks per node: got $RANKS_PER_NODE, allowed with $GPUS_PER_NODE GPUs per node: $GPUS_PER_NODE (one each)"
    fi
    [[ -z $CONTAINER || $LAUNCHER != mpirun ]] || refuse "CONTAINER: got '$CONTAINER', allowed with mpirun: none"
    [[ -f examples/$EXAMPLE ]] || refuse "there is no $PWD/examples/$EXAMPLE: submit from the repository's folder"
}

state() { # field of the run's status, empty if there is none
    sed -n "s/^ *\"$1\": \"\{0,1\}\([^\",]*\).*/\1/p" "$RUN/status.json" 2>/dev/null
}

requeue() { # reason, nodes to exclude
    if ((TRY >= MAX_RESTARTS)); then
        say "failed: $1, and it was restarted $TRY times (MAX_RESTARTS)"
        exit 1
    fi
    say "requeued: $1"
    trap '' TERM # Slurm ends this script as soon as the job is requeued; what follows must still be done
    scontrol requeue "$SLURM_JOB_ID"
    [[ -z ${2:-} ]] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$2" || say "could not exclude $2"
    sleep 600
    exit 1
}

check_nodes() { # nodes that fail are excluded, and the job starts again on others
    local default=true bad
    ((GPUS_PER_NODE == 0)) || default="[ \$(nvidia-smi -L | wc -l) -ge $GPUS_PER_NODE ]"
    HEALTH=${HEALTH:-$default} BAD=$LOG/bad_nodes srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --ntasks="$SLURM_JOB_NUM_NODES" --kill-on-bad-exit=0 --output="$LOG/health.%n.log" \
        bash -c 'bash -c "$HEALTH" || { mkdir -p "$BAD"; touch "$BAD/$SLURMD_NODENAME"; exit 1; }' || true
    [[ -d $LOG/bad_nodes ]] || return 0
    bad=$(ls "$LOG/bad_nodes" | paste -sd,)
    requeue "nodes that are not healthy: $bad" "$bad"
}

start_ranks() { # in the background; sets RANKS to the process to wait for
    local head address port container=() program
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
    address=$(scontrol show node -o "$head" | grep -oP ' NodeAddr=\K\S+')
    port=$((20000 + (SLURM_JOB_ID + TRY * 7919) % 12000))
    [[ -z $CONTAINER ]] || container=(--container-image="$CONTAINER" --container-mounts="$CONTAINER_MOUNTS")
    program=("examples/$EXAMPLE" --output "$RUN" --resume --wandb "$WANDB" --tensor-model-parallel-size "$TP"
        --pipeline-model-parallel-size "$PP" "${ARGS[@]}" $EXTRA_ARGS)
    case $LAUNCHER in
        srun)
            MASTER_ADDR=$address srun --nodes="$NODES" --ntasks="$WORLD" --ntasks-per-node="$RANKS_PER_NODE" \
                --kill-on-bad-exit=1 \
                --output="$LOG/rank.%t.log" "${container[@]}" "$PYTHON" "${program[@]}" &
            ;;
        torchrun)
            srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
                --output="$LOG/node.%n.log" "${container[@]}" \
                bash -c 'exec "$0" -m torch.distributed.run --node-rank "$SLURM_NODEID" "$@"' "$PYTHON" \
                --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --master-addr "$address" --master-port "$port" \
                --redirects 3 --log-dir "$LOG" "${program[@]}" &
            ;;
        mpirun)
            $MPIRUN -n "$WORLD" -ppn "$RANKS_PER_NODE" "$PYTHON" "${program[@]}" >"$LOG/mpirun.log" 2>&1 &
            ;;
    esac
    RANKS=$!
}

hangs() { # whether the last sign of life is too old
    local now beat
    now=$(date +%s) beat=$(stat -c %Y "$RUN/heartbeat" 2>/dev/null || echo 0)
    if ((beat < STARTED)); then ((now - STARTED > FIRST_HANG_SECONDS)); else ((now - beat > HANG_SECONDS)); fi
}

end_hanging_ranks() {
    say "no sign of life: the stacks of all ranks go to $RUN/logs/rank_*.log"
    scancel --signal=USR2 "$SLURM_JOB_ID"
    [[ $LAUNCHER != mpirun ]] || pkill -USR2 -P "$RANKS" || true
    sleep 3
    scancel --signal=KILL "$SLURM_JOB_ID"
    kill -9 "$RANKS" 2>/dev/null || true
    requeue "it hung"
}

watch_ranks() { # until they end; sets CODE
    trap 'ASKED=1; say "asked to stop: the run is saved first"; touch "$RUN/stop"' USR1
    while kill -0 "$RANKS" 2>/dev/null; do
        sleep "$POLL_SECONDS" &
        wait $! || true # a trap ends the wait
        ! hangs || end_hanging_ranks
    done
    CODE=0
    wait "$RANKS" || CODE=$?
}

judge() { # what the run's own files say counts more than the launcher's exit status
    local now before
    say "ranks ended with status $CODE; the run is $(state state), step $(state step) of $(state num_steps)"
    if ((CODE == 0)) && [[ $(state state) == done ]]; then exit 0; fi
    if ((CODE == 0)) && [[ $(state state) == stopped ]]; then
        [[ ${ASKED:-0} == 0 ]] || requeue "stopped with its state saved"
        say "stopped by hand; submit again to go on"
        exit 0
    fi
    if grep -lq '^error: ' -r "$LOG"; then
        say "failed: wrong settings, see $(grep -l '^error: ' -r "$LOG" | head -n1)"
        exit 2
    fi
    now="$(state step) $(cat "$RUN/checkpoints/latest" 2>/dev/null || true)"
    before=$(cat "$RUN/.crashed_at" 2>/dev/null || true)
    if [[ $now == "$before" ]]; then
        say "failed: it crashed twice in a row without coming further, see $LOG and $RUN/logs"
        exit 1
    fi
    echo "$now" >"$RUN/.crashed_at"
    requeue "it crashed: $(state reason)"
}

mkdir -p "$LOG"
say "$SLURM_JOB_NODELIST: $NODES nodes x $RANKS_PER_NODE ranks, TP $TP x PP $PP, $LAUNCHER; logs in $LOG"
check_settings
check_nodes
rm -f "$RUN/stop"
STARTED=$(date +%s)
start_ranks
watch_ranks
judge
