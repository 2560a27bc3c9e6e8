"""The streaming speculator on every family: lossless, fused = deferred = merged, training form."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from tests.exhaustive import sparing
from tests.reference import DraftTree
from tests.targets.test_families import filled_cache
from tests.tiny import (
    ARCHITECTURES,
    num_extra_parameters,
    random_tree,
    tiny_speculator,
    tiny_target,
)
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.core.cache import StepCache, TrainingCache
from slipstream.core.errors import InputError
from slipstream.core.masks import causal_mask, tree_mask
from slipstream.core.trees import Trees
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.packed import is_packed, pack_linears
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target

PREFIX = [3, 17, 5, 29, 11, 8]
TOLERANCE = 1e-10
UNKNOWN = -1
MLPS = "base+adapter", "adapter"

VARIANTS = {
    "paper": dict(),
    "no_adapters": dict(adapter_rank=0),
    "initialisation": dict(initialisation_rank=2),
    "same_positions": dict(stream_positions="same", initialisation_rank=3),
    "told_the_root": dict(root_rank=3),
    "rotated_values": dict(value_rotation=0.005),
    "few_attended": dict(attended_tokens=3),
    "all_layers": dict(num_msa_layers=4, num_streams=1),
    "skipped_mlp": dict(mlp="adapter"),
    "skipped_mlp_same_positions": dict(mlp="adapter", stream_positions="same"),
}
EVERY_CASE = [
    (architecture, variant)
    for architecture, variant in product(sorted(ARCHITECTURES), VARIANTS)
    if architecture != "opt" or VARIANTS[variant].get("mlp") != "adapter"
]


def once(architecture: str, variant: str) -> bool:
    """Each variant in one family, and some of the others."""
    return architecture == "llama" or variant in ("rotated_values", "few_attended")


each_case = pytest.mark.parametrize(("architecture", "variant"), sparing(EVERY_CASE, once))
each_family = pytest.mark.parametrize(
    ("architecture", "variant"),
    sparing(EVERY_CASE, lambda *each: "llama" in each or "rotated_values" in each),
)
"""Each variant of the Llama; of other families the one whose hooks are of their own linears."""


class Watching:
    """A visitor that keeps the main rows before the MSA layers, and may add streams to all."""

    def __init__(self, target: Target, speculator: StreamingSpeculator, fused: bool, acting=True):
        self.target, self.speculator, self.fused = target, speculator, fused
        self.acting, self.layer = acting, speculator.first_layer
        self.states: torch.Tensor | None = None

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        self.states = rows.hidden
        if self.fused:
            everywhere = torch.arange(rows.hidden.shape[1]).expand(len(rows.hidden), -1)
            rows = self.speculator.add_streams(self.target, rows, everywhere)
        acting = self.speculator.acting_on(self.target, rows) if self.acting else nullcontext()
        with acting:
            yield rows


def pair(architecture: str, variant: str) -> tuple[Target, StreamingSpeculator]:
    target = tiny_target(architecture)
    return target, tiny_speculator(target, **VARIANTS[variant])


@torch.no_grad()
def run_tree(target: Target, tree: DraftTree, cache: StepCache, *visitors) -> Rows:
    trees = Trees.of([tree])
    mask = tree_mask(trees.ancestors, cache.slots, cache.ends)
    return target.forward(trees.tokens, trees.depths + cache.bound, mask, cache, visitors)


@torch.no_grad()
def deferred_streams(
    target, speculator, tokens: list[int], merged=None, root: int = UNKNOWN
) -> torch.Tensor:
    """(gamma, D): streams of the last of `tokens`, over the cache of all of them."""
    cache = target.new_cache(len(tokens) + 1 + speculator.num_streams)
    watching = Watching(target, speculator, fused=False, acting=False)
    positions = torch.arange(len(tokens))[None]
    target.forward(torch.tensor([tokens]), positions, None, cache, [watching])
    cache.commit_first([len(tokens)])
    sees_all = torch.ones(1, 1, 1, len(tokens), dtype=torch.bool)
    return speculator.run_streams(
        target,
        watching.states[:, -1:],
        torch.tensor([[root]]),
        positions[:, -1:],
        sees_all,
        cache,
        merged,
    )[0]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@each_case
def test_the_target_is_bit_identical_before_and_after(architecture, variant):
    target, speculator = pair(architecture, variant)
    tree = random_tree(7, torch.Generator().manual_seed(1))
    weights = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    modules = list(target.model.modules())
    bare = target.logits(run_tree(target, tree, filled_cache(target, PREFIX)).hidden)
    merged = speculator.merged_layers(target)
    run_tree(target, tree, filled_cache(target, PREFIX), Watching(target, speculator, fused=True))
    deferred_streams(target, speculator, PREFIX)
    deferred_streams(target, speculator, PREFIX, merged)
    again = target.logits(run_tree(target, tree, filled_cache(target, PREFIX)).hidden)
    assert torch.equal(again, bare)
    after = target.model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
    assert all(now is then for now, then in zip(target.model.modules(), modules, strict=True))
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in target.model.modules()
    )


@each_case
def test_main_rows_are_lossless(architecture, variant):
    """The same rows with and without adapters at work: the main rows' logits do not change."""
    target, speculator = pair(architecture, variant)
    tree = random_tree(7, torch.Generator().manual_seed(2))
    plain = target.logits(run_tree(target, tree, filled_cache(target, PREFIX)).hidden)
    logits = {}
    for fused, acting in product((False, True), (False, True)):
        watching = Watching(target, speculator, fused, acting)
        rows = run_tree(target, tree, filled_cache(target, PREFIX), watching)
        assert rows.hidden.shape[1] == len(tree) * (1 + fused * speculator.num_streams)
        logits[fused, acting] = target.logits(rows.hidden)[:, : len(tree)]
        assert_close(logits[fused, acting], plain)
    assert torch.equal(logits[False, False], plain)
    assert torch.equal(logits[False, True], plain)
    if speculator.config.mlp == "base+adapter":
        assert torch.equal(logits[True, True], logits[True, False])


