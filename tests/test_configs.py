"""Every experiment composes, names known keys only, and its parts can be built."""

import inspect

import hydra
import pytest
from hydra.errors import MissingConfigException
from hydra.utils import get_class
from omegaconf import OmegaConf
from tests.commands import ROOT, config_of

from slipstream import app
from slipstream.app import INFER_KEYS, TRAIN_KEYS
from slipstream.configuration import build, check_keys, own_part

DECODING = {"all_drafters", "demo", "streaming_budgets"}
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
STUDIES = sorted(path.stem for path in (ROOT / "conf" / "study").glob("*.yaml"))


def parameters_of(node) -> set[str]:
    """The names that the class of a config node takes."""
    function = get_class(node._target_).__init__
    return set(function.__code__.co_varnames[1 : function.__code__.co_argcount])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name):
    both = name not in DECODING and "both_commands" in config_of("train", f"experiment={name}")
    if name in DECODING or both:
        config = own_part(config_of("infer", f"experiment={name}"), INFER_KEYS, TRAIN_KEYS)
        check_keys(config, INFER_KEYS)
        if not both:
            return
    config = own_part(config_of("train", f"experiment={name}"), TRAIN_KEYS, INFER_KEYS)
    check_keys(config, TRAIN_KEYS)
    for part in (config.training, config.data):
        assert set(part) - {"_target_"} == parameters_of(part) - {"target", "speculator"}, part
    build(config.speculator)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_built(name):
    config = config_of("infer", f"study={name}")
    check_keys(config, INFER_KEYS)
    if config.study is not None:  # else it is a multirun: tests/studies/test_multiruns.py
        study = hydra.utils.instantiate(config.study, _partial_=True, _convert_="all")
        given = {"target", "prompts", *study.keywords}
        assert given == set(inspect.signature(study.func).parameters)
    build(config.data)


@pytest.mark.parametrize("name", STUDIES)
def test_what_was_evidence_is_named_with_its_successor(name):
    with pytest.raises(MissingConfigException) as caught:
        config_of("infer", f"experiment=evidence/{name}")
    assert app._remedy(caught.value) == f"it is now study={name}"


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        ("infer", ["drafter=draft_model"]),
        ("infer", ["experiment=all_drafters"]),
        ("infer", ["experiment=demo"]),
        ("infer", ["methods=sprinter"]),
        ("infer", ["experiment=sprinter_small"]),
        ("infer", ["study=two_models"]),
        ("infer", ["study=draft_lengths"]),
        ("infer", ["study=verifier"]),
        ("train", ["experiment=sprinter_small"]),
    ],
)
def test_the_draft_model_is_given_once(command, overrides):
    config = config_of(command, *overrides, "draft=some/draft")
    text = OmegaConf.to_yaml(config, resolve=True)
    assert "small-draft" not in text and text.count("some/draft") > 1


def test_what_is_given_to_one_drafter_wins_over_the_draft_model():
    config = config_of("infer", "drafter=draft_model", "drafter.model.name=own", "draft=other")
    assert config.drafter.model.name == "own"
    config = config_of("train", "experiment=sprinter_gpt2")
    assert config.training.draft.name == "openai-community/gpt2"
    config = config_of("train", "experiment=sprinter_gpt2", "training.draft.name=own")
    assert config.training.draft.name == "own"


@pytest.mark.parametrize("name", ["train", "infer"])
@pytest.mark.parametrize("override", ["experiment=no_such", "debug=no_such"])
def test_groups_that_may_be_left_out_take_no_unknown_names(name, override):
    with pytest.raises(MissingConfigException):
        config_of(name, override)
