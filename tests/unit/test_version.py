"""The version that the code says of itself."""

from __future__ import annotations

import re

from longcat_pd.version import VERSION
from tests.clone import ROOT


def test_the_code_has_the_version_of_its_project() -> None:
    told = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert told is not None and told.group(1) == VERSION