@each_case
def test_fused_deferred_and_merged_streams_are_the_same(architecture, variant):
    target, speculator = pair(architecture, variant)
    tree = random_tree(8, torch.Generator().manual_seed(3))
    watching = Watching(target, speculator, fused=True)
    rows = run_tree(target, tree, filled_cache(target, PREFIX), watching)
    fused = rows.hidden[0, len(tree) :].unflatten(0, (len(tree), -1))
    merged = speculator.merged_layers(target)
    for node in range(len(tree)):
        tokens = PREFIX + [tree.tokens[step] for step in tree.path(node)]
        hooked = deferred_streams(target, speculator, tokens)
        assert hooked.shape == (speculator.num_streams, target.hidden_size)
        assert_close(fused[node], hooked)
        if merged is not None:
            assert_close(deferred_streams(target, speculator, tokens, merged), hooked)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
@pytest.mark.parametrize("kind", ["shifted", "same"])
def test_streams_attend_like_a_causal_text_of_their_main_row_and_them(architecture, kind):
    """Without adapters: the top layers over [all main rows, streams of the last one], causal."""
    target = tiny_target(architecture)
    speculator = tiny_speculator(target, adapter_rank=0, stream_positions=kind)
    bare = Watching(target, speculator, fused=False, acting=False)
    positions = torch.arange(len(PREFIX))[None]
    target.forward(torch.tensor([PREFIX]), positions, None, None, [bare])
    last = len(PREFIX) - 1
    ours = [last + 1, last + 2, last + 3] if kind == "shifted" else [last] * 3
    streams = bare.states[:, -1:] + speculator.embeddings.detach()
    rows = Rows(
        torch.cat([bare.states, streams], 1),
        torch.cat([positions, torch.tensor([ours])], 1),
        torch.ones(len(PREFIX) + 3, len(PREFIX) + 3).tril().bool()[None, None],
    )
    expected = target.run_layers(speculator.msa_layers(target), rows, None).hidden[0, -3:]
    assert_close(deferred_streams(target, speculator, PREFIX), expected)


