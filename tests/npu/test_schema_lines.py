"""The kept schema lines are those of the wheels (slow: the wheels are a download of `make npu-wheels`)."""

from pathlib import Path

import pytest

from tests.npu.schema_lines import RELEASES, kept, lines_of, wheel_of

WHEELS = Path(__file__).parents[2] / ".npu" / "wheels"


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_the_kept_lines_are_those_of_the_wheel(release: str) -> None:
    wheel = wheel_of(release, WHEELS)
    if wheel is None:
        pytest.skip(f"no wheel of torch_npu {release} in {WHEELS}: make npu-wheels")
    assert lines_of(wheel) == kept(release)
