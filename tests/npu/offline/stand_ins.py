"""Link stand-ins: empty shared objects in place of CANN's, so that torch_npu can be imported on a machine without it.

What the wheel's libraries need and nobody on the machine offers is found with readelf and nm, and compiled with gcc:
one library that answers every missing function with an error code, and for each other name a library that only links
to the first. Schemas, shape functions and graph building call none of them but the few in ANSWERS. Knows nothing of
Python's side of torch_npu.

    python -m tests.npu.offline.stand_ins <folder with torch_npu> <folder to write>
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

CARRIER = "libascendcl.so"
OPENED_BY_NAME = ("libopapi.so",)  # torch_npu looks for functions in it at run time, without linking it
SYSTEM = re.compile(r"^(lib(stdc\+\+|m|gcc_s|pthread|c|dl|rt|util)\.so|ld-linux)")

# Called while torch_npu is imported (no device, a named processor, an empty error text, no log), and by the device guard of
# FakeTensors that claim to be on one.
ANSWERS = {
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { *device = 0; return 0; }",
    "aclrtSetDevice": "int aclrtSetDevice(int device) { return 0; }",
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B3"; }',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return ""; }',
    "aclAppLog": "void aclAppLog(void) { }",
}
UNKNOWN = "long {name}(void) {{ return 500000; }}"


def libraries(folder: Path) -> list[Path]:
    """The shared objects under a folder."""
    return sorted(path for path in folder.rglob("*.so*") if path.is_file())


def needed(paths: list[Path]) -> set[str]:
    """The names of libraries that the given ones are linked to."""
    text = _run("readelf", "-d", *map(str, paths))
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))


def symbols(paths: list[Path], kind: str) -> Iterator[str]:
    """Dynamic symbols (`--defined-only`, `--undefined-only`) without a version; those with one belong to the system."""
    for line in _run("nm", "-D", kind, "--format=posix", *map(str, paths)).splitlines():
        name, _, rest = line.partition(" ")
        if rest and not name.endswith(":") and not (kind == "--undefined-only" and (rest.split()[0] != "U" or "@" in name)):
            yield name.partition("@")[0]


def generate(site: Path, folder: Path) -> dict[str, int]:
    """Write the stand-ins; returns how many libraries and functions were missing."""
    wheel = libraries(site / "torch_npu")
    torch_libraries = libraries(Path(torch.__file__).parent / "lib")
    present = {path.name for path in wheel + torch_libraries}
    absent = {name for name in needed(wheel) if name not in present and not SYSTEM.match(name)}
    offered = set(symbols(wheel + torch_libraries, "--defined-only"))
    missing = {
        name for name in symbols(wheel, "--undefined-only") if name not in offered and not name.startswith(("Py", "_Py"))
    }
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stand_in.c"
    source.write_text(
        "\n".join(ANSWERS.get(name) or UNKNOWN.format(name=name) for name in sorted(missing | set(ANSWERS))) + "\n"
    )
    _run("gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{CARRIER}", "-o", str(folder / CARRIER), str(source))
    empty = folder / "empty.c"
    empty.write_text("")
    for name in sorted((absent | set(OPENED_BY_NAME)) - {CARRIER}):
        link = ("-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", f"-L{folder}", f"-l:{CARRIER}")
        _run("gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(empty), *link)
    return {"libraries": len(absent), "functions": len(missing)}


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    print("stand-ins:", generate(Path(sys.argv[1]), Path(sys.argv[2])))
