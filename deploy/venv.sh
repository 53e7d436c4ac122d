# shellcheck shell=bash
# Sourced by the scripts beside it: makes .venv at the root of the repository on first use and whenever pyproject.toml has
# changed. Sets root and venv. Takes extra: which libraries of pyproject.toml are installed besides, "cpu" if it is not set.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/installed-from"
extra="${extra:-cpu}"

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null \
      && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: no Python 3.10 or newer with the venv module was found on PATH" >&2
  exit 2
}

install() {
  local python log="$venv/install.log"
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # none yet, or its making was interrupted
    python="$(find_python)"
    echo "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
  fi
  echo "installing longcat-pd with its $extra libraries into .venv (some minutes the first time) ..."
  if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e "${root}[$extra]" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    echo "error: the installation failed; all of its output is in $log" >&2
    exit 1
  fi
  echo "$wanted" >"$stamp"
}

wanted="$(sha256sum "$root/pyproject.toml" | cut -d ' ' -f 1)${extra#cpu}"
if [[ ! -x "$venv/bin/python" || "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]]; then
  install
fi
