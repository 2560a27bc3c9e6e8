"""The two commands as tests call them: compose the config and call what the script calls."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

ROOT = Path(__file__).parent.parent


def config_of(name: str, *overrides: str) -> DictConfig:
    """The config of `train.py` or `infer.py` with overrides, as Hydra would give it."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, overrides=list(overrides))
