"""Speculators of every drafting kind are trained, saved, opened by path and decoded exactly by the
same calls; also one of a package that this project does not know."""

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
from tests.commands import ROOT, config_of, refused
from tests.training.worlds import make_world, overrides_of

from slipstream import app
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.medusa import Medusa
from slipstream.speculators.base import known_kinds, speculator_class
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.loading import load_target

PROMPTS = [[5, 6, 7, 8, 9], [20, 30]]
# A table of what follows each token: trained, saved, opened and drafted with.
BIGRAM = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from slipstream.core.trees import Trees
from slipstream.drafters.base import Attached, Drafter, Session
from slipstream.speculators.base import DraftingSpeculator, SpeculatorConfig
from slipstream.speculators.checkpoint import opened


@dataclass(frozen=True)
class BigramConfig(SpeculatorConfig):
    kind: ClassVar[str] = "bigram"
    spread: float = 0.1


class BigramSpeculator(DraftingSpeculator):
    kind = "bigram"
    Config = BigramConfig
    title = "Bigrams"
    source = "a table of what follows each token"
    drafter_class = "bigram:Bigram"

    def __init__(self, target, config):
        super().__init__()
        self.config = config
        self.table = nn.Embedding(target.vocab_size, target.vocab_size)
        nn.init.normal_(self.table.weight, std=config.spread)

    def losses(self, target, batch, seed=None, num_segments=None):
        used = batch.supervised[:, 1:]
        logits = self.table(batch.ids[:, :-1][used])
        loss = nn.functional.cross_entropy(logits, batch.ids[:, 1:][used])
        return loss, {"loss": loss}


class Bigram(Drafter):
    def __init__(self, speculator):
        self.speculator = speculator

    def attach(self, target):
        speculator = opened(self.speculator, target, BigramSpeculator)
        return AttachedBigram(target, speculator.placed(target))


class AttachedBigram(Attached):
    def __init__(self, target, speculator):
        super().__init__(target)
        self.speculator = speculator

    def start(self, requests, budget):
        return BigramSession(self.speculator)


class BigramSession(Session):
    def __init__(self, speculator):
        self.speculator = speculator

    @torch.no_grad()
    def draft(self, verified, budget):
        roots = verified.next_tokens
        if budget < 2 or verified.most_room < 2:
            return Trees.roots(roots)
        child = self.speculator.table(roots).argmax(-1)
        parents = torch.tensor([-1, 0], device=roots.device).expand(len(roots), 2)
        worth = torch.ones(len(roots), 2, device=roots.device)
        return Trees(torch.stack([roots, child], 1), parents, worth, 1)
"""

# A drafter without training, in a package of its own.
PHRASE = """
from slipstream.core.drafts import Draft
from slipstream.drafters.base import AttachedHost, Drafter


class Phrase(Drafter):
    def attach(self, target):
        return AttachedPhrase(target, self)


class AttachedPhrase(AttachedHost):
    def drafted(self, request, state, budget):
        return Draft.chain([request.tokens[-1], 3, 4, 5])
