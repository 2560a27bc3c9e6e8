"""Decode, compare and verify: python infer.py experiment=demo, or prompt=TEXT."""

import sys

import hydra
from omegaconf import DictConfig

from slipstream import app, entry


@hydra.main(version_base="1.3", config_path="conf", config_name="infer")
def main(config: DictConfig) -> None:
    with entry.one_sentence():
        found = app.infer(entry.in_own_folder(config))
        if config.verify and not all(each.numeric_tie for each in found):
            sys.exit(1)


if __name__ == "__main__":
    entry.run(main)
