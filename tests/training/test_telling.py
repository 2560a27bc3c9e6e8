"""What a training run tells: each line once, nobody's advertisements, and its config to W&B."""

import collections
import csv
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from tests.commands import ROOT, refused
from tests.tiny import save_tiny_target, tiny_target, tiny_tokenizer

from slipstream.data.rendering import Sample
from slipstream.evaluation.report import tables_of
from slipstream.results.record import Result
from slipstream.results.writer import show
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.targets.loading import load_target
from slipstream.training.callbacks import _masked
from slipstream.training.card import speculator_card
from slipstream.training.speculator import SpeculatorTraining
from slipstream.training.tracking import followed, tracked, wandb_logger


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder, the output and the errors of a run of one step, W&B offline."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "w3"
    target = save_tiny_target(folder / "target", tokenizer=tokenizer)
    rows = [{"prompt": f"w{n} w5 w6", "completion": "w7 w8 w9"} for n in range(10, 26)]
    (folder / "rows").mkdir()
    for split in ("train", "validation"):
        (folder / "rows" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "train.py"), "debug=quick", f"target.name={target}",
            "data=jsonl", f"data.path={folder / 'rows'}", "data.regenerate=false",
            "speculator.num_msa_layers=2", "speculator.num_streams=2", "trainer.max_steps=1",
            "trainer.val_check_interval=1", "trainer.accelerator=cpu", "target.device=cpu",
            "training.validation_prompts=1", "training.learning_rate=1.25e-3",
            f"output_dir={folder / 'out'}",
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"WANDB_MODE": "offline", "WANDB_DATA_DIR": str(folder / "staged")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout, done.stderr


def test_every_log_line_comes_once_and_none_advertises(run):
    _, printed, errors = run
    told = [line.rpartition("] - ")[2] for line in printed.splitlines() if "[INFO] - " in line]
    told += [line.removeprefix("INFO: ") for line in errors.splitlines() if "INFO: " in line]
    assert any("GPU available" in line for line in told)
    assert [line for line, count in collections.Counter(told).items() if count > 1] == []
    assert not any(word in printed + errors for word in ("litlogger", "Tip:", "anonymous"))


def test_the_first_sample_stands_below_its_heading(run):
    before, _, below = run[1].partition("first sample, supervised tokens in green:\n")
    assert "steps are few" in before and below.startswith("w")


def test_wandb_is_given_the_config_of_the_run(run):
    (record,) = (run[0] / "wandb").glob("offline-run-*/*.wandb")
    assert b'"learning_rate":0.00125' in record.read_bytes().replace(b": ", b":")
    assert not (run[0] / "metrics" / "hparams.yaml").exists()


def test_the_run_of_wandb_ends_with_the_training(run):
    (log,) = (run[0] / "wandb").glob("offline-run-*/logs/debug.log")
    assert "got exitcode: 0" in log.read_text() and "Uncaught" not in log.read_text()


def test_a_training_that_fails_has_failed_in_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ZeroDivisionError), followed([wandb_logger("x", str(tmp_path))], {}):
        1 / 0  # noqa: B018
    assert (
        "got exitcode: 1" in next(tmp_path.glob("wandb/offline-run-*/logs/debug.log")).read_text()
    )


def test_wandb_is_given_the_folder_as_an_artifact(run):
    (record,) = (run[0] / "wandb").glob("offline-run-*/*.wandb")
    content = record.read_bytes()
    name = f"run-{record.stem.removeprefix('run-')}"
    assert name.encode() in content and b"model.safetensors" in content
    staged = [path.read_bytes() for path in (run[0].parent / "staged").rglob("*") if path.is_file()]
    model = [path for path in (run[0] / "model").rglob("*") if path.is_file()]
    assert len(model) == 5 and all(path.read_bytes() in staged for path in model)


def test_the_model_card_tells_what_was_measured_and_how(run):
    card = (run[0] / "model" / "README.md").read_text()
    (tau,) = re.findall(r"^- validation tau: (\d\.\d{3})$", card, re.M)
    rows = list(csv.DictReader((run[0] / "metrics" / "metrics.csv").open()))
    assert tau in {f"{float(row['validation/tau']):.3f}" for row in rows if row["validation/tau"]}
    assert "1 validation prompts, evenly spread over them, greedy, with trees of" in card
    (command,) = re.findall(r"^- command: `(.*)`$", card, re.M)
    assert command.startswith("python train.py debug=quick target.name=target data=jsonl ")
    assert "data.path=rows" in command and str(run[0].parent) not in card
    assert "speed depends on the device and was not measured" in card
    again = "target=small target.name=TARGET drafter=streaming speculator_path=THIS"
    assert f"`python infer.py {again}`" in card


