"""Schema lines of Ascend operators, read from a torch_npu wheel without loading it.

The strings with which torch_npu registers its operators are plain text in a shared object of the wheel. The command
keeps those that a backend for LongCat could call (`schemas/operators.txt`) in `schemas/<release>.txt`, one a line, sorted.
Knows nothing of what an operator means.

    python -m tests.npu.schema_lines <folder of wheels>
"""

import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

RELEASES = ("2.6.0.post5", "2.13.0")
SCHEMAS = Path(__file__).with_name("schemas")
LIBRARY = "libtorch_npu.so"

# Every operator a backend could choose, older and newer variants and functional twins included; a release lacks some.
OPERATORS = frozenset((SCHEMAS / "operators.txt").read_text().split())

LINE = re.compile(rb"(?<![\w.:])((?:[A-Za-z_]\w*::)?\w+(?:\.\w+)?\([^\0\n]{0,6000}?\) -> [^\0\n]{1,400})(?=[\0\n])")


def operator_of(line: str) -> str:
    """`npu_x` of the line `npu_x.overload(...) -> ...`."""
    return line.partition("(")[0].rpartition("::")[2].partition(".")[0]


def lines_of(wheel: Path) -> list[str]:
    """The lines of OPERATORS in a wheel, sorted; overloads that write into `out` are left out, nothing calls them."""
    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(f"/{LIBRARY}"):
                found.update(match.decode("ascii", "replace") for match in LINE.findall(archive.read(name)))
    wanted = {line.removeprefix("npu::") for line in found if operator_of(line) in OPERATORS}
    return sorted(line for line in wanted if not line.partition("(")[0].endswith(".out"))


def wheel_of(release: str, folder: Path) -> Path | None:
    """The wheel of a release in `folder`, None where there is none."""
    return next(iter(sorted(folder.glob(f"torch_npu-{release}-*.whl"))), None)


def kept(release: str) -> list[str]:
    """The lines that the repository keeps for a release."""
    return (SCHEMAS / f"{release}.txt").read_text().splitlines()


def main(arguments: Iterable[str]) -> None:
    """Write the files of every release whose wheel lies in the folder."""
    folder = Path(next(iter(arguments)))
    for release in RELEASES:
        wheel = wheel_of(release, folder)
        if wheel is None:
            print(f"{release}: no wheel in {folder}")
            continue
        lines = lines_of(wheel)
        (SCHEMAS / f"{release}.txt").write_text("".join(f"{line}\n" for line in lines))
        print(f"{release}: {len(lines)} lines")


if __name__ == "__main__":
    main(sys.argv[1:])
