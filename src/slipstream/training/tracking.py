"""The W&B logger: online when the user is logged in, offline otherwise, never waiting for input."""

import os


def wandb_logger(project: str, save_dir: str):
    """A Lightning `WandbLogger`; `WANDB_MODE` of the environment wins."""
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    logged_in = wandb.login(prompt=False)
    mode = os.environ.get("WANDB_MODE", "online" if logged_in else "offline")
    settings = wandb.Settings(silent=True, init_timeout=30)
    return WandbLogger(project=project, save_dir=save_dir, mode=mode, settings=settings)
