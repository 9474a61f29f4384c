#!/usr/bin/env bash
# From raw text to a report on this machine: tokenizer, token store, training, evaluation, samples, one HTML page.
#
#   launch/local.sh CONFIG [options] [--config.KEY=VALUE ...]
#
#   CONFIG            a config file, or FILE:TEXT for its get_config(TEXT)
#   --output DIR      where everything goes (default: runs/NAME of CONFIG)
#   --data FILE ...   text, JSON Lines (.gz, .zst), Parquet (default: the corpus of this repository)
#   --holdout SHARE   of the documents held out (default: 0.02; a few documents want more)
#   --split-text WAY  how text files become documents: file (default), paragraph, line or size
#   --prompt TEXT     begin a sample with this; may be repeated
#   --no-twin         do not train the uniform twin (all layers alike, the same budget as nearly as the config has it)
#   --no-interrupt    do not stop and resume the first run on purpose
#   --dry-run         print each command instead of running it
#   --config.KEY=VALUE  passed to the training of both
#
# The same command again goes on with whatever was unfinished. Exit codes: 0 all done, 2 bad input (one line says
# which), 75 stopped by Ctrl-C or SIGTERM and resumable. TLM_PYTHON, TLM_VENV: see launch/environment.sh.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
# shellcheck source-path=SCRIPTDIR source=child.sh
. "$(dirname "${BASH_SOURCE[0]}")/child.sh"

# --- the command line ---------------------------------------------------------------------------------------------------

CONFIG='' OUTPUT='' HOLDOUT=0.02 SPLIT_TEXT=file TWIN=1 INTERRUPT=1 DRY_RUN=0
DATA=() PROMPTS=() OVERRIDES=()
COMMAND=$(printf '%q ' "$0" "$@")

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --output=* | --prompt=* | --holdout=* | --split-text=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
    --output | --prompt | --holdout | --split-text)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --output) OUTPUT=$2 ;;
        --prompt) PROMPTS+=("$2") ;;
        --holdout) HOLDOUT=$2 ;;
        --split-text) SPLIT_TEXT=$2 ;;
      esac
      shift
      ;;
    --data)
      while [ $# -ge 2 ] && [ "${2#--}" = "$2" ]; do
        [ -e "$2" ] || fail "--data: no such file: $2"
        DATA+=("$2")
        shift
      done
      [ ${#DATA[@]} -gt 0 ] || fail "--data needs at least one file"
      ;;
    --no-twin) TWIN=0 ;;
    --no-interrupt) INTERRUPT=0 ;;
    --dry-run) DRY_RUN=1 ;;
    --config.*=*) OVERRIDES+=("$1") ;;
    -*) fail "unknown option $1; --help lists them" ;;
    *)
      [ -z "$CONFIG" ] || fail "two configs, $CONFIG and $1; files of text go after --data"
      CONFIG=$1
      ;;
  esac
  shift
done

