"""The acceptance head and its features: by numbers, saved and opened, and refused where it must."""

import json
import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from tests.commands import refused
from tests.tiny import VOCABULARY, save_tiny_target, tiny_speculator, tiny_target

from slipstream.speculators.base import new_speculator
from slipstream.speculators.checkpoint import load_speculator, save_speculator
from slipstream.speculators.classifiers import (
    FEATURES,
    NUM_RANKS,
    AcceptanceConfig,
    AcceptanceHead,
    DraftFeatures,
    rank_of,
    shape_of,
)
from slipstream.targets.loading import load_target

CONFIG = AcceptanceConfig(("hidden", "distribution"), width=6, depth=2, rejection_weight=4.0)
KINDS = [kinds for count in (1, 2, 3, 4) for kinds in combinations(FEATURES, count)]


def random_head(draft, config: AcceptanceConfig = CONFIG, seed: int = 0) -> AcceptanceHead:
    torch.manual_seed(seed)
    head = AcceptanceHead(draft, config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.4)
    return head


def open_target(folder):
    return load_target(str(folder), device="cpu", packed=False)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return open_target(save_tiny_target(tmp_path_factory.mktemp("draft") / "tiny"))


@pytest.fixture
def folder(tmp_path, draft):
    return save_speculator(tmp_path / "head", random_head(draft), draft, 77, "# A")


def change_arguments(folder, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["arguments"])
    path.write_text(json.dumps(config))


