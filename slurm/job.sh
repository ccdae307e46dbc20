# What all jobs of this folder share; docs/slurm.md describes it. A script sets variables, sources this file and calls
#
#     run_job examples/train_dapo.py FLAGS...
#
# In a batch job that checks layout and nodes, starts the ranks, watches them, and requeues the job when it was stopped,
# hangs, crashes or has a bad node. Elsewhere (`bash slurm/dapo_32b.sh`) it prints what the job would run.
#
# Every variable below can be set when a job is submitted: `LAUNCHER=torchrun RUN=runs/other sbatch slurm/dapo_32b.sh`.

: "${RUN:?the run folder; a script sets it before it sources job.sh}"
RUN=$(realpath -m -- "$RUN")

# How ranks are started: srun, torchrun (one per node, started by srun) or mpirun.
: "${LAUNCHER:=srun}"
# Python on all nodes. In a container: the container's.
if [ -n "${CONTAINER:-}" ]; then : "${PYTHON:=python}"; else : "${PYTHON:=$PWD/.venv/bin/python}"; fi
# MPICH's mpirun, and its flags where others are needed; Open MPI: MPIRUN_ARGS="--map-by ppr:8:node".
: "${MPIRUN:=$(dirname -- "$PYTHON")/mpirun}"
: "${MPIRUN_ARGS:=}"
# Further flags of every srun ("--mpi=none", "--cpu-bind=none"), and of the program ("--num-steps 10"), split at blanks.
: "${SRUN_ARGS:=}"
: "${EXTRA_ARGS:=}"

# Layout: tensor and pipeline parallel ranks; data parallel ranks follow from nodes x ranks per node.
: "${TP:=1}" "${PP:=1}"
# Nodes and ranks per node to use; empty: all of the allocation, which the script's header asks for.
: "${NODES:=}" "${RANKS_PER_NODE:=}"
# Where collectives and MPI may go wrong with names: the address of the first node is Slurm's NodeAddr, not its name.
: "${MASTER_ADDR:=}"

# A bash command that fails on a node that must not be used; each node has HEALTH_SECONDS for it.
# On GPUs: as many answer as there are ranks on the node.
: "${HEALTH:=[ \"\$(nvidia-smi --list-gpus | wc -l)\" -ge \"\$RANKS_PER_NODE\" ]}"
: "${HEALTH_SECONDS:=120}"

# A run without a heartbeat for so long hangs. The first limit covers imports, loading of the model and all else before
# the first beat; the other must be longer than anything between two beats, such as an optimizer step.
: "${FIRST_HANG_SECONDS:=3600}"
: "${HANG_SECONDS:=3600}"
# Between two looks at the run, and for ranks to write their stacks before they are killed.
: "${POLL_SECONDS:=5}"
: "${DUMP_SECONDS:=10}"

# A job is requeued so often, whatever for; and ends as failed after so many crashes or hangs in a row in which the step
# of status.json did not get beyond the highest one before.
: "${MAX_RESTARTS:=20}"
: "${MAX_FRUITLESS:=2}"

# A container image for pyxis (`srun --container-image`); empty: none. Repository and run folder are mounted, further
# mounts (models, data) are named like PATH:PATH,PATH:PATH.
: "${CONTAINER:=}"
: "${CONTAINER_MOUNTS:=}"

# Weights & Biases: online where a key is set.
if [ -n "${WANDB_API_KEY:-}" ]; then : "${WANDB:=online}"; else : "${WANDB:=offline}"; fi

# NCCL and CUDA. What is set in the environment wins; add your network's own lines here (NCCL_IB_HCA, ...).
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1} # a failed collective ends the rank
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # megatron-core's overlap of tensor parallelism
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

TRY=${SLURM_RESTART_COUNT:-0}
BAD_NODES=
STOPPING=0
HUNG=0

say() { printf '%(%F %T)T [%s.%s] %s\n' -1 "${SLURM_JOB_ID:-no job}" "$TRY" "$*"; }

refuse() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

