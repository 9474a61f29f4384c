#!/usr/bin/env bash
# Trains on all GPUs of this machine, and goes on by itself after a preemption.
#
#   launch/gpu_node.sh CONFIG --workdir DIR [options] [--config.KEY=VALUE ...]
#
#   CONFIG            a config file, or FILE:TEXT for its get_config(TEXT)
#   --workdir DIR     of the run; the same command goes on with what is there
#   --cuda VERSION    12 or 13: whose libraries jax brings (default: 12)
#   --restarts N      how often a training that stopped early is started again (default: 100)
#   --dry-run         print each command instead of running it
#   --config.KEY=VALUE  passed to the training, such as --config.mesh.fsdp=8 --config.mesh.data=1
#
# One process drives all GPUs; CUDA_VISIBLE_DEVICES chooses among them. A training that exits with 75 has saved and is
# started again; a signal to this script is passed on to it, and is the end. Exit codes: 0 complete, 2 bad input, 75
# stopped by a signal and resumable, others as of the training. TLM_PYTHON, TLM_VENV: see launch/environment.sh.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
# shellcheck source-path=SCRIPTDIR source=child.sh
. "$(dirname "${BASH_SOURCE[0]}")/child.sh"
# shellcheck source-path=SCRIPTDIR source=training.sh
. "$(dirname "${BASH_SOURCE[0]}")/training.sh"

COMMAND=$(quoted "$0" "$@")
read_options "" "$@"
TRAIN=(tlm train "--config=$CONFIG" "--workdir=$WORKDIR" ${OVERRIDES[@]+"${OVERRIDES[@]}"})

if [ "$DRY_RUN" -eq 1 ]; then
  show_environment
  show "${TRAIN[@]}"
  exit 0
fi

nvidia-smi -L 2>/dev/null || fail "nvidia-smi finds no GPU here; on a CPU: launch/local.sh"
setup_environment

status=0
train_to_the_end "${TRAIN[@]}" || status=$?
if [ "$STOPPED" -eq 1 ] && [ "$status" -ne 0 ]; then
  say "" "stopped; the same command goes on from here:" "  $COMMAND" >&2
  exit 75
fi
if [ "$status" -eq 0 ]; then
  say "look at next:" "  tlm eval --checkpoint=$WORKDIR" "  tlm report $WORKDIR --output=report.html"
else
  printf 'gpu_node.sh: tlm train ended with exit code %d\n' "$status" >&2
fi
exit "$status"