def drafted(*shape: int, seed: int = 0, width: int = 24) -> tuple[torch.Tensor, ...]:
    """What `DraftFeatures` takes: hidden states, tokens, shapes and log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logs = torch.randn(*shape, VOCABULARY, generator=generator).log_softmax(-1)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    own = logs.gather(-1, tokens[..., None])[..., 0]
    return torch.randn(*shape, width, generator=generator), tokens, shape_of(logs), own


def test_labels_are_the_probabilities_of_acceptance(draft):
    """q, p = 0.5, 0.25: accepted with 1/2; 0.1, 0.4: surely; equal: surely; p = 0: never."""
    ratios = torch.tensor([0.5 / 0.25, 0.1 / 0.4, 1.0, math.inf, 0.0])
    labels = random_head(draft).labels(ratios.log())
    torch.testing.assert_close(labels, torch.tensor([[0.5], [1.0], [1.0], [0.0], [1.0]]))
    generator = torch.Generator().manual_seed(0)
    q, p = torch.rand(2, 50, generator=generator, dtype=torch.float64) + 1e-3
    labels = random_head(draft).labels(q.log() - p.log())
    torch.testing.assert_close(labels[:, 0], (p / q).clamp(max=1))


def test_a_rejection_counts_as_often_as_said(draft):
    """The loss of an acceptance is divided by the weight of a rejection."""
    assert random_head(draft).pos_weight == 0.25


def test_the_network_is_residual(draft):
    """Width 1, depth 1: s(x) = x sigmoid(x); 2 -> 2 + s(2) -> s of it."""
    head = AcceptanceHead(draft, AcceptanceConfig(("distribution",), width=1, depth=1))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.fill_(1.0 if parameter.ndim > 1 else 0.0)
        silu = torch.nn.functional.silu
        two = torch.tensor(2.0)
        score = head(torch.tensor([[0.5, 0.5, 0.5, 0.5]]))
        torch.testing.assert_close(score, silu(two + silu(two)).reshape(1, 1))


@torch.no_grad()
def test_folded_in_it_scores_raw_features_as_before_standardised_ones(draft):
    head = random_head(draft)
    generator = torch.Generator().manual_seed(1)
    raw = 5 * torch.randn(30, head.features.size, generator=generator) + 3
    mean, scale = raw.mean(0), raw.std(0) * (1 + torch.rand(raw.shape[1], generator=generator))
    before, unfolded = head((raw - mean) / scale), head(raw)
    head.fold_in(mean, scale)
    torch.testing.assert_close(head(raw), before, rtol=1e-4, atol=1e-4)
    assert (unfolded - before).abs().max() > 0.1


@torch.no_grad()
def test_it_opens_by_its_folder_with_identical_scores(draft, folder):
    opened, saved = load_speculator(folder, draft), random_head(draft)
    assert isinstance(opened, AcceptanceHead) and opened.config == CONFIG
    assert not opened.training and opened.features.draft is draft
    features = opened.features(*drafted(4, 3))
    assert features.shape == (4, 3, 24 + 4)
    assert torch.equal(opened(features), saved(saved.features(*drafted(4, 3))))
    other = random_head(draft, seed=1)
    assert not torch.equal(opened(features), other(features))


def test_the_folder_holds_the_head_alone(draft, folder):
    """Nothing of the draft model, and the fingerprint of whose probabilities it has learnt."""
    opened = load_speculator(folder, draft)
    count = 28 * 6 + 6 + 2 * (6 * 6 + 6) + 6 + 1
    assert sum(parameter.numel() for parameter in opened.parameters()) == count
    config = json.loads((folder / "config.json").read_text())
    assert config["kind"] == "acceptance" and config["target_fingerprint"] == draft.fingerprint
    judged = AcceptanceConfig(judged=dict(weights="abc"))
    save_speculator(folder, AcceptanceHead(draft, judged), draft, 9, "# A")
    assert load_speculator(folder, draft).config == judged


def test_it_is_made_of_its_config(draft):
    head = new_speculator(draft, replace(CONFIG, judged=dict(weights="abc")))
    assert isinstance(head, AcceptanceHead) and head.config.judged == dict(weights="abc")
    assert len(head.blocks) == 2 and head.linear.out_features == 6


@pytest.mark.parametrize(
    "arguments",
    [dict(width=0), dict(depth=-1), dict(rejection_weight=0), dict(rejection_weight=math.nan)],
)
def test_sizes_out_of_range_are_refused(arguments):
    message = refused(lambda: AcceptanceConfig(**arguments))
    assert message.startswith(f"speculator.{next(iter(arguments))}: must be ")


@pytest.mark.parametrize(
    "arguments", [dict(width="two"), dict(depth=None), dict(unknown=1), dict(features=None)]
)
def test_broken_arguments_of_a_folder_are_refused(draft, folder, arguments):
    change_arguments(folder, lambda known: known.update(arguments))
    assert "arguments" in refused(lambda: load_speculator(folder, draft))


def test_missing_arguments_of_a_folder_are_refused(draft, folder):
    change_arguments(folder, lambda known: known.pop("features"))
    assert "arguments" in refused(lambda: load_speculator(folder, draft))


@pytest.mark.parametrize("features", [["hidden"], ["hidden", "token", "distribution"]])
def test_other_features_than_the_weights_have_are_refused(draft, folder, features):
    change_arguments(folder, lambda known: known.update(features=features))
    assert "'linear.weight'" in refused(lambda: load_speculator(folder, draft))


def test_the_shape_of_a_distribution_by_numbers():
    """(1/2, 1/4, 1/4): 1.5 log 2 nats, 1/2, log 2; all but one impossible: 0 nats, 1."""
    logs = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]).log()
    expected = torch.tensor([1.5 * math.log(2), 0.5, math.log(2)]).expand(2, -1)
    torch.testing.assert_close(shape_of(logs), expected)
    logs = torch.tensor([2.0, -torch.inf, 1.0, -torch.inf]).log_softmax(-1)
    entropy, first, ahead = shape_of(logs).tolist()
    share = 1 / (1 + math.exp(-1))
    expected = -share * math.log(share) - (1 - share) * math.log(1 - share)
    assert (entropy, first, ahead) == pytest.approx((expected, share, 1.0), rel=1e-5)
    assert shape_of(torch.tensor([0.0, -1e4, -1e4])).tolist() == [0.0, 1.0, 1e4]


def test_the_rank_of_each_token_by_numbers():
    """Of (1/8, 1/2, 3/8, 0) the second is the first; of (1/2, 1/2, 0) two are."""
    logs = torch.tensor([1 / 8, 1 / 2, 3 / 8, 0.0]).log()
    ranks = rank_of(logs, shape_of(logs).expand(4, -1))
    expected = [
        [1 / 8, math.log(4), 0],
        [1 / 2, 0, 1],
        [3 / 8, math.log(4 / 3), 0],
        [0, 100, 0],  # as far as anything
    ]
    torch.testing.assert_close(ranks, torch.tensor(expected))
    both = torch.tensor([9.0, 9.0, -9.0]).log_softmax(-1)
    assert rank_of(both, shape_of(both).expand(3, -1))[:, 2].tolist() == [1, 1, 0]


def test_the_most_probable_token_is_known_however_large_the_vocabulary():
    logits = 3 * torch.randn(200, 32_000, generator=torch.Generator().manual_seed(0))
    logs = logits.log_softmax(-1)
    assert (rank_of(logs.amax(-1), shape_of(logs))[:, 2] == 1).all()


def test_entropies_are_never_below_zero():
    """A square root is taken of them."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 30, 300):
        logits = size * torch.randn(500, 1003, generator=generator)
        assert (shape_of(logits.log_softmax(-1))[:, 0] >= 0).all()


