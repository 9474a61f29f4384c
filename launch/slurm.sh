#!/usr/bin/env bash
# Submits a training on several GPU nodes to Slurm, one process a node; it goes on by itself after a preemption.
#
#   launch/slurm.sh CONFIG --workdir DIR --nodes N [options] [--config.KEY=VALUE ...]
#
#   CONFIG            a config file, or FILE:TEXT for its get_config(TEXT)
#   --workdir DIR     of the run, on a file system that all nodes share, as this repository is; the same command goes on
#   --nodes N         how many
#   --sbatch OPTION   for sbatch, such as --sbatch=--gpus-per-node=8 --sbatch=--time=12:00:00; may be repeated
#   --grace SECONDS   how long before its end the job is told to save (default: 300)
#   --cuda VERSION    12 or 13: whose libraries jax brings (default: 12)
#   --restarts N      how often a training that stopped early is started again within a job (default: 100)
#   --dry-run         print each command instead of running it
#   --config.KEY=VALUE  passed to the training, such as --config.mesh.fsdp=8
#
# Before its time is up or when it is preempted, Slurm sends SIGTERM: the run saves, and the job is put into the queue
# again. Exit codes: 0 submitted, 2 bad input. TLM_PYTHON, TLM_VENV: see launch/environment.sh.

set -euo pipefail
# Slurm runs a copy of this file from elsewhere; the submission says where the others are.
LAUNCH=${TLM_LAUNCH:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$LAUNCH/environment.sh"
# shellcheck source-path=SCRIPTDIR source=child.sh
. "$LAUNCH/child.sh"

CONFIG='' WORKDIR='' NODES='' GRACE=300 CUDA=12 RESTARTS=100 DRY_RUN=0
OVERRIDES=() SBATCH=() ARGUMENTS=("$@")

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --workdir=* | --nodes=* | --sbatch=* | --grace=* | --cuda=* | --restarts=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue
      ;;
    --workdir | --nodes | --sbatch | --grace | --cuda | --restarts)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --workdir) WORKDIR=$2 ;;
        --nodes) NODES=$2 ;;
        --sbatch) SBATCH+=("$2") ;;
        --grace) GRACE=$2 ;;
        --cuda) CUDA=$2 ;;
        --restarts) RESTARTS=$2 ;;
      esac
      shift
      ;;
    --dry-run) DRY_RUN=1 ;;
    --config.*=*) OVERRIDES+=("$1") ;;
    -*) fail "unknown option $1; --help lists them" ;;
    *)
      [ -z "$CONFIG" ] || fail "two configs, $CONFIG and $1"
      CONFIG=$1
      ;;
  esac
  shift
done

number() { case $2 in '' | 0* | *[!0-9]*) fail "$1 takes a number from 1 on, not '$2'" ;; esac; }

[ -n "$CONFIG" ] || fail "no config; try: launch/slurm.sh configs/tapered/440m.py --workdir runs/440m --nodes 2"
[ -f "$CONFIG" ] || [ -f "${CONFIG%:*}" ] || fail "no such config file: $CONFIG"
[ -n "$WORKDIR" ] || fail "--workdir says where the run goes"
number --nodes "$NODES"
number --grace "$GRACE"
case $RESTARTS in '' | *[!0-9]*) fail "--restarts takes a number, not $RESTARTS" ;; esac
case $CUDA in 12 | 13) ;; *) fail "--cuda takes 12 or 13, not $CUDA" ;; esac

export TLM_ACCELERATOR=cuda$CUDA TLM_LAUNCH=$LAUNCH
TRAIN=(srun --ntasks-per-node=1 --kill-on-bad-exit=1
  tlm train --distributed "--config=$CONFIG" "--workdir=$WORKDIR" ${OVERRIDES[@]+"${OVERRIDES[@]}"})

# --- on the login node ------------------------------------------------------------------------------------------------

if [ -z "${TLM_INSIDE_JOB:-}" ]; then
  SUBMIT=(sbatch "--job-name=tlm-$(basename "$WORKDIR")" "--nodes=$NODES" --ntasks-per-node=1 --requeue
    "--signal=B:TERM@$GRACE" --open-mode=append ${SBATCH[@]+"${SBATCH[@]}"} "$LAUNCH/slurm.sh" "${ARGUMENTS[@]}")
  if [ "$DRY_RUN" -eq 1 ]; then
    say "\$ TLM_ACCELERATOR=$TLM_ACCELERATOR $(quoted "$LAUNCH/environment.sh")"
    show "${SUBMIT[@]}"
    say "and in the job, until it is complete:"
    show "${TRAIN[@]}"
    exit 0
  fi
  command -v sbatch >/dev/null || fail "there is no sbatch here: this is for the login node of a Slurm cluster"
  setup_environment
  mkdir -p "$WORKDIR" || fail "$WORKDIR cannot be made"
  show "${SUBMIT[@]}"
  TLM_INSIDE_JOB=1 "${SUBMIT[@]}" || fail "sbatch did not take the job; the lines above say why"
  say "look at next:" "  squeue --me" "  tail -f slurm-*.out" "  tlm report $WORKDIR --output=report.html"
  exit 0
fi

# --- in the job -------------------------------------------------------------------------------------------------------

setup_environment
restarts=0
while true; do
  status=0
  show "${TRAIN[@]}"
  start "${TRAIN[@]}"
  finish || status=$?
  if [ "$STOPPED" -eq 1 ] && [ "$status" -ne 0 ]; then
    say "slurm.sh: job ${SLURM_JOB_ID:-} was told to stop; back into the queue with it"
    scontrol requeue "${SLURM_JOB_ID:-}" || say "slurm.sh: it could not be requeued; submit the same command again" >&2
    exit 75
  fi
  if [ "$status" -ne 75 ] || [ "$restarts" -ge "$RESTARTS" ]; then break; fi
  restarts=$((restarts + 1))
  say "slurm.sh: it exited with 75, saved and resumable; start $((restarts + 1))"
done
if [ "$status" -ne 0 ]; then printf 'slurm.sh: tlm train ended with exit code %d\n' "$status" >&2; fi
exit "$status"
