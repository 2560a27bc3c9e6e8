"""Settings for all tests: few threads (the machines are small) and no network."""

import gc
import os
import time
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what tests start, too
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # what the processor names need not be tried

import pytest
import torch
import yaml
from hypothesis import settings
from tests.enumeration import chance  # noqa: F401

from slipstream.evaluation import run
from slipstream.targets import packed

torch.set_num_threads(1)
# Hundreds of configs are composed: read by the library's C parser, where it has one. (What tests
# start as a process of its own reads them as users do.)
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
packed.MARGIN = 0.0  # tests are of reordered weights, whatever is faster on their machine
# Below hundreds of tables stands what rows cost, which few tests look at.
run.row_costs = partial(run.row_costs, repeats=1, counts=(1, 2))
END = time.monotonic() + 60 * float(os.environ.get("SLIPSTREAM_TEST_MINUTES", "inf"))
"""When the full products end, whatever is left of them: for machines that are slow or lent."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > END and item.get_closest_marker("exhaustive"):
        pytest.skip("SLIPSTREAM_TEST_MINUTES are over")


def pytest_collection_finish() -> None:
    """What was imported stays: collecting garbage need not look at it."""
    gc.collect()
    gc.freeze()


settings.register_profile("machine", deadline=None, derandomize=True)
settings.load_profile("machine")