@pytest.mark.parametrize("kinds", KINDS)
def test_features_come_in_their_order_whatever_the_order_of_kinds(draft, kinds):
    hidden, tokens, shapes, logs = drafted(5)
    sizes = dict(hidden=24, token=24, distribution=4, rank=3)
    parts = dict(
        hidden=hidden,
        token=draft.model.get_input_embeddings().weight[tokens],
        distribution=torch.cat([shapes, logs[:, None]], 1),
        rank=rank_of(logs, shapes),
    )
    expected = torch.cat([parts[kind] for kind in FEATURES if kind in kinds], 1)
    for order in (kinds, kinds[::-1]):
        features = DraftFeatures(draft, order)
        assert features.size == sum(sizes[kind] for kind in kinds)
        assert torch.equal(features(hidden, tokens, shapes, logs), expected)


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_features_never_depend_on_other_rows(architecture):
    """float32, whatever the draft model computes in; OPT's embeddings are narrower, and so is what
    its LM head takes."""
    model = tiny_target(architecture)
    features = DraftFeatures(model, FEATURES)
    width = model.norm(torch.zeros(1, 24, dtype=model.dtype)).shape[-1]
    assert width == (16 if architecture == "opt" else 24)
    assert features.size == 2 * width + 4 + 3
    given, others = drafted(4, 3, width=width), drafted(4, 3, seed=1, width=width)
    everything = features(*given)
    assert everything.dtype == torch.float32 and everything.shape == (4, 3, features.size)
    mixed = [own.clone() for own in others]
    for own, tensor in zip(mixed, given, strict=True):
        own[2, 1] = tensor[2, 1]
    found = features(*mixed)
    assert torch.equal(found[2, 1], everything[2, 1])
    assert not torch.isclose(found, everything).all(-1)[1].any()
    # no feature by chance, save those of the rank: two tokens may both be the most probable
    assert not torch.isclose(found, everything)[1, :, :-NUM_RANKS].any()
    assert torch.equal(features(*(tensor[2, 1] for tensor in given)), everything[2, 1])


def test_shapes_of_rows_are_those_alone():
    logs = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for row, shape in zip(logs, shape_of(logs), strict=True):
        torch.testing.assert_close(shape_of(row), shape)


@pytest.mark.parametrize("kinds", [(), ("hidden", "taste"), ("smell", "taste")])
def test_unknown_kinds_of_features_are_refused(kinds):
    message = refused(lambda: AcceptanceConfig(features=kinds))
    assert message.startswith("speculator.features: ") and "distribution" in message
    assert all(kind in message for kind in kinds if kind not in FEATURES)


def test_a_streaming_speculator_is_no_acceptance_head(tmp_path):
    """It opens, and says itself what it is."""
    target = tiny_target()
    save_speculator(tmp_path / "streaming", tiny_speculator(target), target, 9, "# A")
    assert load_speculator(tmp_path / "streaming", target).kind != AcceptanceHead.kind
