#!/bin/sh
# What `run_pd.sh doctor` asks of a machine, which may have no code yet: doctor.sh PATH PYTHON SCRIPT [SETUP_FILE …].
# PATH is hosts.path, PYTHON hosts.python; either may be empty. SCRIPT is the text of doctor.py. Asked and answering as
# code.sh; changes nothing.
set -u
LC_ALL=C
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin:/usr/local/Ascend/driver/tools # where npu-smi and hccn_tool are
export LC_ALL PATH
unset CDPATH

path=$1
python=$2
script=$3
shift 3

find_python() {
  for python in "$python" "$path/current/.venv/bin/python" python3; do
    if [ -n "$python" ] && "$python" -c 'from __future__ import annotations; import json' 2>/dev/null; then
      return
    fi
  done
  echo "no Python was found to look around with (3.7 or newer): neither hosts.python, nor that of the release, nor python3"
  return 1
}

# facts BYTES SETUP_FILE …: answer the request that follows on standard input.
facts() {
  bytes=$1
  shift
  for file in "$@"; do
    if [ ! -r "$file" ]; then
      echo "hosts.setup_files: $file cannot be read there"
      return 1
    fi
  done
  # shellcheck disable=SC2016 # expanded by that bash, in which the setup files have been sourced
  head -c "$bytes" | bash -c '
    script=$1 python=$2
    shift 2
    for file in "$@"; do . "$file" >/dev/null 2>&1 </dev/null; done
    exec "$python" -c "$script" "${ASCEND_TOOLKIT_HOME-}"' bash "$script" "$python" "$@"
}

echo # what a start-up file of the shell has said ends here, should it not have ended its line
(find_python) && find_python
status=$?
echo "end=$status"
while [ "$status" -eq 0 ] && read -r verb rest; do
  case $verb in
    clock) echo "time=$(date +%s.%N)" ;;
    facts) (facts "$rest" "$@") 2>&1 ;;
    *) false ;;
  esac
  echo "end=$?"
done
