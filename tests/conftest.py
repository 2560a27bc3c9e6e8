"""Settings for all tests: few threads (the machines are small) and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")

import torch

torch.set_num_threads(1)
