"""Nothing that comes from outside is turned into objects by running it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.syntax import parsed

PACKAGE = Path(__file__).parents[2] / "longcat_pd"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle", "xmlrpc"}
CALLS = {
    "torch.load", "torch.jit.load", "torch.save", "numpy.load", "np.load", "yaml.load", "yaml.full_load",
    "yaml.unsafe_load", "eval", "exec", "compile",
}  # fmt: skip
OF_ANYTHING = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "send_pyobj", "recv_pyobj", "recv_serialized", "send_serialized", "rpc_sync", "rpc_async",
}  # fmt: skip
# Parent and child over an inherited pipe, nobody else: the forkserver hands a rank its arguments.
MULTIPROCESSING = {"server/launch.py": {"Process", "get_context", "parent_process", "resource_tracker"}}


def found(tree: ast.AST) -> list[str]:
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wrong += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            wrong.append(node.module or "")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.rpartition(".")[2] in OF_ANYTHING:
                wrong.append(f"line {node.lineno}: {name}")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_no_file_unpickles(file: Path) -> None:
    assert found(parsed(file)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(f)",
        "dist.all_gather_object(a, b)",
        "s.recv_pyobj()",
        "eval(t)",
    ],
)
def test_it_would_be_seen(code: str) -> None:
    assert found(ast.parse(code))


def test_queues_and_pipes_of_multiprocessing_carry_nothing() -> None:
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        if "multiprocessing" in text and file.relative_to(PACKAGE).as_posix() not in MULTIPROCESSING:
            imported = [n for n in ast.walk(parsed(file)) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not any("multiprocessing" in ast.unparse(node) for node in imported), file
    launch = parsed(PACKAGE / "server" / "launch.py")
    called = {ast.unparse(n.func).rpartition(".")[2] for n in ast.walk(launch) if isinstance(n, ast.Call)}
    assert not called & {"Queue", "SimpleQueue", "JoinableQueue", "Pipe", "Manager", "Listener", "Client", "Pool"}
