# shellcheck shell=bash
# Sourced by the scripts beside it: makes .venv at the root of the repository on first use and whenever pyproject.toml has
# changed. Sets root and venv. Takes extra: which libraries of pyproject.toml are installed besides, "cpu" if it is not set.

unset CDPATH # with it cd prints, or leads elsewhere
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamp="$venv/installed-from"
extra="${extra:-cpu}"

# module NAME ARGUMENT…: sets runs to what runs it, of this tree whatever lies in the current folder. What is started inside
# inherits -P, which Python has from 3.11 on.
# shellcheck disable=SC2034 # read by the scripts that source this
module() {
  runs=("$venv/bin/python" "$root/longcat_pd/own.py" "$@")
  if "$venv/bin/python" -P -c '' 2>/dev/null; then
    runs=("$venv/bin/python" -P "$root/longcat_pd/own.py" "$@")
  fi
}

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

# step LOG NAME COMMAND…: what the command says goes to LOG. Standard error has one line that moves while it runs if that is a
# terminal, else one when it begins, and one when it has ended; and the end of LOG if it fails, which ends the script.
step() {
  local log="$1" name="$2" began=$SECONDS status=0
  shift 2
  if [[ -t 2 ]]; then
    "$@" 2>&1 </dev/null | follow "$log" "$name" || status=1
    printf '\r\033[K' >&2
  else
    echo "$name ..." >&2
    "$@" >"$log" 2>&1 </dev/null || status=1
  fi
  if (( status )); then
    tail -n 20 "$log" >&2
    echo "error: $name failed after $((SECONDS - began)) s; all of its output is in $log" >&2
    exit 1
  fi
  echo "$name: done in $((SECONDS - began)) s" >&2
}

follow() { # LOG NAME: keeps standard input in LOG, and shows its latest line and the seconds
  local began=$SECONDS part='' line='' latest='' status=0 shown
  : >"$1"
  while (( status == 0 || status > 128 )); do # above 128: nothing came for a second
    status=0
    IFS= read -r -t 1 part || status=$?
    line+="$part"
    if (( status == 0 )); then
      printf '%s\n' "$line" >>"$1"
      latest="$line" line=''
    fi
    shown="$2: $((SECONDS - began)) s  ${latest//[^[:print:]]/ }"
    printf '\r\033[K%s' "${shown:0:$(( ${COLUMNS:-80} - 1 ))}" >&2
  done
  printf '%s' "$line" >>"$1"
}

# one_at_a_time LOCK COMMAND…: in a shell of its own, while others with this LOCK wait; where flock is missing nobody does.
one_at_a_time() {
  local lock="$1"
  shift
  (
    if command -v flock >/dev/null && ! flock -n 9; then
      echo "waiting for another one that is at the same ..." >&2
      flock 9
    fi
    "$@"
  ) 9>"$lock"
}

is_installed() {
  [[ -x "$venv/bin/python" && "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]
}

install() {
  local python
  if is_installed; then # by the one that was waited for
    return
  fi
  cd "$root" || exit 1 # of a shell of its own; the folder before may hold another pip
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then # none yet, or its making was interrupted
    python="$(find_python)"
    step "$venv/making.log" "making .venv with $("$python" --version)" "$python" -m venv "$venv"
  fi
  step "$venv/install.log" "installing longcat-pd with its $extra libraries into .venv (some minutes the first time)" \
    "$venv/bin/python" -m pip install --progress-bar off --disable-pip-version-check -e "${root}[$extra]"
  echo "$wanted" >"$stamp"
}

wanted="$(sha256sum "$root/pyproject.toml" | cut -d ' ' -f 1)${extra#cpu}"
if ! is_installed; then
  mkdir -p "$venv"
  one_at_a_time "$venv/lock" install
fi
