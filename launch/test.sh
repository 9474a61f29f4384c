#!/usr/bin/env bash
# Sets up the environment and runs the tests, on the CPU.
#
#   launch/test.sh [--dry-run] [pytest arguments]
#
#   launch/test.sh -m 'not slow'          only the tests that take less than about ten seconds
#   launch/test.sh tests/capacity -x      one room, up to the first failure
#
# TLM_TEST_PROCESSES   how many tests run at a time (default: one per CPU)
# TLM_PYTHON, TLM_VENV: see launch/environment.sh. The exit code is pytest's.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

DRY_RUN=0
ARGUMENTS=()
for argument in "$@"; do
  case $argument in
    --dry-run) DRY_RUN=1 ;;
    --help | -h)
      awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) ARGUMENTS+=("$argument") ;;
  esac
done

cd "$ROOT"
TESTS=(python -m pytest "--numprocesses=${TLM_TEST_PROCESSES:-auto}" --dist=worksteal --durations=10
  ${ARGUMENTS[@]+"${ARGUMENTS[@]}"})

if [ "$DRY_RUN" -eq 1 ]; then
  say "\$ launch/environment.sh" "\$ $(printf '%q ' "${TESTS[@]}")"
  exit 0
fi

setup_environment
say "tests: $(python --version), $(python -c 'import jax; print("jax", jax.__version__)'); the slow ones come to several minutes"
status=0
"${TESTS[@]}" || status=$?
if [ "$status" -eq 0 ]; then
  say "look at next: launch/local.sh configs/quickstart.py trains, evaluates and reports on the shipped corpus"
else
  say "look at next: launch/test.sh --last-failed --exitfirst runs what failed again, up to the first failure"
fi
exit "$status"