@each_family
def test_every_option_changes_the_streams(architecture, variant):
    """What the equalities above compare is not trivially equal."""
    target, speculator = pair(architecture, variant)
    streams = deferred_streams(target, speculator, PREFIX)
    bare = Watching(target, speculator, fused=False, acting=False)
    rows = target.forward(
        torch.tensor([PREFIX]), torch.arange(len(PREFIX))[None], None, None, [bare]
    )
    assert (streams - rows.hidden[0, -1]).abs().amax(-1).min() > 1e-2
    for stream in range(1, speculator.num_streams):
        apart = 1e-5 if speculator.config.value_rotation else 1e-2
        assert (streams[stream] - streams[stream - 1]).abs().max() > apart
    if speculator.adapters is not None:
        for parameter in speculator.adapters.parameters():
            parameter.data.zero_()
        changed = deferred_streams(target, speculator, PREFIX)
        assert (streams - changed).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_shifted_streams_stand_at_the_rotary_positions_of_their_tokens(architecture):
    target = tiny_target(architecture)
    shifted, same = (tiny_speculator(target, stream_positions=kind) for kind in ("shifted", "same"))
    positions = torch.tensor([[4, 9]])
    assert shifted.positions_of(positions).tolist() == [[5, 6, 7, 10, 11, 12]]
    assert same.positions_of(positions).tolist() == [[4, 4, 4, 9, 9, 9]]
    difference = deferred_streams(target, shifted, PREFIX) - deferred_streams(target, same, PREFIX)
    assert difference.abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("architecture", ["opt", "gpt2"])
def test_learned_positions_are_those_of_the_main_row(architecture):
    target = tiny_target(architecture)
    streams = [
        deferred_streams(target, tiny_speculator(target, stream_positions=kind), PREFIX)
        for kind in ("shifted", "same")
    ]
    assert torch.equal(*streams)


def test_streams_start_from_the_main_row_and_their_embedding():
    target = tiny_target()
    hidden = torch.randn(2, 3, 24, dtype=torch.float64)
    plain = tiny_speculator(target, num_streams=2)
    streams = plain.streams_of(hidden).unflatten(1, (3, 2))
    for stream in range(2):
        assert torch.equal(streams[:, :, stream], hidden + plain.embeddings[stream])
    low_rank = tiny_speculator(target, num_streams=2, initialisation_rank=3)
    start = hidden @ low_rank.initialisation.down.T @ low_rank.initialisation.up.T
    streams = low_rank.streams_of(hidden).unflatten(1, (3, 2))
    for stream in range(2):
        assert_close(streams[:, :, stream], start + low_rank.embeddings[stream])


def test_a_known_root_adds_its_mapped_embedding():
    target = tiny_target()
    told = tiny_speculator(target, num_streams=2, root_rank=3)
    hidden, roots = torch.randn(1, 2, 24, dtype=torch.float64), torch.tensor([[7, 9]])
    embeddings = target.model.model.embed_tokens.weight[roots]
    mapped = embeddings @ told.root.down.T @ told.root.up.T
    streams = told.streams_of(hidden, embeddings).unflatten(1, (2, 2))
    for stream in range(2):
        assert_close(streams[:, :, stream], hidden + mapped + told.embeddings[stream])
    unknown = deferred_streams(target, told, PREFIX)
    assert (deferred_streams(target, told, PREFIX, root=7) - unknown).abs().max() > 1e-2
    for root in (UNKNOWN, 7):
        merged = told.merged_layers(target)
        hooked = deferred_streams(target, told, PREFIX, root=root)
        assert_close(deferred_streams(target, told, PREFIX, merged, root), hooked)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("mlp", MLPS)
