"""Train a speculator, or one of the shipped models: python train.py experiment=NAME."""

import hydra
from omegaconf import DictConfig

from slipstream import app


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    with app.one_sentence():
        app.train(app.in_own_folder(config))


if __name__ == "__main__":
    app.run(main)
