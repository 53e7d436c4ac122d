#!/usr/bin/env bash
# Start, look at and stop a cluster: run_pd.sh start|status|stop|logs [CLUSTER_YAML] [--set key.path=value …]
# Makes .venv at the root of the repository on first use and whenever pyproject.toml has changed, then hands over.
set -euo pipefail

# shellcheck source=deploy/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
exec "$venv/bin/python" -m longcat_pd.cluster --root "$root" "$@"