def test_merging_keeps_weights_that_float32_cannot_hold(architecture, mlp):
    target = tiny_target(architecture)
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.add_(torch.rand_like(parameter) * 1e-6)
    speculator = tiny_speculator(target, mlp=mlp)
    merged = speculator.merged_layers(target)
    hooked = deferred_streams(target, speculator, PREFIX)
    assert_close(deferred_streams(target, speculator, PREFIX, merged), hooked)


@pytest.mark.parametrize(
    ("architecture", "mlp"),
    sparing(
        [("opt", "base+adapter"), *product(sorted(ARCHITECTURES.keys() - {"opt"}), MLPS)],
        lambda architecture, mlp: mlp == MLPS[0] or architecture in ("llama", "gpt2", "phi3"),
    ),
)
def test_a_packed_target_carries_the_same_streams(architecture, mlp):
    plain, packed = (Target(tiny_target(architecture).model.float()) for _ in range(2))
    pack_linears(packed.model)
    assert is_packed(packed.model)
    speculator = tiny_speculator(plain, mlp=mlp).float()
    expected = deferred_streams(plain, speculator, PREFIX)
    merged = speculator.merged_layers(packed)
    for layers in (None, merged):
        found = deferred_streams(packed, speculator, PREFIX, layers)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def roots_of(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The tokens after `positions`, unknown after the last."""
    return F.pad(ids, (0, 1), value=UNKNOWN).gather(1, positions + 1)


def training_streams(target, speculator, ids: torch.Tensor, positions: torch.Tensor, roots=None):
    """The training form: main rows without gradients, then the streams of many positions."""
    roots = roots_of(ids, positions) if roots is None else roots
    cache = TrainingCache(target.num_layers)
    watching = Watching(target, speculator, fused=False, acting=False)
    everywhere = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        target.forward(ids, everywhere, None, cache, [watching])
    cache.settle()
    index = positions.unsqueeze(-1).expand(-1, -1, target.hidden_size)
    hidden = watching.states.gather(1, index)
    sees = causal_mask(ids.shape[1])[positions].unsqueeze(1)
    streams = speculator.run_streams(target, hidden, roots, positions, sees, cache)
    return streams.unflatten(1, (-1, speculator.num_streams)), hidden


@each_case
def test_many_positions_at_once_equal_one_at_a_time(architecture, variant):
    target, speculator = pair(architecture, variant)
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(6))
    positions = torch.tensor([[1, 4, 8], [0, 5, 6]])
    found, _ = training_streams(target, speculator, ids, positions)
    for sequence, row in product(range(2), range(3)):
        tokens = ids[sequence, : positions[sequence, row] + 1].tolist()
        root = int(roots_of(ids, positions)[sequence, row])
        alone = deferred_streams(target, speculator, tokens, root=root)
        assert_close(found[sequence, row], alone)


@each_family
def test_gradients_reach_all_of_the_speculator_and_none_of_the_target(architecture, variant):
    target, speculator = pair(architecture, variant)
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(7))
    streams, hidden = training_streams(target, speculator, ids, torch.tensor([[1, 4], [0, 5]]))
    target.logits(streams).logsumexp(-1).mean().backward()
    for name, parameter in speculator.named_parameters():
        if name.startswith(("pruning.", "transitions.")):
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    speculator.zero_grad()
    early = target.logits(speculator.early_exit(hidden))
    early.logsumexp(-1).mean().backward()
    for name, parameter in speculator.named_parameters():
        used = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
        assert used == name.startswith("pruning."), name
    assert all(parameter.grad is None for parameter in target.model.parameters())


@each_family
def test_the_training_form_has_the_gradients_of_single_positions(architecture, variant):
    """The plain reference: every position alone, by autograd through a forward of its own."""
    target, speculator = pair(architecture, variant)
    ids = torch.randint(0, 40, (1, 7), generator=torch.Generator().manual_seed(8))
    positions = torch.tensor([[2, 3, 6]])
    weights = torch.randn(3, speculator.num_streams, target.hidden_size).double()
    together, _ = training_streams(target, speculator, ids, positions)
    (together[0] * weights).sum().backward()
    used = {
        name: parameter.grad.clone()
        for name, parameter in speculator.named_parameters()
        if parameter.grad is not None
    }
    speculator.zero_grad(set_to_none=True)
    roots = roots_of(ids, positions)
    for row, position in enumerate(positions[0].tolist()):
        before = ids[:, : position + 1]
        alone, _ = training_streams(
            target, speculator, before, torch.tensor([[position]]), roots[:, row : row + 1]
        )
        (alone[0, 0] * weights[row]).sum().backward()
    assert used
    for name, parameter in speculator.named_parameters():
        if name in used:
            torch.testing.assert_close(parameter.grad, used[name], rtol=1e-9, atol=1e-9)


def test_early_exit_starts_as_the_logits_of_the_early_states():
    target = tiny_target()
    speculator = StreamingSpeculator(target, StreamingConfig(num_msa_layers=2)).double()
    hidden = torch.randn(5, 24, dtype=torch.float64)
    assert torch.equal(target.logits(speculator.early_exit(hidden)), target.logits(hidden))
    random = tiny_speculator(target)
    low_rank = hidden @ random.pruning.down.T @ random.pruning.up.T
    assert_close(target.logits(random.early_exit(hidden)), target.logits(hidden + low_rank))


def test_fresh_adapters_change_nothing():
    target = tiny_target()
    torch.manual_seed(0)
    fresh = StreamingSpeculator(target, StreamingConfig(num_msa_layers=2)).double()
    bare = StreamingSpeculator(target, StreamingConfig(num_msa_layers=2, adapter_rank=0)).double()
    bare.embeddings.data.copy_(fresh.embeddings)
    assert torch.equal(
        deferred_streams(target, fresh, PREFIX), deferred_streams(target, bare, PREFIX)
    )


@pytest.mark.parametrize(
    ("hidden_size", "expected"), [(4096, 81_920), (3072, 61_440), (2048, 40_960)]
)
def test_extra_parameters_are_the_numbers_of_the_paper(hidden_size, expected):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        target = Target(LlamaForCausalLM(config))
        bare, adapted = (
            StreamingSpeculator(
                target, StreamingConfig(num_streams=4, adapter_rank=rank, pruning_rank=8)
            )
            for rank in (0, 8)
        )
    assert num_extra_parameters(bare) == num_extra_parameters(adapted) == expected
    assert sum(parameter.numel() for parameter in bare.parameters()) == expected
    assert sum(parameter.numel() for parameter in adapted.parameters()) > 2 * expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_streams", 0),
        ("num_msa_layers", 0),
        ("adapter_rank", -1),
        ("initialisation_rank", -1),
        ("pruning_rank", 0),
        ("copy_scores", "yes"),
        ("mlp", "none"),
        ("stream_positions", "rotated"),
    ],
)
def test_a_bad_argument_is_named(field, value):
    with pytest.raises(InputError, match=rf"^speculator\.{field}: ") as caught:
        StreamingConfig(**{field: value})
    assert "\n" not in str(caught.value)


def test_more_msa_layers_than_layers_are_refused():
    with pytest.raises(InputError, match=r"^speculator\.num_msa_layers: 5 .* at most 4"):
        StreamingSpeculator(tiny_target(), StreamingConfig(num_msa_layers=5))


def test_skipping_an_mlp_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"^speculator\.mlp: .*opt.*'base\+adapter'"):
        StreamingSpeculator(tiny_target("opt"), StreamingConfig(mlp="adapter"))
