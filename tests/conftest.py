"""Settings for all tests: few threads (the machines are small) and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what tests start, too

import torch
from hypothesis import settings
from tests.enumeration import chance  # noqa: F401

torch.set_num_threads(1)
settings.register_profile("machine", deadline=None, derandomize=True)
settings.load_profile("machine")