run_job() {
  read_allocation
  check_settings
  local layout=(--tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP") extra
  if ((TP > 1)); then layout+=(--sequence-parallel); fi
  read -ra extra <<<"$EXTRA_ARGS"
  set -- "$@" --output "$RUN" --resume --wandb "$WANDB" "${layout[@]}" "${extra[@]}"
  if [ -z "${SLURM_JOB_ID:-}" ]; then
    say "$NODES nodes x $RANKS_PER_NODE ranks: TP $TP x PP $PP x DP $DP, $LAUNCHER; each rank:"
    printf '%q ' "$PYTHON" "$@"
    printf '\n'
    return
  fi
  trap 'STOPPING=1; say "USR1: stop asked"' USR1
  prepare_attempt
  check_nodes
  if ((STOPPING)); then again "stopped before its start"; fi
  launch "$@"
  watch
  finish_attempt
}

# Nodes and ranks of the allocation; outside a job those of the script's header.
read_allocation() {
  local header nodes ranks
  header=$(sed -n 's/^#SBATCH//p' "$0")
  nodes=${SLURM_NNODES:-$(grep -oP -- '--nodes=\K\d+' <<<"$header" || true)}
  ranks=${SLURM_NTASKS_PER_NODE:-$(grep -oP -- '--ntasks-per-node=\K\d+' <<<"$header" || true)}
  : "${NODES:=$nodes}" "${RANKS_PER_NODE:=$ranks}"
  if [ -n "${SLURM_JOB_ID:-}" ]; then
    ((NODES <= nodes)) || refuse "NODES is $NODES, allowed: at most $nodes, those of the allocation"
    mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n "$NODES")
  fi
}

# The one place that knows the layout.
check_settings() {
  local name
  for name in TP PP NODES RANKS_PER_NODE; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || refuse "$name is '${!name}', allowed: integers from 1"
  done
  for name in MAX_RESTARTS MAX_FRUITLESS HANG_SECONDS FIRST_HANG_SECONDS HEALTH_SECONDS DUMP_SECONDS POLL_SECONDS; do
    [[ ${!name} =~ ^[0-9]+$ ]] || refuse "$name is '${!name}', allowed: integers from 0"
  done
  WORLD=$((NODES * RANKS_PER_NODE))
  ((WORLD % (TP * PP) == 0)) || refuse "TP $TP x PP $PP = $((TP * PP)) does not divide $WORLD ranks" \
    "($NODES nodes x $RANKS_PER_NODE ranks per node); allowed: TP and PP whose product does"
  ((RANKS_PER_NODE % TP == 0)) || refuse "TP is $TP, allowed: divisors of the $RANKS_PER_NODE ranks per node" \
    "(tensor parallel ranks talk in every layer; they stay on one node)"
  DP=$((WORLD / TP / PP))
  case $LAUNCHER in
    srun | torchrun | mpirun) ;;
    *) refuse "LAUNCHER is '$LAUNCHER', allowed: srun, torchrun, mpirun" ;;
  esac
  case $WANDB in
    online | offline | disabled) ;;
    *) refuse "WANDB is '$WANDB', allowed: online, offline, disabled" ;;
  esac
  [ -z "$CONTAINER" ] || [ "$LAUNCHER" != mpirun ] ||
    refuse "LAUNCHER is mpirun, allowed with CONTAINER: srun, torchrun"
}

