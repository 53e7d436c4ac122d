"""Tests that need the real torch_npu; each module imports `tests.npu.offline.real`, which skips it elsewhere."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of torch_npu and torchair are theirs."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
