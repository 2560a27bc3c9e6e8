"""Every experiment composes, names known keys only, and its parts can be built."""

import pytest
from hydra.errors import MissingConfigException
from hydra.utils import get_class
from omegaconf import OmegaConf
from tests.commands import ROOT, config_of

from slipstream.app import INFER_KEYS, TRAIN_KEYS
from slipstream.configuration import build, check_keys, own_part
from slipstream.targets.loading import load_target

DECODING = {"all_drafters", "demo", "streaming_budgets"}
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
STUDIES = sorted(path.stem for path in (ROOT / "conf" / "study").glob("*.yaml"))
VARIANTS = [
    (name, overrides)
    for name in STUDIES
    for overrides in OmegaConf.load(ROOT / "conf" / "study" / f"{name}.yaml")
    .get("variants", {})
    .values()
]


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
    experiment = "sprinter_small" if name == "sprinter" else f"evidence/{name}"
    config = own_part(config_of("infer", f"experiment={experiment}"), INFER_KEYS, TRAIN_KEYS)
    check_keys(config, INFER_KEYS)
    build(config.study)
    build(config.data)


@pytest.mark.parametrize(("study", "overrides"), VARIANTS)
def test_every_variant_fits_the_small_target(study, overrides):
    recipe = config_of("infer", f"experiment=evidence/{study}").study.recipe
    speculator = build(config_of("train", *recipe, *overrides).speculator)
    speculator.check_against(load_target("slipstream/small-target", packed=False))


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        ("infer", ["drafter=draft_model"]),
        ("infer", ["experiment=all_drafters"]),
        ("infer", ["experiment=demo"]),
        ("infer", ["methods=sprinter"]),
        ("infer", ["experiment=sprinter_small"]),
        ("infer", ["experiment=evidence/two_models"]),
        ("infer", ["experiment=evidence/draft_lengths"]),
        ("infer", ["experiment=evidence/verifier"]),
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
