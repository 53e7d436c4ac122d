#!/usr/bin/env bash
# Start, look at and stop a cluster, from one machine: run_pd.sh VERB [CLUSTER_YAML] [--set key.path=value …]
# run_pd.sh --help lists the verbs, run_pd.sh VERB --help what each takes. Makes .venv at the root of the repository on first
# use and whenever pyproject.toml has changed, then hands over. A list of machines and a few folders can be kept beside this
# script, in hosts.sh: see hosts.example.sh. What the command line says counts more.
set -euo pipefail

here="$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=deploy/venv.sh
source "$here/venv.sh"

settings=()
if [[ -f "$here/hosts.sh" && $# -gt 0 && "$1" != -* ]]; then
  iplist=() ssh_port='' testpath='' logdir='' cluster_key='' MODEL_PATH=''
  # shellcheck source=deploy/hosts.example.sh
  source "$here/hosts.sh"
  (( ${#iplist[@]} == 0 )) || settings+=(--iplist "${iplist[*]}")
  [[ -z "$ssh_port" ]] || settings+=(--ssh-port "$ssh_port")
  [[ -z "$testpath" ]] || settings+=(--testpath "$testpath")
  [[ -z "$logdir" ]] || settings+=(--logdir "$logdir")
  [[ -z "$cluster_key" ]] || settings+=(--cluster-key "$cluster_key")
  [[ -z "$MODEL_PATH" ]] || settings+=(--model-path "$MODEL_PATH")
fi
module longcat_pd.cluster --root "$root" "${@:1:1}" ${settings[@]+"${settings[@]}"} "${@:2}"
exec "${runs[@]}"
