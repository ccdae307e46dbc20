#!/usr/bin/env bash
# One rank, under any launcher: bash slurm/rank.sh PYTHON SCRIPT FLAGS...
#
# Its output goes to a file of its own. Its process id and exit status go to files where job.sh finds them: launchers
# report neither which rank ended first nor with which status.
set -u
rank=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:?no launcher}}}}
exec >>"$RANK_LOGS/rank_$rank.log" 2>&1
ulimit -c 0       # ABRT asks for stacks, not for an image of the memory
trap '' USR1 USR2 # until the program has its handler
if [ "${SMOKE:-0}" = 1 ]; then export CUDA_VISIBLE_DEVICES=; fi

"$@" &
program=$!
pid_file=$RANK_LOGS/pids/$(uname -n).$rank
echo "$program" >"$pid_file"
echo "rank $rank on node ${SLURMD_NODENAME:-unknown} ($(uname -n)), process $program"
trap 'kill -TERM "$program" 2>/dev/null' TERM INT HUP
wait "$program"
status=$?
while kill -0 "$program" 2>/dev/null; do # a signal has ended the wait, not the program
  wait "$program"
  status=$?
done
rm -f "$pid_file"
echo "$status" >"$RANK_LOGS/rank_$rank.status"
exit "$status"
