#!/usr/bin/env bash
# The Python environment of this repository: found, created, installed, and reused while requirements.txt stays the same.
#
#   launch/environment.sh        set it up
#   . launch/environment.sh      define the functions below; the other launch scripts do this
#
# TLM_PYTHON   the Python to use (default: the first of python3, python3.13, python3.12, python3.11 that is new enough)
# TLM_VENV     where the virtual environment goes (default: .venv at the repository's root)
# TLM_ACCELERATOR   cuda12, cuda13 or tpu: what jax needs for it is installed too (default: nothing, for the CPU)
#
# Exit codes: 0 done, 2 something to install first (one line says what).

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${TLM_VENV:-$ROOT/.venv}
STAMP=$VENV/.tlm_requirements

say() { printf "%s\n" "$@"; }

fail() {
  if [ "${STOPPED:-0}" -eq 1 ]; then exit 75; fi # a command failed because of Ctrl-C
  printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
  exit 2
}

# Prints the first usable Python >= 3.11.
find_python() {
  local candidate
  local candidates=(python3 python3.13 python3.12 python3.11)
  if [ -n "${TLM_PYTHON:-}" ]; then candidates=("$TLM_PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  if [ -n "${TLM_PYTHON:-}" ]; then fail "TLM_PYTHON=$TLM_PYTHON is no Python >= 3.11; unset it or name another"; fi
  fail "no Python >= 3.11 among ${candidates[*]}; install one (Debian 12: apt-get install python3 python3-venv)" \
    "or name it with TLM_PYTHON=/path/to/python"
}

# Debian ships venv without ensurepip, in a package of its own.
ensure_venv_module() {
  local python=$1 package output
  if "$python" -c 'import ensurepip, venv' 2>/dev/null; then return; fi
  package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
  if ! command -v apt-get >/dev/null; then
    fail "$python has no venv and ensurepip modules; install them or name another Python with TLM_PYTHON"
  fi
  if [ "$(id -u)" -ne 0 ]; then
    fail "$python has no ensurepip module; install it with: sudo apt-get install $package"
  fi
  say "environment: $python has no ensurepip; installing $package"
  if ! output=$({ apt-get update -qq && apt-get install -qq -y --no-install-recommends "$package"; } </dev/null 2>&1); then
    printf '%s\n' "$output" >&2
    fail "apt-get install $package failed; the lines above say why"
  fi
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$package is installed but $python still has no ensurepip; name another Python with TLM_PYTHON"
}

# What the installed environment was made from: its Python, the pins, the package's metadata and place.
fingerprint() {
  "$1" - "$ROOT" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
state = hashlib.sha256(f"{sys.version_info[:2]} {root}".encode())
for name in ("requirements.txt", "pyproject.toml"):
    state.update((root / name).read_bytes())
print(state.hexdigest())
PYTHON
}

# Runs pip and shows how far it is: one line that counts on a terminal, a line every ten packages elsewhere.
install_requirements() {
  local total log=$VENV/install.log every=10
  total=$(grep -c '^[a-z]' "$ROOT/requirements.txt")
  if [ -t 1 ]; then every=1; fi
  if ! PYTHONUNBUFFERED=1 "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar=off \
    -r "$ROOT/requirements.txt" 2>&1 | tee "$log" | awk -v every="$every" -v total="$total" '
      /^(Collecting|Processing|Requirement already)/ {
        n += 1; name = ($1 == "Requirement") ? $4 : $2; sub(/.*\//, "", name); sub(/[=<>;].*|-[0-9].*/, "", name)
        if (every == 1) printf "\rinstalling %d of about %d: %-30s", n, total, name
        else if (n % every == 0) print "installing " n " of about " total ": " name
        fflush()
      }
      /^Installing collected/ { printf (every == 1) ? "\runpacking %-50s" : "unpacking\n", ""; fflush() }
      END { if (every == 1) printf "\r%-60s\r", "" }'; then
    grep -E '^ERROR' "$log" >&2 || tail -n 5 "$log" >&2
    fail "pip could not install requirements.txt, see $log; the same command tries again"
  fi
}

# What jax needs beside itself for an accelerator, of the version that is pinned.
install_accelerator() {
  local version wanted stamp=$VENV/.tlm_accelerator
  wanted="$1 $(cat "$STAMP")"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
  version=$("$VENV/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("jax"))')
  say "environment: installing jax[$1]==$version"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "jax[$1]==$version" ||
    fail "pip could not install jax[$1]==$version; the lines above say why"
  printf '%s\n' "$wanted" >"$stamp"
}

# Creates or reuses the environment and puts its programs first on PATH.
setup_environment() {
  setup_pinned
  if [ -n "${TLM_ACCELERATOR:-}" ]; then install_accelerator "$TLM_ACCELERATOR"; fi
}

setup_pinned() {
  local python
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$(fingerprint "$VENV/bin/python")" ]; then
    PATH=$VENV/bin:$PATH
    return
  fi
  python=$(find_python) || exit
  if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
    fail "$VENV exists and is no virtual environment; move it or set TLM_VENV to another folder"
  fi
  if [ "$("$VENV/bin/python" -c 'import pip, sys; print(*sys.version_info[:2])' 2>/dev/null)" != \
    "$("$python" -c 'import sys; print(*sys.version_info[:2])')" ]; then
    ensure_venv_module "$python"
    say "environment: creating $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV" || fail "$python -m venv failed; set TLM_PYTHON to another Python >= 3.11"
  fi
  say "environment: installing requirements.txt into $VENV"
  install_requirements
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable "$ROOT" ||
    fail "pip could not install the package itself; the lines above say why"
  fingerprint "$VENV/bin/python" >"$STAMP"
  PATH=$VENV/bin:$PATH
  say "environment: ready, $("$VENV/bin/python" -c 'import jax, sys; print("Python %d.%d, jax" % sys.version_info[:2], jax.__version__)')"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  setup_environment
  say "environment: to use it in this shell: . $VENV/bin/activate"
fi
