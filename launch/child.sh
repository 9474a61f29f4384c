#!/usr/bin/env bash
# One command at a time in a process group of its own, signals passed on to it once. Sourced by other launch scripts.
# shellcheck disable=SC2034 # STOPPED: whoever sources this asks whether a signal came

CHILD='' STOPPED=0

# One signal reaches the command once: it runs in a process group of its own, and this passes the signal on.
on_signal() {
  STOPPED=1
  if [ -n "$CHILD" ]; then kill -s "$1" "$CHILD" 2>/dev/null || true; fi
}
trap 'on_signal INT' INT
trap 'on_signal TERM' TERM

# Prints the comment at the beginning of the script that sources this.
usage() {
  awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
}

# Prints words as one would type them.
quoted() {
  local word line=''
  for word in "$@"; do
    if [[ ! $word =~ ^[A-Za-z0-9_./:=,+@%-]+$ ]]; then word="'${word//\'/\'\\\'\'}'"; fi
    line+="${line:+ }$word"
  done
  say "$line"
}

show() { say "\$ $(quoted "$@")"; }

start() {
  set -m # a process group of its own
  "$@" </dev/null &
  CHILD=$!
  set +m
}

# Waits for the command to end; a signal interrupts `wait`, not the command.
finish() {
  local status=0
  wait "$CHILD" || status=$?
  while kill -0 "$CHILD" 2>/dev/null; do
    status=0
    wait "$CHILD" || status=$?
  done
  CHILD=''
  return "$status"
}
