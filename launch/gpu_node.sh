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

CONFIG='' WORKDIR='' CUDA=12 RESTARTS=100 DRY_RUN=0
OVERRIDES=()
COMMAND=$(quoted "$0" "$@")

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --workdir=* | --cuda=* | --restarts=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
    --workdir | --cuda | --restarts)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --workdir) WORKDIR=$2 ;;
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

[ -n "$CONFIG" ] || fail "no config; try: launch/gpu_node.sh configs/tapered/440m.py --workdir runs/440m"
[ -f "$CONFIG" ] || [ -f "${CONFIG%:*}" ] || fail "no such config file: $CONFIG"
[ -n "$WORKDIR" ] || fail "--workdir says where the run goes"
case $CUDA in 12 | 13) ;; *) fail "--cuda takes 12 or 13, not $CUDA" ;; esac
case $RESTARTS in '' | *[!0-9]*) fail "--restarts takes a number, not $RESTARTS" ;; esac

TRAIN=(tlm train "--config=$CONFIG" "--workdir=$WORKDIR" ${OVERRIDES[@]+"${OVERRIDES[@]}"})
export TLM_ACCELERATOR=cuda$CUDA

if [ "$DRY_RUN" -eq 1 ]; then
  say "\$ TLM_ACCELERATOR=$TLM_ACCELERATOR $(quoted "$ROOT/launch/environment.sh")"
  show "${TRAIN[@]}"
  exit 0
fi

nvidia-smi -L 2>/dev/null || fail "nvidia-smi finds no GPU here; on a CPU: launch/local.sh"
setup_environment

restarts=0
while true; do
  status=0
  show "${TRAIN[@]}"
  start "${TRAIN[@]}"
  finish || status=$?
  if [ "$STOPPED" -eq 1 ] && [ "$status" -ne 0 ]; then
    say "" "stopped; the same command goes on from here:" "  $COMMAND" >&2
    exit 75
  fi
  if [ "$status" -ne 75 ]; then break; fi
  if [ "$restarts" -ge "$RESTARTS" ]; then
    say "gpu_node.sh: stopped early $((restarts + 1)) times, and --restarts is $RESTARTS; the same command goes on" >&2
    exit 75
  fi
  restarts=$((restarts + 1))
  say "gpu_node.sh: it exited with 75, saved and resumable; start $((restarts + 1))"
done
if [ "$status" -eq 0 ]; then
  say "look at next:" "  tlm eval --checkpoint=$WORKDIR" "  tlm report $WORKDIR --output=report.html"
else
  printf 'gpu_node.sh: tlm train ended with exit code %d\n' "$status" >&2
fi
exit "$status"
