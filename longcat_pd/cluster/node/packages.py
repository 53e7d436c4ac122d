"""What the interpreter of a machine has. It is sent there as text, so it knows nothing of us; an old Python can read it.

Arguments: ``distribution=module`` for each package that is needed. Prints JSON: ``python`` (its version), ``missing``
(distributions whose module cannot be found) and ``versions`` (of those that are there; "" where none was noted).
"""

import importlib.util
import json
import sys

if sys.version_info < (3, 10):  # noqa: UP036 - it is asked whether it is
    sys.stdout.write(json.dumps({"python": sys.version.split()[0], "missing": [], "versions": {}}))
    sys.exit(0)

from importlib import metadata


def version_of(distribution: str) -> str:
    """As it was installed; "" if nothing was noted."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Look for each."""
    wanted = dict(argument.split("=", 1) for argument in sys.argv[1:])
    missing = [name for name, module in wanted.items() if importlib.util.find_spec(module) is None]
    versions = {name: version_of(name) for name in wanted if name not in missing}
    sys.stdout.write(json.dumps({"python": sys.version.split()[0], "missing": missing, "versions": versions}))


if __name__ == "__main__":
    main()
