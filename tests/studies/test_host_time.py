"""The script that times the host's part of a step."""

import pytest
from studies.host_time import step_seconds


@pytest.mark.parametrize("settings", [("deferred", 0.0), ("fused", 0.0), ("deferred", 1.0)])
def test_a_step_takes_time_though_its_layers_do_nothing(settings):
    assert step_seconds(6, 2, 2, *settings) > 0
