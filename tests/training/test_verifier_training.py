"""Training classifiers of drafted tokens through train.py's call, on tiny models.

That tokens of one prompt were on both sides of the split is a fault of SPRINTER's public code.
"""

import csv
import json
import re
import shutil
from dataclasses import fields

import pytest
import torch
from omegaconf import OmegaConf
from tests.commands import config_of, refused
from tests.tiny import save_tiny_target, tiny_tokenizer

import slipstream.training.verifier as training
from slipstream import app
from slipstream.commands import Infer
from slipstream.configuration import build, check_config, own_part
from slipstream.core.errors import InputError
from slipstream.core.settings import arguments_of
from slipstream.data.labelled_drafts import labelled_drafts
from slipstream.data.prompt_completion import PromptCompletionData
from slipstream.speculators.base import new_speculator
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.classifiers import AcceptanceHead, SprinterVerifier
from slipstream.targets.loading import load_target
from slipstream.training import run
from slipstream.training.command import Train
from slipstream.training.verifier import THRESHOLDS, calibration, rates

NUM_TRAIN, NUM_VALIDATION, NUM_SHARED, NUM_NEW = 24, 16, 4, 4
PATIENCE = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target, a draft model, and rows of random words; `NUM_SHARED` prompts are in both splits
    with other answers."""
    folder, generator = tmp_path_factory.mktemp("world"), torch.Generator().manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "w3"
    save_tiny_target(folder / "target", 0, tokenizer)
    save_tiny_target(folder / "draft", 1, tokenizer, num_hidden_layers=2)

    def words(count: int) -> str:
        numbers = torch.randint(4, 40, (count,), generator=generator).tolist()
        return " ".join(f"w{number}" for number in numbers)

    prompts = [words(5) for _ in range(NUM_TRAIN + NUM_VALIDATION - NUM_SHARED)]
    (folder / "rows").mkdir()
    for split, own in (
        ("train", prompts[:NUM_TRAIN]),
        ("validation", prompts[NUM_TRAIN - NUM_SHARED :]),
    ):
        lines = [json.dumps({"prompt": prompt, "completion": words(7)}) for prompt in own]
        (folder / "rows" / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def train(world, output, *overrides, experiment="sprinter_small"):
    own = [f"experiment={experiment}"] if experiment else []
    return app.train(
        config_of(
            "train", *own, f"target.name={world}/target", f"training.draft.name={world}/draft",
            f"data.path={world}/rows", "data.regenerate=false", f"data.max_new_tokens={NUM_NEW}",
            f"training.cache_dir={world}/labels", "training.batch_size=64", "logger=csv",
            f"output_dir={output}", *overrides,
        )
    )  # fmt: skip


class Trained:
    """A finished run: its folder, its module, the weight of its last state, and what the saved
    state said of its validation set."""

    def __init__(self, world, output, experiment, *overrides):
        save, write, end = training.VerifierTraining.save, training.write_curves, run.finish

        def finishing(trainer, module, *rest):
            self.last_weight = module.verifier.linear.weight.detach().clone()
            return end(trainer, module, *rest)

        def saving(module, folder, card):
            self.module = module
            save(module, folder, card)

        def writing(folder, outputs, probabilities, labels):
            self.probabilities, self.labels = probabilities, labels
            return write(folder, outputs, probabilities, labels)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training.VerifierTraining, "save", saving)
            patch.setattr(training, "write_curves", writing)
            patch.setattr(run, "finish", finishing)
            self.folder = train(world, output, *overrides, experiment=experiment)
        self.output = output
        self.draft = load_target(str(world / "draft"), packed=False)
        self.target = load_target(str(world / "target"), packed=False)
        self.cache = world / "labels"

    def drafts(self, split):
        samples = self.module.data.samples[split]
        return labelled_drafts(
            self.draft, self.target, samples, NUM_NEW, self.cache, int(split == "train")
        )

    def raw_features(self, split, verifier):
        own = self.drafts(split)
        return verifier.features(own.hidden, own.tokens, own.shapes, own.log_probabilities)

    def validations(self):
        """Records of metrics.csv that tell an AUROC, in order."""
        with (self.output / "metrics" / "metrics.csv").open() as file:
            return [record for record in csv.DictReader(file) if record["validation/auroc"]]


@pytest.fixture(scope="module")
def sprinter(world, tmp_path_factory):
    return Trained(
        world, tmp_path_factory.mktemp("sprinter"), "sprinter_small", "trainer.max_epochs=40",
        f"callbacks.stopping.patience={PATIENCE}", "training.learning_rate=0.05",
    )  # fmt: skip


@pytest.fixture(scope="module")
def acceptance(world, tmp_path_factory):
    return Trained(
        world, tmp_path_factory.mktemp("acceptance"), "acceptance_small", "trainer.max_epochs=2"
    )


@pytest.fixture(params=["sprinter", "acceptance"])
def trained(request):
    return request.getfixturevalue(request.param)


def test_a_folder_for_the_draft_model_and_no_other(trained, world):
    expected = {"sprinter": SprinterVerifier, "acceptance": AcceptanceHead}
    verifier = load_speculator(trained.folder, trained.draft)
    assert type(verifier) is expected[verifier.kind]
    assert verifier.config.judged == trained.target.fingerprint
    assert "was trained for" in refused(lambda: load_speculator(trained.folder, trained.target))
    assert "validation auroc" in (trained.folder / "README.md").read_text()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_sets_are_the_labelled_drafts_of_their_prompts(trained, split):
    """And so never divided by token."""
    features, labels = trained.module.sets[split]
    drafts = trained.drafts(split)
    raw = trained.raw_features(split, load_speculator(trained.folder, trained.draft))
    found = features * trained.module.scale + trained.module.mean
    torch.testing.assert_close(found, raw, rtol=1e-4, atol=1e-4)
    ratios = drafts.log_ratios.exp()
    if trained.module.verifier.kind == "sprinter":
        expected = torch.stack([ratios <= bound for bound in (1.0, 1.2, 1.5)], 1).float()
        assert (labels == expected).all()
        assert sorted(labels.mean(0).tolist()) == labels.mean(0).tolist()
    else:
        expected = (1 / ratios).clamp(max=1)[:, None]
        torch.testing.assert_close(labels, expected)


def test_features_are_standardised_by_the_training_set(trained):
    features, _ = trained.module.sets["train"]
    torch.testing.assert_close(features.mean(0), torch.zeros_like(features[0]), rtol=0, atol=1e-4)
    torch.testing.assert_close(features.std(0), torch.ones_like(features[0]), rtol=0, atol=1e-4)


def test_no_prompt_is_on_both_sides(sprinter):
    """A validation prompt that is also trained on is left out."""
    samples = sprinter.module.data.samples
    prompts = {
        split: [tuple(sample.ids[: sample.prompt_length]) for sample in own]
        for split, own in samples.items()
    }
    assert len(prompts["train"]) == NUM_TRAIN
    assert len(prompts["validation"]) == NUM_VALIDATION - NUM_SHARED
    assert not set(prompts["train"]) & set(prompts["validation"])


def test_the_saved_verifier_takes_the_features_themselves(trained):
    """Its probabilities are those of the trained one on standardised features."""
    verifier = load_speculator(trained.folder, trained.draft)
    with torch.no_grad():
        found = verifier(trained.raw_features("validation", verifier)).sigmoid()
    torch.testing.assert_close(found, trained.probabilities, rtol=1e-4, atol=1e-4)
    assert found.std() > 0.02


def test_the_best_state_is_saved_and_training_stops_early(sprinter):
    records = sprinter.validations()
    values = [float(record["validation/auroc"]) for record in records]
    best = values.index(max(values))
    assert best + 1 < len(values) < 40 and len(values) == best + 1 + PATIENCE
    curves = json.loads((sprinter.output / "verifier.json").read_text())
    for name in ("lambda_1", "lambda_1.2", "lambda_1.5"):
        expected = float(records[best][f"validation/auroc_{name}"])
        assert curves[name]["auroc"] == pytest.approx(expected, abs=1e-5)
    path = sprinter.output / "checkpoints" / "best.ckpt"
    state = torch.load(path, weights_only=True)["state_dict"]
    assert set(state) == {"verifier.linear.weight", "verifier.linear.bias"}
    saved = load_speculator(sprinter.folder, sprinter.draft).linear.weight * sprinter.module.scale
    torch.testing.assert_close(saved, state["verifier.linear.weight"], rtol=1e-4, atol=1e-5)
    assert (saved - sprinter.last_weight).abs().max() > 0.05


def area(probabilities, labels) -> float:
    """Under the ROC curve: how often a good token scores above another one, ties half."""
    good, other = probabilities[labels >= 0.5], probabilities[labels < 0.5]
    differences = good[:, None].double() - other
    return ((differences > 0).double() + (differences == 0) / 2).mean().item()


def test_the_curves_are_written(trained):
    assert (trained.output / "verifier.png").read_bytes().startswith(b"\x89PNG")
    curves = json.loads((trained.output / "verifier.json").read_text())
    assert list(curves) == list(trained.module.verifier.outputs)
    for place, own in enumerate(curves.values()):
        predicted, labels = trained.probabilities[:, place], trained.labels[:, place]
        assert own["auroc"] == pytest.approx(area(predicted, labels), abs=1e-5)
        assert own["tokens"] == len(predicted) == sum(x["tokens"] for x in own["calibration"])
        assert own["acceptable"] == pytest.approx((labels >= 0.5).float().mean().item())
        assert [each["threshold"] for each in own["rates"]] == THRESHOLDS
        for kind in ("true_positive_rate", "false_positive_rate"):
            found = [each[kind] for each in own["rates"]]
            assert found == sorted(found, reverse=True) and 0 <= found[-1] < found[0] <= 1


def test_another_run_goes_on_from_a_checkpoint(sprinter, world, tmp_path):
    state = sprinter.output / "checkpoints" / "best.ckpt"
    done = len(sprinter.validations()) - PATIENCE
    folder = train(
        world, tmp_path, f"resume={state}", f"trainer.max_epochs={done + 2}",
        "callbacks.stopping.patience=9", "training.learning_rate=0.05",
    )  # fmt: skip
    with (tmp_path / "metrics" / "metrics.csv").open() as file:
        epochs = {int(record["epoch"]) for record in csv.DictReader(file)}
    assert epochs == {done, done + 1}
    assert load_speculator(folder, sprinter.draft).kind == "sprinter"


def test_a_verifier_of_the_shipped_draft_model_is_small():
    draft = load_target("slipstream/small-draft", packed=False)
    config = config_of("train", "experiment=sprinter_small")
    assert len(config.speculator.ratios) == 3
    verifier = new_speculator(draft, build(config.speculator))
    assert sum(parameter.numel() for parameter in verifier.parameters()) <= 1000


def test_rows_are_limited(world, tmp_path):
    data = build(config_of("train", f"data.path={world}/rows", "data.max_validation_rows=3").data)
    assert isinstance(data, PromptCompletionData)
    data.max_rows["train"] = None
    data.regenerate = False
    data.limit_rows({"train": 5, "validation": 7})
    assert (len(data.rows("train")), len(data.rows("validation"))) == (5, 3)


def test_validation_prompts_that_are_all_trained_on(world, tmp_path):
    file = world / "rows" / "train.jsonl"
    text = refused(lambda: train(world, tmp_path, f"data.path={file}"))
    assert text.startswith("data: every validation prompt is also trained on")


def test_labels_of_one_kind(world, tmp_path):
    """A draft model that is the target proposes nothing unacceptable; q / p <= 1e-9 is rare."""
    few = ("training.max_train_rows=3", f"training.draft.name={world}/target")
    text = refused(lambda: train(world, tmp_path, *few, "speculator.ratios=[1.2]"))
    assert "are acceptable (lambda_1.2)" in text
    text = refused(lambda: train(world, tmp_path, "speculator.ratios=[1.5,1e-9]"))
    assert re.search(r"are unacceptable \(lambda_1e-09\)", text)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["speculator.ratios=[0]"], "speculator.ratios: "),
        (["speculator.ratios=[1.2,-1]"], "speculator.ratios: "),
        (["speculator.ratios=[inf]"], "speculator.ratios: "),
        (["speculator.ratios=[]"], "speculator.ratios: "),
        (["speculator.features=[colour]"], "speculator.features: must be a non-empty list"),
        (["speculator.features=[]"], "speculator.features: must be a non-empty list"),
        (["training.batch_size=0"], "training.batch_size: must be a whole number, at least 1"),
        (["training.draft.name=slipstream/small-draft"], "has another vocabulary"),
    ],
)
def test_settings_that_are_refused(world, tmp_path, overrides, expected):
    assert expected in refused(lambda: train(world, tmp_path, *overrides))


def test_a_streaming_speculator_is_no_classifier(world, tmp_path):
    own = {"experiment": "sprinter_real"}
    text = refused(lambda: train(world, tmp_path, "speculator=streaming", **own))
    assert text.startswith("speculator: ") and "speculator=sprinter" in text


COMMANDS = {"train": (Train, Infer), "infer": (Infer, Train)}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("experiment", ["sprinter_small", "acceptance_small"])
def test_an_experiment_for_both_commands(command, experiment):
    own, others = COMMANDS[command]
    config = config_of(command, f"experiment={experiment}")
    others_alone = arguments_of(others).keys() - arguments_of(own).keys()
    dropped = {"both_commands", *(set(config) & others_alone)}
    assert len(dropped) > 1
    part = own_part(config, own, others)
    check_config(part, own)
    assert set(part) == set(config) - dropped
    with pytest.raises(InputError, match="unknown config key"):
        check_config(config, own)
    kept = OmegaConf.to_container(part, resolve=False)
    assert kept == {key: OmegaConf.to_container(config)[key] for key in kept}


def test_other_keys_stay_errors(tmp_path):
    experiment = "experiment=sprinter_small"
    for config, key in (
        (config_of("train", experiment, "+colour=red"), "colour"),
        (config_of("train", "+num_prompts=3"), "num_prompts"),
        (config_of("train", experiment, "both_commands=false"), "both_commands"),
    ):
        text = refused(lambda config=config: app.train(config))
        assert text.startswith(f"{key}: unknown config key")
    for config, key in (
        (config_of("infer", experiment, "+colour=red"), "colour"),
        (config_of("infer", "training=verifier"), "training"),
    ):
        text = refused(lambda config=config: app.infer(config))
        assert text.startswith(f"{key}: unknown config key")


def test_calibration_is_that_of_the_docstring():
    found = calibration(torch.tensor([0.12, 0.18, 0.9]), torch.tensor([0.0, 1.0, 1.0]))
    assert [list(each.values()) for each in found] == [
        pytest.approx([0.15, 0.5, 2]),
        pytest.approx([0.9, 1, 1]),
    ]
    (last,) = calibration(torch.tensor([1.0]), torch.tensor([0.0]))
    assert list(last.values()) == [1, 0, 1]


def test_rates_count_what_is_kept():
    """Three acceptable tokens of which two are kept, two others of which one is."""
    probabilities = torch.tensor([0.9, 0.5, 0.2, 0.6, 0.4])
    found = rates(probabilities, torch.tensor([1.0, 0.5, 1.0, 0.0, 0.4]), 0.5)
    assert list(found.values()) == pytest.approx([0.5, 2 / 3, 1 / 2])


def test_the_labels_are_made_once(sprinter, world, tmp_path, monkeypatch):
    """Another run on the same models, rows and seed finds them."""
    cache = tmp_path / "labels"
    shutil.copytree(sprinter.cache, cache)
    monkeypatch.setattr(
        "slipstream.data.labelled_drafts._labelled", lambda *_: pytest.fail("labelled again")
    )
    train(world, tmp_path, f"training.cache_dir={cache}", "check=true")


@pytest.mark.parametrize("kind", ["sprinter", "acceptance"])
def test_shipped_classifiers_are_those_of_their_experiments(kind):
    draft = load_target("slipstream/small-draft", packed=False)
    shipped = load_speculator(f"slipstream/small-{kind}", draft).config
    recipe = config_of("train", f"experiment={kind}_small")
    made = new_speculator(draft, build(recipe.speculator)).config
    assert type(shipped) is type(made)
    for field in fields(shipped):
        if field.name != "judged":
            one, other = (getattr(config, field.name) for config in (shipped, made))
            assert one == (tuple(other) if isinstance(one, tuple) else other)
