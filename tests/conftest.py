"""Settings for all tests: few threads (the machines are small) and no network."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what tests start, too

import torch
import yaml
from hypothesis import settings
from tests.enumeration import chance  # noqa: F401

from slipstream.targets import packed

torch.set_num_threads(1)
# Hundreds of configs are composed: read by the library's C parser, where it has one. (What tests
# start as a process of its own reads them as users do.)
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
packed.MARGIN = 0.0  # tests are of reordered weights, whatever is faster on their machine


def pytest_collection_finish() -> None:
    """What was imported stays: collecting garbage need not look at it."""
    gc.collect()
    gc.freeze()


settings.register_profile("machine", deadline=None, derandomize=True)
settings.load_profile("machine")