@pytest.mark.parametrize(
    ("name", "base"), [("Qwen/Qwen3-0.6B", True), ("slipstream/small-target", False)]
)
def test_the_model_card_names_a_target_of_the_hub(tmp_path, name, base):
    target = load_target(str(save_tiny_target(tmp_path / "target")), device="cpu", packed=False)
    target.name = name
    config = StreamingConfig(num_streams=2, num_msa_layers=2, adapter_rank=2)
    module = SpeculatorTraining(target, config, 0.1, None, 0.0, 1, None, False, 4, 8, None)
    module.data = SimpleNamespace(longest=33)
    module.save(tmp_path / "model", "# Title\n\n- data: x\n")
    card = (tmp_path / "model" / "README.md").read_text()
    assert (f"\nbase_model: {name}\n---\n# Title" in card) == base and f"- target: {name}, " in card
    assert "- tau: " not in card and "trained on up to 33 tokens" in card
    assert '\ntarget = load_target(TARGET, "float32")\n' in card
    target.tokenizer.own_template = True
    target.tokenizer.chat_template_kwargs = {"enable_thinking": False}
    target.loading["quantization"] = "nf4"
    module.save(tmp_path / "model", "# Title\n\n- data: x\n")
    told = "chat_template=TEMPLATE, chat_template_kwargs={'enable_thinking': False}"
    assert f"{told}, quantization='nf4')" in (tmp_path / "model" / "README.md").read_text()


def test_the_model_card_decodes_with_the_configs_that_it_was_trained_with(monkeypatch):
    """Those of another package have its drafter."""
    search = "hydra.searchpath=[file://conf]"
    monkeypatch.setattr("slipstream.training.card.overrides", lambda: [search, "speculator=owl"])
    module = SimpleNamespace(
        target=tiny_target(),
        shared=False,
        speculator=SimpleNamespace(kind="owl"),
        data=SimpleNamespace(longest=33),
    )
    told = speculator_card(module, "# Title\n")
    assert f"`python infer.py '{search}' target=hub target.name=TARGET drafter=owl " in told


def test_only_wandb_is_given_the_config(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    own = wandb_logger("slipstream", str(tmp_path), "first", ["small"])
    table = CSVLogger(str(tmp_path))
    (found,) = tracked([table, own])
    found.log_hyperparams({"training": {"learning_rate": 1.25e-3}, "seed": 5})
    found, run = dict(own.experiment.config), own.experiment
    assert (run.project, run.name, run.tags) == ("slipstream", "first", ("small",))
    run.finish()
    assert found == {"training": {"learning_rate": 1.25e-3}, "seed": 5}


def test_wandb_is_offline_where_it_cannot_be_asked(tmp_path, monkeypatch, caplog):
    """A key is known, and there is no network, or the key has expired."""

    def login(**_):
        raise wandb.errors.AuthenticationError("the host cannot be reached. Try later")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "login", login)
    own = wandb_logger("slipstream", str(tmp_path))
    assert own._wandb_init["mode"] == "offline" and "the host cannot be reached" in caplog.text

    def refuse(_):
        raise wandb.errors.CommError("no such entity")

    monkeypatch.setattr(own, "log_hyperparams", refuse)
    text = refused(followed([own], {}).__enter__)
    assert text.startswith("logger.wandb: no such entity; set WANDB_MODE=offline")


def test_wandb_goes_on_with_the_run_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = wandb_logger("slipstream", str(tmp_path))
    run = first.experiment
    run.finish()

    def begun(**options):
        return wandb_logger("slipstream", str(tmp_path), **options)._wandb_init["id"]

    assert begun(resume="auto") is None  # the parts cannot be joined here
    monkeypatch.setenv("WANDB_MODE", "online")
    assert begun(resume="auto") == run.id and begun() is None
    new = wandb_logger("slipstream", str(tmp_path / "new"), resume="auto")
    assert new._wandb_init["id"] is None


@pytest.mark.parametrize("text", [r"\[/x]", "[/green]", "[bold]", "a\\", "[link=x"])
def test_no_text_is_taken_for_markup(text):
    class Tokenizer:
        def decode(self, ids):
            return text if ids else ""

    console = Console(file=io.StringIO(), width=200)
    console.print(_masked(Sample([1, 2, 3, 4], 3, ((1, 2),)), Tokenizer()))
    assert console.file.getvalue() == text * 4 + "\n"


@pytest.mark.parametrize("name", [r"\[/x]", "[/green]", "[bold]"])
def test_no_name_of_a_prompt_set_or_method_is_taken_for_markup(name):
    record = collections.defaultdict(lambda: 1, method=name, prompt_set=name, details=name)
    console = Console(file=io.StringIO(), width=400)
    show(Result("", [], shown=tables_of([record])), console)
    assert console.file.getvalue().count(name) == 3
