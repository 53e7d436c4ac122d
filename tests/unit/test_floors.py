"""The plan of the house, enforced: who may import whom, which library only where, and what does not occur."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import parsed

PACKAGE = Path(__file__).parents[2] / "longcat_pd"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = [
    {"curve", "own"},
    {"kernels", "errors", "log", "metrics", "wire", "clock", "faults", "version", "progress"},
    {"config"},
    {"parallel", "kv_cache"},
    {"models", "kv_transfer"},
    {"engine", "sizing"},
    {"server"},
    {"load_balancer", "prefill_worker", "decode_worker", "standalone"},
    {"cli", "cluster", "tiny", "quantize", "bench", "plan", "replay", "fault", "render", "top"},
]
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}
GROUND_MODULES = {"errors", "log", "metrics", "wire", "clock", "faults", "version"}

# Library -> the files and folders (with a slash) that may import it.
TOOLS = tuple(f"{name}{end}" for name in FLOORS[-1] for end in (".py", "/"))
LIBRARIES: dict[str, tuple[str, ...]] = {
    "torch_npu": ("kernels/npu", "engine/ge_graph.py", "engine/npugraph_ex.py", "parallel/platform.py"),
    "torchair": ("kernels/npu", "engine/ge_graph.py", "engine/npugraph_ex.py", "parallel/platform.py"),
    "torch.distributed": (
        "parallel/mesh.py",
        "parallel/joining.py",
        "parallel/collectives.py",
        "parallel/line.py",
        "parallel/meeting.py",
        "parallel/native.py",
        "parallel/pairwise.py",
        "kv_transfer/process_group.py",
    ),
    "zmq": ("curve.py", "wire.py"),
    "msgspec": ("wire.py",),
    "prometheus_client": ("metrics.py",),
    "structlog": ("log.py",),
    "fastapi": ("server/", "load_balancer/"),
    "starlette": ("server/", "load_balancer/"),
    "pydantic": ("server/", "load_balancer/"),
    "uvicorn": ("server/", "load_balancer/"),
    "httpx": ("load_balancer/", *TOOLS),
    "rich": ("top/",),
    "httptools": ("load_balancer/transport.py",),
    "multiprocessing": ("server/launch.py",),
    "yaml": ("config/resolve.py", "render/"),
    "tokenizers": ("server/text.py", "tiny/"),
    "jinja2": ("server/text.py", "tiny/"),
    "safetensors": ("models/weights.py", "models/checkpoint.py"),
    "xgrammar": ("engine/grammar.py",),
    "llguidance": ("engine/grammar.py",),
    "transformers": ("bench/",),
    "opentelemetry": ("server/otel.py",),
    "requests": ("server/otel.py",),
}
TORCH_FREE = (
    "errors.py",
    "log.py",
    "metrics.py",
    "wire.py",
    "curve.py",
    "clock.py",
    "faults.py",
    "version.py",
    "progress/",
    "config/",
    "load_balancer/",
    "cluster/",
    "plan/",
    "render/",
    "top/",
)

# Pattern -> the files that may hold it.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    r"\bpickle\b": (),
    r"os\.environ|os\.getenv|from os import .*environ": ("server/launch.py",),
    r"except\s*:|except\s+\(?(Base)?Exception\b": ("server/errors.py", "engine/rank.py"),
    r"\btime\.sleep\(": (),
    r"\.type ?== ?['\"](npu|cuda|cpu)['\"]|\bis_npu\b|\bif (npu|prefill|decode):": ("parallel/platform.py", "kernels/"),
    r"getattr\([^)]*,[^)]*,": (),
    r"\bhasattr\(": ("kernels/npu/operators.py",),
    r"^\s*global ": (),
    r"importlib(\.| import )metadata": ("cluster/node/packages.py",),  # releases on machines are not installed
    r"\b(TODO|FIXME|XXX)\b|NotImplementedError": (),
}


def place(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def module_of(file: Path) -> str:
    parts = ["longcat_pd", *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file) for file in FILES}


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth; of a `from` import the module that is really meant."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{place(file)}:{node.lineno}: relative import"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield full if full in MODULES or full in LIBRARIES else module

        elif isinstance(node, ast.Attribute) and ast.unparse(node) in LIBRARIES:
            yield ast.unparse(node)


def unit(module: str) -> str:
    """The part of the house that a module of ours belongs to."""
    return module.partition(".")[2].partition(".")[0]


def is_at(file: Path, places: tuple[str, ...]) -> bool:
    return any(place(file).startswith(item) for item in places)


def test_every_part_of_the_house_has_its_floor() -> None:
    parts = {unit(module) for module in MODULES} - {""}
    assert parts <= FLOOR_OF.keys()


def test_imports_go_down_only() -> None:
    wrong = []
    for file in FILES:
        here = unit(module_of(file))
        for module in imports(file):
            there = unit(module) if module.split(".")[0] == "longcat_pd" else here
            if there and there != here and (not here or FLOOR_OF[there] >= FLOOR_OF[here]):
                wrong.append(f"{place(file)} (floor {FLOOR_OF.get(here)}) imports {module} (floor {FLOOR_OF[there]})")
    assert wrong == []


def test_inside_a_part_imports_form_no_ring() -> None:
    edges = {module_of(file): {name for name in imports(file) if name in MODULES} for file in FILES}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in edges[module]:
                walk(other, (*path, module))
            done.add(module)

    for module in edges:
        walk(module, ())


def test_libraries_are_imported_where_they_belong() -> None:
    wrong = []
    for file in FILES:
        for module in imports(file):
            library = next((name for name in LIBRARIES if module == name or module.startswith(f"{name}.")), None)
            if library and not is_at(file, LIBRARIES[library]):
                wrong.append(f"{place(file)} imports {module}")
    assert wrong == []


def test_imports_stand_at_the_top() -> None:
    """But for the device libraries, whose backend is imported when it is chosen."""
    wrong = []
    for file in FILES:
        for function in ast.walk(parsed(file)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = [node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
                wrong += [f"{place(file)}:{node.lineno}" for node in inner if not is_at(file, ("kernels/__init__.py",))]
    assert wrong == []


def test_the_parts_without_torch_name_no_torch() -> None:
    wrong = [
        f"{place(file)} imports {module}"
        for file in FILES
        if is_at(file, TORCH_FREE)
        for module in imports(file)
        if module.split(".")[0] in ("torch", "numpy")
    ]
    assert wrong == []


def test_packages_above_the_kernels_have_empty_inits() -> None:
    inits = [file for file in FILES if file.name == "__init__.py" and not is_at(file, ("kernels/", "__init__.py"))]
    assert [place(file) for file in inits if file.read_text(encoding="utf-8").strip()] == []


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_what_does_not_occur_here(pattern: str) -> None:
    wrong = []
    for file in FILES:
        if not is_at(file, FORBIDDEN[pattern]):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if re.search(pattern, line.split("#")[0]):
                    wrong.append(f"{place(file)}:{number}: {line.strip()}")
    assert wrong == []


MODULES_WITHOUT_TORCH = [
    "longcat_pd.load_balancer.app",
    "longcat_pd.cluster.__main__",
    "longcat_pd.cli",
    "longcat_pd.plan.command",
    "longcat_pd.render.main",
    "longcat_pd.top.command",
]


@pytest.mark.parametrize("module", MODULES_WITHOUT_TORCH)
def test_a_fresh_interpreter_stays_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(', '.join(m for m in ('torch', 'transformers') if m in sys.modules) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_has_one_module_for_each_name() -> None:
    assert not [file for file in FILES if file.with_suffix("").is_dir()]
