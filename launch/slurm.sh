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
# shellcheck source-path=SCRIPTDIR source=training.sh
. "$LAUNCH/training.sh"

NODES='' GRACE=300
SBATCH=() ARGUMENTS=("$@")

own_option() {
  case $1 in
    --nodes) NODES=$2 ;;
    --grace) GRACE=$2 ;;
    --sbatch) SBATCH+=("$2") ;;
  esac
}

number() { case $2 in '' | 0* | *[!0-9]*) fail "$1 takes a number from 1 on, not '$2'" ;; esac; }

read_options "--nodes --grace --sbatch" "$@"
number --nodes "$NODES"
number --grace "$GRACE"

export TLM_LAUNCH=$LAUNCH
# The first host to exit may be done while another still writes: none is ended by it, but after a while.
TRAIN=(srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=300
  tlm train --distributed "--config=$CONFIG" "--workdir=$WORKDIR" ${OVERRIDES[@]+"${OVERRIDES[@]}"})

# --- on the login node ------------------------------------------------------------------------------------------------

if [ -z "${TLM_INSIDE_JOB:-}" ]; then
  SUBMIT=(sbatch "--job-name=tlm-$(basename "$WORKDIR")" "--nodes=$NODES" --ntasks-per-node=1 --requeue
    "--signal=B:TERM@$GRACE" --open-mode=append ${SBATCH[@]+"${SBATCH[@]}"} "$LAUNCH/slurm.sh" "${ARGUMENTS[@]}")
  if [ "$DRY_RUN" -eq 1 ]; then
    show_environment
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
status=0
train_to_the_end "${TRAIN[@]}" || status=$?
if [ "$STOPPED" -eq 1 ] && [ "$status" -ne 0 ]; then
  say "slurm.sh: job ${SLURM_JOB_ID:-} was told to stop; back into the queue with it"
  scontrol requeue "${SLURM_JOB_ID:-}" || say "slurm.sh: it could not be requeued; submit the same command again" >&2
  exit 75
fi
if [ "$status" -ne 0 ]; then printf 'slurm.sh: tlm train ended with exit code %d\n' "$status" >&2; fi
exit "$status"
