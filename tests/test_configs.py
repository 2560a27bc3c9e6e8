"""Every config composes, names known keys only and can be built; old names lead to new ones."""

import inspect
import re

import pytest
from hydra.errors import MissingConfigException
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from tests.commands import ROOT, config_of
from tests.exhaustive import sparing

from slipstream.commands import Infer
from slipstream.configuration import RENAMED, build, check_config, own_part
from slipstream.core.errors import InputError
from slipstream.training.command import Train

OLD_NAMES = {
    "data": "dialogsum e2e e2e_wikisql given jsonl lm1b prompts prompts_dialogsum prompts_e2e "
    "prompts_lm1b prompts_wikipedia prompts_wikisql synthetic ultrachat wikipedia wikisql",
    "drafter": "adaedl anpd assistant_threshold combined combined_text combined_untrained disco "
    "draft_model gammatune gammatune_plus heuristic lookahead prompt_lookup rest specdec_plus_plus "
    "spectra spectra_retrieval streaming token_recycling unispec",
    "experiment": "acceptance_gpt2 acceptance_gpt_neo acceptance_small all_drafters application "
    "application_baseline application_lossless application_shared demo fine_tuning gpt2_xl "
    "gpt_neo_1b3 llama2_13b_chat llama2_7b_chat llama3_8b_instruct mistral_7b_instruct opt_1b3 "
    "opt_6b7 phi3_mini qwen3_8b real_target small_draft small_target small_target_copying "
    "sprinter_gpt2 sprinter_gpt_neo sprinter_real sprinter_small streaming_budgets streaming_demo "
    "streaming_small streaming_small_pairs vicuna_13b vicuna_33b vicuna_7b",
    "experiment/evidence": "acceptance applications batches context device draft_lengths "
    "draft_size draft_size_others drafting_costs gradients msa_layers overheads peeking pruning "
    "quantization segments similarity sprinter_theory top_k_sampling trees two_models "
    "value_rotation verifier",
    "length": "adaedl assistant_threshold disco gammatune gammatune_plus heuristic "
    "specdec_plus_plus",
    "methods": "all application baselines budgets drafter drafters spectra_ablation sprinter "
    "unispec_ablation unispec_thresholds",
    "target": "gpt2_xl gpt_neo_1b3 hub llama2_13b_chat llama2_7b_chat llama3_8b_instruct "
    "mistral_7b_instruct opt_1b3 opt_6b7 phi3_mini qwen3_8b small vicuna_13b vicuna_33b vicuna_7b",
}
"""What could be given by name before configs were composed of one another."""
DECODING = {"all_drafters", "demo"}
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
        config = own_part(config_of("infer", f"experiment={name}"), Infer, Train)
        check_config(config, Infer)
        if not both:
            return
    second = {"small_target_copying", "streaming_small_pairs"}
    mine = ["target.name=mine"] if name == "real_target" else []
    config = own_part(config_of("train", f"experiment={name}", *mine), Train, Infer)
    if name in second:  # stages, of which nobody can know what they go on from
        with pytest.raises(InputError, match=r"^training.start_from: has no value"):
            check_config(config, Train)
        config.training.start_from = "first"
    check_config(config, Train)
    for part in (config.training, config.data):
        assert set(part) - {"_target_"} == parameters_of(part) - {"target", "speculator"}, part
    build(config.speculator)


@pytest.mark.parametrize("group", OLD_NAMES)
def test_every_old_name_is_kept_or_has_a_successor(group):
    for name in OLD_NAMES[group].split():
        kept = (ROOT / "conf" / group / f"{name}.yaml").exists()
        assert kept != (f"{group}/{name}" in RENAMED), f"{group}/{name}"


OF_INFER = re.compile("drafter|study|data/prompts|methods|experiment/(evidence|streaming_budgets)")
SUCCESSORS = sorted({("infer" if OF_INFER.match(n) else "train", RENAMED[n]) for n in RENAMED})


@pytest.mark.parametrize(
    ("command", "successor"),
    # that studies, experiments and targets compose by their names, other tests prove
    sparing(
        SUCCESSORS,
        lambda _, each: not re.fullmatch(r"(study|experiment)=\w+( target=\w+)?", each),
    ),
)
def test_every_successor_composes(command, successor):
    own, other = (Infer, Train) if command == "infer" else (Train, Infer)
    config = own_part(config_of(command, *successor.split()), own, other)
    check_config(config, own)


def test_data_sets_of_the_hub_come_together():
    """Of any command: prompts to decode, or rows to learn from."""
    for command in ("train", "infer"):
        config = config_of(command, "hub=[e2e,wikipedia]")
        assert list(config.data.hub) == ["e2e", "wikipedia"]
        build(config.data)


@pytest.mark.parametrize("override", ["length", "+length@drafter.length"])
@pytest.mark.parametrize("drafter", ["adaptive", "anpd", "streaming"])
def test_a_rule_for_the_length_goes_with_any_drafter(drafter, override):
    config = config_of("infer", f"drafter={drafter}", f"{override}=gammatune_plus")
    assert build(config.drafter.length).threshold == 0.3
    check_config(config, Infer)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_can_be_built(name):
    config = config_of("infer", f"study={name}")
    check_config(config, Infer)
    if config.study is not None:  # else it is a multirun: tests/studies/test_multiruns.py
        study = instantiate(config.study, _partial_=True, _convert_="all")
        given = {"target", "prompts", *study.keywords}
        assert given == set(inspect.signature(study.func).parameters)
    build(config.data)


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
    config = config_of("train", "experiment=sprinter_real", "draft=other")
    assert config.training.draft.name == "other"
    own = ("draft=other", "training.draft.name=own")
    config = config_of("train", "experiment=sprinter_real", *own)
    assert config.training.draft.name == "own"


@pytest.mark.parametrize("name", ["train", "infer"])
@pytest.mark.parametrize("override", ["experiment=no_such", "debug=no_such"])
def test_groups_that_may_be_left_out_take_no_unknown_names(name, override):
    with pytest.raises(MissingConfigException):
        config_of(name, override)
