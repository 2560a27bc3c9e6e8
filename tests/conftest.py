"""Settings for all tests: few threads (the machines are small) and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what tests start, too

import torch
from hypothesis import settings
from tests.enumeration import chance  # noqa: F401

from slipstream.targets import packed

torch.set_num_threads(1)
packed.MARGIN = 0.0  # tests are of reordered weights, whatever is faster on their machine
settings.register_profile("machine", deadline=None, derandomize=True)
settings.load_profile("machine")
