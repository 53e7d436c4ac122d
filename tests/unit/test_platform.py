"""parallel/platform.py: which kinds of devices there are. That ranks use it shows integration/test_rank_process.py."""

import pytest

from longcat_pd.errors import ConfigError
from longcat_pd.parallel.platform import platform_of


def test_cpu_talks_over_gloo_with_one_thread_a_rank() -> None:
    platform = platform_of("cpu")
    assert (platform.collective_backend, platform.threads) == ("gloo", 1)


def test_an_unknown_kind_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="no such platform") as caught:
        platform_of("abacus")
    assert caught.value.param == "device"
