#!/usr/bin/env bash
# What the launchers of one training share: its options, its checks, and starting it again. They source this after
# environment.sh and child.sh.
# shellcheck disable=SC2034 # they read DRY_RUN

CONFIG='' WORKDIR='' CUDA=12 RESTARTS=100 DRY_RUN=0
OVERRIDES=()

# Reads a launcher's command line. What it takes beyond the shared options are the names given first, in one word; it
# gets each with its value by its function `own_option`.
read_options() {
  local own=$1
  shift
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help)
        usage
        exit 0
        ;;
      --dry-run) DRY_RUN=1 ;;
      --config.*=*) OVERRIDES+=("$1") ;;
      --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
      -*)
        case " --workdir --cuda --restarts $own " in *" $1 "*) ;; *) fail "unknown option $1; --help lists them" ;; esac
        [ $# -ge 2 ] || fail "$1 needs a value"
        case $1 in
          --workdir) WORKDIR=$2 ;;
          --cuda) CUDA=$2 ;;
          --restarts) RESTARTS=$2 ;;
          *) own_option "$1" "$2" ;;
        esac
        shift
        ;;
      *)
        [ -z "$CONFIG" ] || fail "two configs, $CONFIG and $1"
        CONFIG=$1
        ;;
    esac
    shift
  done
  [ -n "$CONFIG" ] || fail "no config; try: $0 configs/tapered/440m.py --workdir=runs/440m"
  [ -f "$CONFIG" ] || [ -f "${CONFIG%:*}" ] || fail "no such config file: $CONFIG"
  [ -n "$WORKDIR" ] || fail "--workdir says where the run goes"
  case $CUDA in 12 | 13) ;; *) fail "--cuda takes 12 or 13, not $CUDA" ;; esac
  case $RESTARTS in '' | *[!0-9]*) fail "--restarts takes a number, not $RESTARTS" ;; esac
  export TLM_ACCELERATOR=cuda$CUDA
}

show_environment() { say "\$ TLM_ACCELERATOR=$TLM_ACCELERATOR $(quoted "$ROOT/launch/environment.sh")"; }

# Runs a training, again whenever it has exited with 75 and no signal came here, and returns its last exit code.
train_to_the_end() {
  local status restarts=0
  while [ "$STOPPED" -eq 0 ]; do
    status=0
    show "$@"
    start "$@"
    finish || status=$?
    if [ "$STOPPED" -eq 1 ] || [ "$status" -ne 75 ]; then return "$status"; fi
    if [ "$restarts" -ge "$RESTARTS" ]; then
      say "$(basename "$0"): stopped early $((restarts + 1)) times, and --restarts is $RESTARTS; it can be resumed" >&2
      return 75
    fi
    restarts=$((restarts + 1))
    say "$(basename "$0"): it exited with 75, saved and resumable; start $((restarts + 1))"
  done
  return 75
}