# Folder of logs, environment of the ranks, flags of every srun.
prepare_attempt() {
  export RANK_LOGS=$RUN/logs/$SLURM_JOB_ID.$TRY RANKS_PER_NODE SMOKE=${SMOKE:-0}
  mkdir -p "$RANK_LOGS/pids" "$RANK_LOGS/health"
  rm -f "$RUN/stop"
  FRUITLESS=$RUN/logs/$SLURM_JOB_ID.fruitless # highest step so far, attempts in a row that failed before it
  [ -e "$FRUITLESS" ] || echo "$(status_value step | grep . || echo 0) 0" >"$FRUITLESS"
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
  export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
  : "${MASTER_ADDR:=$(scontrol show node --oneliner "${HOSTS[0]}" | grep -oP ' NodeAddr=\K\S+')}"
  export MASTER_ADDR
  local extra
  read -ra extra <<<"$SRUN_ARGS"
  ON_NODES=(--nodes="$NODES" --nodelist="$(IFS=,; echo "${HOSTS[*]}")" "${extra[@]}")
  IN_CONTAINER=()
  if [ -n "$CONTAINER" ]; then
    local mounts=$PWD:$PWD,$RUN:$RUN${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    IN_CONTAINER=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$PWD")
  fi
  say "$LAUNCHER on ${HOSTS[*]}: $NODES nodes x $RANKS_PER_NODE ranks, TP $TP x PP $PP x DP $DP, first at $MASTER_ADDR"
  say "run folder $RUN, this attempt's logs $RANK_LOGS"
}

# Runs HEALTH on every node. A node is good if its answer came in time: one that can't even start a process is bad.
check_nodes() {
  local node
  timeout --kill-after=10 $((HEALTH_SECONDS + 30)) \
    srun "${ON_NODES[@]}" --ntasks="$NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 \
    --output="$RANK_LOGS/health/%N.log" \
    timeout "$HEALTH_SECONDS" bash -c "($HEALTH) && touch \"\$RANK_LOGS/health/\$SLURMD_NODENAME.good\"" || true
  for node in "${HOSTS[@]}"; do
    [ -e "$RANK_LOGS/health/$node.good" ] || BAD_NODES+=${BAD_NODES:+,}$node
  done
  [ -n "$BAD_NODES" ] || return 0
  if [ "$BAD_NODES" = "$(IFS=,; echo "${HOSTS[*]}")" ] && ((NODES > 1)); then
    give_up "HEALTH fails on every node, so it is HEALTH that is wrong; see $RANK_LOGS/health"
  fi
  again "bad nodes: $BAD_NODES; see $RANK_LOGS/health"
}

# Starts the ranks in the background; each runs in rank.sh, whose process ids and exit statuses are the same under every
# launcher.
launch() {
  local as_rank=(bash "$PWD/slurm/rank.sh" "$PYTHON" "$@") extra
  BEAT_BEFORE=$(beat)
  case $LAUNCHER in
    srun)
      srun "${ON_NODES[@]}" "${IN_CONTAINER[@]}" --ntasks="$WORLD" --ntasks-per-node="$RANKS_PER_NODE" \
        --kill-on-bad-exit=1 "${as_rank[@]}" &
      ;;
    torchrun)
      # Static ranks of nodes: with a rendezvous rank 0 might be on another node than the address that is announced.
      # Its one task per node has the processors of all its ranks.
      # shellcheck disable=SC2016 # the nodes' shells expand it
      SRUN_CPUS_PER_TASK=$((SRUN_CPUS_PER_TASK * RANKS_PER_NODE)) \
        srun "${ON_NODES[@]}" "${IN_CONTAINER[@]}" --ntasks="$NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
        bash -c 'PET_NODE_RANK=$SLURM_PROCID exec "$@"' torchrun "$PYTHON" -m torch.distributed.run \
        --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" --master-addr "$MASTER_ADDR" \
        --master-port $((20000 + (SLURM_JOB_ID * 31 + TRY) % 12000)) --no-python "${as_rank[@]}" &
      ;;
    mpirun)
      read -ra extra <<<"${MPIRUN_ARGS:--hosts $(IFS=,; echo "${HOSTS[*]}") -ppn $RANKS_PER_NODE}"
      "$MPIRUN" -n "$WORLD" "${extra[@]}" "${as_rank[@]}" &
      ;;
  esac
  LAUNCHED=$!
}

beat() { stat -c %y "$RUN/heartbeat" 2>/dev/null || true; }

# Until the ranks have ended. Beats are compared with each other and timed by this shell: clocks of nodes may differ.
watch() {
  local last=$BEAT_BEFORE now changed=$SECONDS limit=$FIRST_HANG_SECONDS
  while kill -0 "$LAUNCHED" 2>/dev/null; do
    sleep "$POLL_SECONDS" &
    wait $! || true # ends at once for USR1
    # Again and again: a program that is just starting removes an old one.
    if ((STOPPING)) && kill -0 "$LAUNCHED" 2>/dev/null; then touch "$RUN/stop"; fi
    now=$(beat)
    if [ "$now" != "$last" ]; then
      last=$now changed=$SECONDS limit=$HANG_SECONDS
    elif ((SECONDS - changed > limit)); then
      say "no heartbeat for $((SECONDS - changed)) s (limit $limit): stacks go to $RUN/logs/rank_*.log and $RANK_LOGS"
      HUNG=1
      end_ranks
    fi
  done
  LAUNCH_STATUS=0
  wait "$LAUNCHED" || LAUNCH_STATUS=$?
}

# Stacks of all ranks by USR2 (megarl's handler, to the run's logs) and ABRT (Python's own, to this attempt's: also of a
# rank that hangs before megarl is imported); then kill.
end_ranks() {
  local steps step
  signal_ranks USR2
  sleep "$DUMP_SECONDS"
  signal_ranks ABRT
  sleep 1
  steps=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep -vE '\.(batch|extern|interactive)$' || true)
  for step in $steps; do
    scancel --signal=KILL "$step" || true
  done
  kill -TERM "$LAUNCHED" 2>/dev/null || true
  sleep 2
  kill -KILL "$LAUNCHED" 2>/dev/null || true
}

