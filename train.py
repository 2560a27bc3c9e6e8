"""Train a speculator, or one of the shipped models: python train.py experiment=NAME."""

import hydra
from omegaconf import DictConfig

from slipstream import app, entry


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    with entry.one_sentence():
        app.train(entry.in_own_folder(config))


if __name__ == "__main__":
    entry.run(main)