[ -n "$CONFIG" ] || fail "no config; try: launch/local.sh configs/quickstart.py"
[ -f "$CONFIG" ] || [ -f "${CONFIG%:*}" ] || fail "no such config file: $CONFIG"
if [ ${#DATA[@]} -eq 0 ]; then DATA=("$ROOT"/corpus/*.jsonl.gz) && DATA=("${DATA[@]#"$PWD"/}"); fi
if [ ${#PROMPTS[@]} -eq 0 ]; then PROMPTS=("The people of the United States" "Call me" "HAMLET."); fi
NAME=$(basename "${CONFIG/.py:/-}" .py)
OUTPUT=${OUTPUT:-runs/$NAME}
RUN=$OUTPUT/run UNIFORM=$OUTPUT/uniform STORE=$OUTPUT/store TOKENIZER=$OUTPUT/tokenizer.model

# --- running, stopping, telling -----------------------------------------------------------------------------------------

resumable() {
  say "" "stopped; the same command goes on from here:" "  $COMMAND" >&2
  exit 75
}

# Ends the script unless the command was a success.
check() {
  local status=$1
  shift
  if [ "$STOPPED" -eq 1 ] || [ "$status" -eq 75 ] || [ "$status" -eq 130 ]; then resumable; fi
  if [ "$status" -ne 0 ]; then
    printf 'local.sh: %s ended with exit code %d\n' "$1 $2" "$status" >&2
    exit "$status"
  fi
}

run() {
  local status=0
  show "$@"
  if [ "$DRY_RUN" -eq 1 ]; then return; fi
  start "$@"
  finish || status=$?
  check "$status" "$@"
}

heading() { say "" "== $1 ($((SECONDS / 60)) min $((SECONDS % 60)) s)"; }

# The last step in a run's metrics, 0 before the first.
last_step() {
  local step=''
  if [ -f "$1/metrics.jsonl" ]; then step=$(tail -n 1 "$1/metrics.jsonl" | sed -n 's/^{"step": *\([0-9]*\),.*/\1/p'); fi
  say "${step:-0}"
}

# Trains, but stops the command halfway as a preemption would, sees that it exits with 75, and leaves the rest to `run`.
train_halfway() {
  local status=0 half=$((NUM_STEPS / 2)) step
  say "local.sh: this is stopped on purpose at about step $half, as a preemption would; then it goes on"
  show "$@"
  if [ "$DRY_RUN" -eq 1 ]; then return; fi
  start "$@"
  while kill -0 "$CHILD" 2>/dev/null; do
    step=$(last_step "$RUN") || true # Ctrl-C ends it
    if [ "${step:-0}" -ge "$half" ]; then
      say "local.sh: sending SIGTERM; the run must save and exit with 75"
      kill -TERM "$CHILD" 2>/dev/null || true
      break
    fi
    sleep 1 || true # Ctrl-C ends it
  done
  finish || status=$?
  if [ "$STOPPED" -eq 0 ] && [ "$status" -eq 75 ]; then
    say "local.sh: it exited with 75, which launchers restart; the same command goes on"
  else
    check "$status" "$@"
  fi
}

# --- the work -----------------------------------------------------------------------------------------------------------

heading "environment"
if [ "$DRY_RUN" -eq 1 ]; then
  show "$ROOT/launch/environment.sh"
  if [ -x "$VENV/bin/tlm" ]; then PATH=$VENV/bin:$PATH; fi
else
  setup_environment
fi

# The keys of the config that this script needs. A dry run without an environment shows placeholders.
SHAPE=SHAPE VOCAB_SIZE=VOCAB_SIZE NUM_STEPS=0 CONTEXT=256
if [ "$DRY_RUN" -eq 0 ] || command -v tlm >/dev/null; then
  KEYS=$(
    python - "$CONFIG" ${OVERRIDES[@]+"${OVERRIDES[@]}"} <<'PYTHON'
import sys
from tlm_jax.config import load_config
from tlm_jax.errors import UserError
try:
    c = load_config(sys.argv[1], sys.argv[2:])
except UserError as error:
    sys.exit(f"local.sh: error: {error}")
width, mlp = c.profile.width_schedule, c.profile.schedule
shape = mlp if width == "uniform" else width if mlp == "uniform" else f"{width}+{mlp}"
print(shape, c.model.vocab_size, c.train.num_steps, c.data.sequence_length)
PYTHON
  ) || exit 2
  read -r SHAPE VOCAB_SIZE NUM_STEPS CONTEXT <<<"$KEYS"
fi
if [ "$SHAPE" = uniform ]; then TWIN=0; fi
TRAIN=(tlm train "--config=$CONFIG" "--workdir=$RUN" "--config.data.store=$STORE" ${OVERRIDES[@]+"${OVERRIDES[@]}"})
ALIKE=(--config.profile.schedule=uniform --config.profile.layers=none --config.profile.width_schedule=uniform)
TRAIN_TWIN=("${TRAIN[@]/#--workdir=*/--workdir=$UNIFORM}" "${ALIKE[@]}" "--config.name=$NAME-uniform")
GENERATE=(--temperature=0.8 "--max-new-tokens=$((CONTEXT < 200 ? CONTEXT / 2 : 100))")
RUNS=("$RUN")
if [ "$TWIN" -eq 1 ]; then RUNS+=("$UNIFORM"); fi
heading "config: what needs no data, before the long work"
run "${TRAIN[@]}" --check-config
if [ "$TWIN" -eq 1 ]; then run "${TRAIN_TWIN[@]}" --check-config; fi
if [ "$DRY_RUN" -eq 0 ]; then mkdir -p "$OUTPUT" || fail "cannot create $OUTPUT"; fi

heading "text: ${#DATA[@]} files to tokens"
if [ -f "$TOKENIZER" ]; then
  say "$TOKENIZER is there"
else
  run tlm tokenizer --input "${DATA[@]}" "--split-text=$SPLIT_TEXT" "--vocab-size=$VOCAB_SIZE" "--output=$TOKENIZER"
fi
run tlm prepare "${DATA[@]}" "--tokenizer=$TOKENIZER" "--output=$STORE" "--holdout=$HOLDOUT" "--split-text=$SPLIT_TEXT"

heading "training: $SHAPE"
if [ "$INTERRUPT" -eq 1 ] && [ "$(last_step "$RUN")" -eq 0 ]; then train_halfway "${TRAIN[@]}"; fi
run "${TRAIN[@]}"
if [ "$TWIN" -eq 1 ]; then
  heading "training: its uniform twin, the same budget"
  run "${TRAIN_TWIN[@]}"
fi

heading "evaluation and samples, from the checkpoints alone"
for each in "${RUNS[@]}"; do
  if [ ! "$each/evaluation.json" -nt "$each/metrics.jsonl" ]; then
    run tlm eval "--checkpoint=$each" --baselines "--output=$each/evaluation.json"
  fi
  if [ ! "$each/samples.json" -nt "$each/metrics.jsonl" ]; then
    run tlm generate "--checkpoint=$each" "${PROMPTS[@]/#/--prompt=}" "${GENERATE[@]}" "--output=$each/samples.json"
  fi
done

heading "report"
run tlm report "${RUNS[@]}" "--output=$OUTPUT/report.html"

heading "done"
if [ "$DRY_RUN" -eq 0 ]; then
  python - "${RUNS[@]}" <<'PYTHON'
import json, pathlib, sys
rows, baselines = [], {}
for run in map(pathlib.Path, sys.argv[1:]):
    found = json.loads((run / "evaluation.json").read_text())
    rows.append((str(run), found["bits_per_byte"]))
    baselines |= found["baselines"]
rows.append(("bigram model of the whole training split", baselines["bigram_bits_per_byte"]))
rows.append(("gzip -9", baselines["gzip_bits_per_byte"]))
width = max(len(name) for name, _ in rows)
print("held-out text, bits per byte (lower is better; one seed, so no winner between twins):")
for name, value in rows:
    print(f"  {name:<{width}}  {value:.4f}")
PYTHON
fi
say "look at next:"
printf '  %-50s  %s\n' \
  "curves, profiles, budgets, samples, in a browser" "$(quoted "$OUTPUT/report.html")" \
  "held-out loss, beside gzip and a bigram model" "$(quoted "$RUN/evaluation.json")" \
  "a sample" "$(quoted tlm generate "--checkpoint=$RUN" "--prompt=My fellow citizens")" \
  "the layers, before any training" "$(quoted tlm profile "--config=$CONFIG")" \
  "the tests" "launch/test.sh"
if [ "$DRY_RUN" -eq 0 ]; then say "for the commands tlm and python: $(quoted . "$VENV/bin/activate")"; fi