"""


def install(package, name: str, code: str, entry: str) -> None:
    """Put a module with an entry point where Python finds packages."""
    entries = package / f"{name}-1.0.dist-info"
    entries.mkdir(parents=True)
    (package / f"{name}.py").write_text(code)
    (entries / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (entries / "entry_points.txt").write_text(entry)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def train(world, output, *own):
    few = "training.validation_prompts=2"
    return app.train(config_of("train", *overrides_of(world, output), few, *own))


def decoded(world, drafter) -> None:
    """Answers are those of plain decoding."""
    target = load_target(str(world / "target"), device="cpu", packed=False)
    settings = Sampling(), Limits(24)
    plain, engine = PlainDecoder(target, *settings), Engine(target, drafter, *settings, 10)
    for prompt in PROMPTS:
        assert engine.generate(prompt).ids == plain.generate(prompt).ids


@pytest.mark.parametrize("own_heads", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_medusa(world, tmp_path, own_heads):
    """Trained with mixed precision and in segments, for a bfloat16 target, too."""
    own = [
        "speculator=medusa", f"speculator.own_heads={own_heads}", "speculator.num_heads=2",
        "training.num_segments=2",
    ]  # fmt: skip
    folder = train(world, tmp_path / "float", *own)
    decoded(world, Medusa(folder))
    told = (tmp_path / "float" / "metrics" / "metrics.csv").read_text().splitlines()[0]
    assert {"train/loss_head_2", "validation/accuracy_head_1", "validation/tau"} <= set(
        told.split(",")
    )
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    assert tensors["blocks.0.weight"].any() and ("heads.0.weight" in tensors) == own_heads
    hits = tensors["accuracies"]
    assert hits.shape == (2, 10) and not hits[0].equal(hits[1]) and hits.sum(1).max() <= 1
    card = (folder / "README.md").read_text()
    head, _, told = card.partition("---\n# ")
    assert head.startswith("---\nlibrary_name: slipstream\n") and "base_model" not in head
    assert told.startswith("Medusa speculator") and "validation tau" in told
    assert "2 validation prompts, evenly spread" in told
    mixed = [
        f"target.name={world}/bfloat16",
        "target.dtype=bfloat16",
        "trainer.precision=bf16-mixed",
    ]
    other = train(world, tmp_path / "mixed", *own, *mixed, "trainer.max_epochs=1")
    tensors = safetensors.torch.load_file(other / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.float32"}


def test_a_classifier_does_not_draft(world, tmp_path):
    own = ["speculator=sprinter", "training=speculator"]
    text = refused(lambda: train(world, tmp_path, *own))
    assert "'sprinter' does not draft" in text and "training=verifier" in text


def test_kinds_are_found_by_name():
    assert {"streaming", "medusa", "sprinter", "acceptance"} <= set(known_kinds())
    for kind in known_kinds():
        found = speculator_class(kind)
        assert found.kind == found.Config.kind == kind
    assert "'owl' is not known" in refused(lambda: speculator_class("owl"))


@pytest.mark.exhaustive
def test_a_kind_of_another_package(world, tmp_path):
    """A speculator and its drafter in one file outside the project, found through its entry point,
    and a YAML each."""
    package = tmp_path / "site"
    entry = "[slipstream.speculators]\nbigram = bigram:BigramSpeculator\n"
    install(package, "bigram", BIGRAM, entry)
    install(package, "phrase", PHRASE, "[slipstream.drafters]\nphrase = phrase:Phrase\n")
    for name, content in (
        ("speculator/bigram", "_target_: bigram.BigramConfig\nspread: 0.2\n"),
        ("drafter/bigram", "_target_: bigram.Bigram\nspeculator: ${speculator_path}\n"),
    ):
        (package / name).parent.mkdir(exist_ok=True)
        (package / f"{name}.yaml").write_text(content)
    paths = [str(package), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def run(*command) -> str:
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    own = [*overrides_of(world, tmp_path / "out"), "training.validation_prompts=2"]
    search = f"hydra.searchpath=[file://{package}]"
    run(str(ROOT / "train.py"), search, "speculator=bigram", *own)
    folder = tmp_path / "out" / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["kind"] == "bigram" and config["arguments"] == {"spread": 0.2}
    card = (folder / "README.md").read_text()
    assert "validation tau" in card and f"hydra.searchpath=[file://{package.name}]" in card
    compared = run(
        str(ROOT / "infer.py"), search, "drafter=bigram", f"speculator_path={folder}",
        "+methods.phrase={_target_: slipstream.evaluation.methods.Speculative, "
        "drafter: {_target_: phrase.Phrase}, budget: 4}",
        f"target.name={world}/target", f"data.path={world}/rows/train.jsonl",
        "num_prompts=3", "repeats=1", "limits.max_new_tokens=12",
        f"output_dir={tmp_path}/compared",
    )  # fmt: skip
    records = json.loads((tmp_path / "compared" / "results.json").read_text())["results"]
    drafted = [record for record in records if record["method"] in ("drafter", "phrase")]
    assert drafted and all(each["identical"] == each["num_prompts"] for each in drafted), compared
    assert {each["drafter"] for each in drafted} == {"Bigram", "Phrase"}
    target = load_target(str(world / "target"), device="cpu", packed=False)
    assert "'bigram'" in refused(lambda: load_speculator(folder, target))