# By process id, on each node: where Slurm uses cgroups, scancel's signals reach only what srun has started, and that is
# rank.sh, torchrun or a helper of mpirun.
signal_ranks() {
  # shellcheck disable=SC2016 # the nodes' shells expand it
  timeout --kill-after=10 60 srun "${ON_NODES[@]}" --overlap --ntasks="$NODES" --ntasks-per-node=1 --cpus-per-task=1 \
    bash -c 'for file in "$RANK_LOGS/pids/$(uname -n)".*; do [ ! -e "$file" ] || kill -s "$1" "$(cat "$file")"; done' \
    bash "$1" || say "not all ranks got signal $1"
}

# A field of status.json (a line each), if this attempt has written it.
status_of_attempt() {
  local file=$RUN/status.json
  grep -q "^ *\"job\": \"$SLURM_JOB_ID\"" "$file" 2>/dev/null && grep -q "^ *\"restarts\": $TRY,*$" "$file" || return 0
  status_value "$1"
}
status_value() {
  sed -n "s/^ *\"$1\": \"\{0,1\}\(.*[^\",]\)\"\{0,1\},\{0,1\}$/\1/p" "$RUN/status.json" 2>/dev/null || true
}

# Decides by what the program says of itself; exit statuses of launchers say too little.
finish_attempt() {
  local state first
  state=$(status_of_attempt state)
  say "ranks ended, launcher with status $LAUNCH_STATUS; run: ${state:-not begun}, step $(status_value step)"
  case $state in
    done) say "done" && exit 0 ;;
    stopped)
      rm -f "$RUN/stop"
      ((STOPPING)) && again "stopped and saved"
      say "stopped by the file $RUN/stop, not by Slurm: not requeued; submit it again to go on" && exit 0
      ;;
  esac
  first=$(first_failure)
  if grep -lqx 2 "$RANK_LOGS"/rank_*.status 2>/dev/null; then
    say "wrong settings, not requeued:" "$(grep -h 'error: ' "$RANK_LOGS"/rank_*.log | sort | uniq | head -n 3)"
    exit 2
  fi
  count_fruitless
  ((HUNG)) && again "hung"
  again "crashed: ${first:-no rank has ended by itself}${state:+; $(status_of_attempt reason)}"
}

# The rank that ended first with a bad status.
first_failure() {
  local file
  # shellcheck disable=SC2012 # names of our own making
  for file in $(cd "$RANK_LOGS" && ls -tr rank_*.status 2>/dev/null); do
    [ "$(cat "$RANK_LOGS/$file")" != 0 ] || continue
    echo "${file%.status} first, with status $(cat "$RANK_LOGS/$file"); see $RANK_LOGS/${file%.status}.log"
    return
  done
}

# Counts attempts in a row that failed at no higher step than the job had reached before.
count_fruitless() {
  local highest count step
  read -r highest count <"$FRUITLESS"
  step=$(status_value step)
  if ((${step:-0} > highest)); then highest=$step count=0; else count=$((count + 1)); fi
  echo "$highest $count" >"$FRUITLESS"
  ((count < MAX_FRUITLESS)) || give_up "$count attempts in a row failed without a step beyond $highest"
}

give_up() {
  local first
  first=$(first_failure)
  say "failed, not requeued: $*${first:+; $first}"
  exit 1
}

# Requeues the job. To exclude nodes this shell must outlive that: they can be changed only once the job waits again.
again() {
  local excluded number
  ((TRY < MAX_RESTARTS)) || give_up "MAX_RESTARTS is $MAX_RESTARTS, and $*"
  say "requeue: $*"
  [ -z "$BAD_NODES" ] || trap '' TERM
  scontrol requeue "$SLURM_JOB_ID" || give_up "can't requeue (is it allowed here?): $*"
  if [ -n "$BAD_NODES" ]; then
    excluded=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -oP ' ExcNodeList=\K[^ (]\S*' || true)
    for number in {1..20}; do
      scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="${excluded:+$excluded,}$BAD_NODES" && break
      ((number < 20)) || say "can't exclude $BAD_NODES"
      sleep 1
    done
  fi
  sleep 300 # until Slurm ends this attempt
  exit 1
}
