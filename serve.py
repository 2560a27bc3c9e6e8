"""Serve a model over HTTP, as the OpenAI API has it: python serve.py port=8000."""

import hydra
from omegaconf import DictConfig

from slipstream import app, entry


@hydra.main(version_base="1.3", config_path="conf", config_name="serve")
def main(config: DictConfig) -> None:
    with entry.one_sentence():
        app.serve(config)


if __name__ == "__main__":
    entry.run(main)
