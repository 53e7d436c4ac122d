#!/usr/bin/env bash
# Run a model offline: infer.sh --model longcat_flash_lite|longcat_flash --yaml FILE [--set key.path=value …] [--check]
# A bare file name is looked up in deploy/config/offline/. Makes .venv at the root of the repository on first use and whenever
# pyproject.toml has changed, and the tiny checkpoint of a file there that ends in _cpu.yaml, then hands over.
set -euo pipefail

# shellcheck source=deploy/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

tiny() { # VARIANT: a small random checkpoint, unless it is there
  local path="$root/.run/models/tiny-$1"
  if [[ ! -f "$path/config.json" ]]; then
    mkdir -p "$root/.run"
    step "$root/.run/making.log" "making a small random checkpoint in $path (once)" \
      "$venv/bin/python" -m longcat_pd.tiny --variant "$1" --out "$path"
  fi
}

in_int8() { # VARIANT: the same with int8 MLPs and experts
  tiny "$1"
  if [[ ! -f "$root/.run/models/tiny-$1-w8a8/config.json" ]]; then
    step "$root/.run/making.log" "making its int8 twin (once)" \
      "$venv/bin/python" -m longcat_pd.quantize "$root/.run/models/tiny-$1" "$root/.run/models/tiny-$1-w8a8"
  fi
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
exec "$venv/bin/python" -m longcat_pd.cli infer ${arguments[@]+"${arguments[@]}"}
