"""A speculator folder of shared mode, with every part it can have, decodes bit for bit the same."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.tiny import save_tiny_target, tiny_speculator

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.checkpoint import load_speculator, save_speculator
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.loading import load_target
from slipstream.targets.target import Target

PARTS = {"embeddings", "initialisation", "pruning", "transitions", "copying", "lora"}
PROMPT = [3, 17, 5, 29, 11, 8]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


def speculator_of(target: Target) -> StreamingSpeculator:
    every_part = dict(initialisation_rank=2, transition_rank=3, copy_scores=True)
    return tiny_speculator(target, mode="shared", **every_part).float()


class Watched(Engine):
    """Notes each verified forward."""

    def _verify(self, batch, rows):
        verified = super()._verify(batch, rows)
        self.seen = [*getattr(self, "seen", []), verified]
        return verified


def decoded(target: Target, speculator, sampling: Sampling) -> tuple[torch.Tensor, list]:
    """Logits that decided the tokens; the tokens verified, forward by forward."""
    drafter = Streaming(speculator, "fused", top_k=3, prune_threshold=0.01, prune_cap=6)
    engine = Watched(target, drafter, sampling, Limits(24), budget=9)
    ids = engine.generate(PROMPT, seed=1).ids
    assert len(set(ids)) > 3
    logits = [each.logits[0, each.paths[0, : each.counts[0]]] for each in engine.seen]
    return torch.cat(logits), [*(each.trees.tokens.tolist() for each in engine.seen), ids]


@pytest.mark.parametrize(
    ("packed", "sampling"), [(False, Sampling(0.9)), (True, Sampling())], ids=["sampled", "packed"]
)
def test_a_round_trip_gives_bit_identical_decoding(target_folder, tmp_path, packed, sampling):
    target = load_target(str(target_folder), device="cpu", packed=packed)
    folder = save_speculator(tmp_path / "made", speculator_of(target), target, 24, "# A")
    logits, tokens = decoded(target, speculator_of(target), sampling)
    fresh = load_target(str(target_folder), device="cpu", packed=packed)
    for speculator in (folder, load_speculator(folder, fresh)):
        found, verified = decoded(fresh, speculator, sampling)
        assert verified == tokens
        assert torch.equal(found, logits)


def test_every_part_is_saved_and_every_part_matters(target_folder, tmp_path):
    target = load_target(str(target_folder), device="cpu", packed=False)
    folder = save_speculator(tmp_path / "made", speculator_of(target), target, 24, "# A")
    saved = safetensors.torch.load_file(folder / "model.safetensors")
    assert {name.split(".")[0] for name in saved} == PARTS
    assert saved.keys() == dict(speculator_of(target).named_parameters()).keys()
    _, tokens = decoded(target, folder, Sampling(0.9))
    for part in sorted(PARTS):
        speculator = load_speculator(folder, target)
        torch.manual_seed(0)
        for name, parameter in speculator.named_parameters():
            if name.startswith(part):
                parameter.data.normal_()
        assert decoded(target, speculator, Sampling(0.9))[1] != tokens, part
