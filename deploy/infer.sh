#!/usr/bin/env bash
# Run a model offline: infer.sh --model longcat_flash_lite|longcat_flash --yaml FILE [--set key.path=value …] [--check]
# A bare file name is looked up in deploy/config/offline/. Makes .venv at the root of the repository on first use and whenever
# pyproject.toml has changed, and the tiny checkpoint of a file there that ends in _cpu.yaml, then hands over.
set -euo pipefail

# shellcheck source=deploy/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

models="$root/.run/models"

made() { # PATH NAME COMMAND…: a checkpoint, unless it is there
  if [[ ! -f "$1/config.json" ]]; then
    mkdir -p "$root/.run"
    one_at_a_time "$root/.run/making.lock" make_one "$@"
  fi
}

make_one() {
  if [[ ! -f "$1/config.json" ]]; then # the one that was waited for may have made it
    step "$root/.run/making.log" "${@:2}"
  fi
}

tiny() { # VARIANT: small, with random weights
  module longcat_pd.tiny --variant "$1" --out "$models/tiny-$1"
  made "$models/tiny-$1" "making a small random checkpoint in $models/tiny-$1 (once)" "${runs[@]}"
}

in_int8() { # VARIANT: the same with int8 MLPs and experts
  tiny "$1"
  module longcat_pd.quantize "$models/tiny-$1" "$models/tiny-$1-w8a8"
  made "$models/tiny-$1-w8a8" "making its int8 twin (once)" "${runs[@]}"
}

arguments=()
is_file=
for argument in "$@"; do
  if [[ -n "$is_file" || "$argument" == --yaml=* ]]; then
    yaml="${argument#--yaml=}"
    if [[ "$yaml" != */* && ! -f "$yaml" ]]; then
      yaml="$root/deploy/config/offline/$yaml"
    fi
    if [[ -f "$yaml" && "$(cd "$(dirname "$yaml")" && pwd)" == "$root/deploy/config/offline" ]]; then
      case "$(basename "$yaml")" in
        longcat_flash_lite_*_w8a8_cpu.yaml) in_int8 lite ;;
        longcat_flash_lite_*_cpu.yaml) tiny lite ;;
        longcat_flash_*_cpu.yaml) tiny chat ;;
      esac
    fi
    arguments+=("--yaml=$yaml")
    is_file=
  elif [[ "$argument" == --yaml ]]; then
    is_file=1
  else
    arguments+=("$argument")
  fi
done
module longcat_pd.cli infer ${arguments[@]+"${arguments[@]}"}
exec "${runs[@]}"
