"""Every family: rows of trees, committed paths and pruned forwards against the plain model."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from tests.exhaustive import sparing
from tests.reference import DraftTree
from tests.tiny import ARCHITECTURES, VOCABULARY, random_tree, tiny_speculator, tiny_target
from torch import nn
from transformers import DynamicCache, MambaConfig

from slipstream.core.cache import StepCache
from slipstream.core.errors import InputError
from slipstream.core.masks import tree_mask
from slipstream.core.sampling import Sampling
from slipstream.core.trees import Trees
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.targets.families import family_of
from slipstream.targets.rows import Rows
from slipstream.targets.target import Target, device_of

PREFIX = [3, 17, 5, 29, 11]
TOLERANCE = {"tiny-gpt_neo": 1e-5}
"""By target; transformers' GPT-Neo multiplies queries and keys in float32. Others: 1e-10."""


class Dropping:
    """A visitor that keeps chosen rows only (-1 for padding), from layer 2 on."""

    layer = 2

    def __init__(self, kept: list[int]):
        self.kept = kept

    @contextmanager
    def visit(self, rows: Rows) -> Iterator[Rows]:
        rows.keep(torch.tensor([self.kept]), self.layer)
        yield rows


def filled_cache(target: Target, tokens: list[int]) -> StepCache:
    """A cache in which `tokens` are committed."""
    cache = target.new_cache(80)
    target.forward(torch.tensor([tokens]), torch.arange(len(tokens))[None], None, cache)
    cache.commit_first([len(tokens)])
    return cache


def commit(cache: StepCache, path: list[int], below: tuple[int, list[int]] | None = None) -> None:
    """Keep these staged rows, and others in the layers before that of `below`."""
    layer_and_rows = below and (below[0], torch.tensor([below[1]]))
    cache.commit(torch.tensor([path]), torch.tensor([len(path)]), layer_and_rows)
    cache.learn([cache.lengths[0] + len(path)])


def run_tree(target: Target, tree: DraftTree, cache: StepCache, *visitors) -> Rows:
    trees = Trees.of([tree])
    mask = tree_mask(trees.ancestors, cache.slots, cache.ends)
    positions = trees.depths + cache.bound
    return target.forward(trees.tokens, positions, mask, cache, visitors, trees=trees)


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    return [tree.tokens[step] for step in tree.path(node)]


def plain_logits(target: Target, tokens: list[int]) -> torch.Tensor:
    """(V,) of the plain transformers model after `tokens`."""
    return target.model(torch.tensor([tokens])).logits[0, -1]


def assert_close(target: Target, found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE.get(target.name, 1e-10)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def assert_cache_holds(target: Target, cache: StepCache, tokens: list[int]) -> None:
    """Keys and values of every layer are those of the plain model over `tokens`."""
    plain = DynamicCache()
    target.model(torch.tensor([tokens]), past_key_values=plain)
    assert cache.bound == len(tokens)
    for layer in range(target.num_layers):
        keys, values = (part[..., : cache.bound, :] for part in cache.layers[layer])
        assert_close(target, keys, plain.layers[layer].keys)
        assert_close(target, values, plain.layers[layer].values)


def assert_goes_on(target: Target, cache: StepCache, tokens: list[int]) -> None:
    """One more token, and one more tree, over the committed rows."""
    tree = random_tree(5, torch.Generator().manual_seed(9))
    logits = target.logits(run_tree(target, tree, cache).hidden[0])
    for node in range(len(tree)):
        assert_close(target, logits[node], plain_logits(target, tokens + path_tokens(tree, node)))
    cache.forget_staged()
    rows = target.forward(torch.tensor([[7]]), torch.tensor([[cache.bound]]), None, cache)
    assert_close(target, target.logits(rows.hidden[0, 0]), plain_logits(target, [*tokens, 7]))


def deep_leaf(tree: DraftTree, among: list[int]) -> int:
    """The deepest of some nodes, the last one of several."""
    depths = tree.depths()
    return max(among, key=lambda node: (depths[node], node))


@pytest.mark.parametrize(
    ("architecture", "num_nodes"),
    sparing(
        product(sorted(ARCHITECTURES), (1, 2, 6, 13)),
        lambda architecture, num_nodes: architecture == "llama" or num_nodes == 6,
    ),
)
def test_rows_of_a_tree_equal_plain_forwards_of_their_paths(architecture, num_nodes):
    target = tiny_target(architecture)
    for seed in range(3):
        tree = random_tree(num_nodes, torch.Generator().manual_seed(seed))
        cache = filled_cache(target, PREFIX[: 1 + 2 * seed])
        prefix = PREFIX[: cache.bound]
        logits = target.logits(run_tree(target, tree, cache).hidden[0])
        for node in range(num_nodes):
            assert_close(
                target, logits[node], plain_logits(target, prefix + path_tokens(tree, node))
            )


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_prefill_equals_the_plain_forward_at_every_position(architecture):
    target = tiny_target(architecture)
    cache = target.new_cache(10)
    rows = target.forward(torch.tensor([PREFIX]), torch.arange(5)[None], None, cache)
    assert_close(target, target.logits(rows.hidden), target.model(torch.tensor([PREFIX])).logits)
    uncached = target.forward(torch.tensor([PREFIX]), torch.arange(5)[None], None, None)
    assert torch.equal(uncached.hidden, rows.hidden)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_committed_path_leaves_the_cache_of_a_plain_forward(architecture):
    target = tiny_target(architecture)
    out_of_order = 0
    for seed in range(3):
        tree = random_tree(11, torch.Generator().manual_seed(seed))
        cache = filled_cache(target, PREFIX)
        run_tree(target, tree, cache)
        path = tree.path(deep_leaf(tree, list(range(11))))
        out_of_order += path != list(range(len(path)))
        commit(cache, path)
        tokens = PREFIX + [tree.tokens[node] for node in path]
        assert_cache_holds(target, cache, tokens)
        assert_goes_on(target, cache, tokens)
    assert out_of_order


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_two_steps_in_a_row(architecture):
    target = tiny_target(architecture)
    cache, tokens = filled_cache(target, PREFIX), list(PREFIX)
    for seed in (5, 6):
        tree = random_tree(8, torch.Generator().manual_seed(seed))
        run_tree(target, tree, cache)
        path = tree.path(deep_leaf(tree, list(range(8))))
        commit(cache, path)
        tokens += [tree.tokens[node] for node in path]
    assert_cache_holds(target, cache, tokens)


@pytest.mark.parametrize(
    ("architecture", "padding"),
    sparing(
        product(sorted(ARCHITECTURES), (0, 2)),
        lambda architecture, padding: padding or architecture == "llama",
    ),
)
def test_rows_dropped_in_the_middle_leave_the_others_as_they_were(architecture, padding):
    target = tiny_target(architecture)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        tree = random_tree(12, generator)
        chance = torch.rand(12, generator=generator)
        kept = [0]
        for node in range(1, 12):
            if tree.parents[node] in kept and chance[node] < 0.7:
                kept.append(node)
        cache = filled_cache(target, PREFIX)
        padded = kept + [-1] * padding
        rows = run_tree(target, tree, cache, Dropping(padded))
        assert 1 < len(kept) < 12 and rows.kept.tolist() == [padded]
        left, (found,) = tree.keep(kept), rows.trees.drafts()
        assert (found.tokens, found.parents) == (left.tokens, left.parents)
        assert cache.staged == [12, 12, len(padded), len(padded)]
        logits = target.logits(rows.hidden[0])
        for row, node in enumerate(kept):
            assert_close(
                target, logits[row], plain_logits(target, PREFIX + path_tokens(tree, node))
            )
        path = tree.path(deep_leaf(tree, kept))
        commit(cache, [kept.index(node) for node in path], below=(2, path))
        tokens = PREFIX + [tree.tokens[node] for node in path]
        assert_cache_holds(target, cache, tokens)
        assert_goes_on(target, cache, tokens)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_batch_of_sequences_equals_each_of_them(architecture):
    target = tiny_target(architecture)
    ids = torch.randint(0, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(4))
    cache = target.new_cache(12, batch_size=3)
    positions = torch.arange(6).expand(3, 6)
    rows = target.forward(ids, positions, None, cache)
    assert_close(target, target.logits(rows.hidden), target.model(ids).logits)


def test_a_model_that_looks_ahead_is_refused():
    with pytest.raises(InputError, match="use_bidirectional_attention=True"):
        tiny_target("gemma", use_bidirectional_attention=True)


def test_an_unsupported_architecture_is_named_in_one_sentence():
    model = nn.Module()
    model.config = MambaConfig()
    with pytest.raises(InputError, match="'mamba' is not supported") as caught:
        family_of(model)
    assert "\n" not in str(caught.value)
    assert "or add a Family in slipstream/targets/families.py" in str(caught.value)
    for architecture in ARCHITECTURES:
        assert architecture in str(caught.value)


@pytest.mark.parametrize(
    "architecture", ["exaone4", "gemma3_text", "gpt_neo", "mistral", "olmo3", "phi3", "qwen2"]
)
def test_layers_look_back_over_their_window_alone(architecture, monkeypatch):
    """A tree, a single row and a prefill behind more tokens than the window holds."""
    target, tokens = tiny_target(architecture), [(7 * step) % VOCABULARY for step in range(20)]
    prefill = target.forward(torch.tensor([tokens]), torch.arange(20)[None], None, None)
    expected = target.model(torch.tensor([tokens])).logits
    assert_close(target, target.logits(prefill.hidden), expected)
    cache = filled_cache(target, tokens)
    assert_goes_on(target, cache, tokens)
    monkeypatch.setattr(target.family, "window", lambda layer: None)
    everywhere = target.forward(torch.tensor([tokens]), torch.arange(20)[None], None, None)
    assert (target.logits(everywhere.hidden) - expected).abs().max() > 1e-3


def test_positions_that_change_with_the_length_end_where_they_would():
    """LongRoPE rotates all rows of a longer forward in another way; keys of before would stay."""
    factors = [1.0, 1.0, 1.0]
    rope = dict(
        rope_type="longrope", short_factor=factors, long_factor=[4.0, 5.0, 6.0],
        rope_theta=10_000.0,
    )  # fmt: skip
    changes = dict(original_max_position_embeddings=16, sliding_window=None)
    target = tiny_target("phi3", rope_parameters=rope, **changes)
    assert target.max_positions == 16
    theirs = target.model.generate(
        torch.tensor([[3, 1, 4]]), max_new_tokens=13, do_sample=False, pad_token_id=0
    )
    for drafter in (None, PromptLookup(2, 3), Streaming(tiny_speculator(target), "fused", 2)):
        limits = Sampling(), Limits(30)
        decoder = PlainDecoder(target, *limits)
        if drafter is not None:
            decoder = Engine(target, drafter, *limits, 6)
        assert decoder.generate([3, 1, 4]).ids == theirs[0, 3:].tolist()


def test_a_window_over_a_long_text_is_one_row_of_a_mask():
    rows = Rows(torch.zeros(1, 1, 2), torch.tensor([[200_000]]), None)
    mask = rows.mask_within(4096, 200_000)
    assert mask.shape == (1, 1, 1, 200_001) and mask.sum() == 4096
    assert mask[..., -4096:].all()


def test_a_window_that_a_family_does_not_read_is_not_read_here():
    """transformers keeps unknown keys of a config, and a llamafied model has its first one's."""
    target, ids = tiny_target(sliding_window=4), torch.tensor([[*range(1, 21)]])
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = target.model.generate(ids, use_cache=False, **options)  # its cache has a window
    found = PlainDecoder(target, Sampling(), Limits(8)).generate(ids[0].tolist())
    assert found.ids == expected[0, 20:].tolist()


@pytest.mark.parametrize("architecture", ["opt", "gpt2", "gpt_neox"])
def test_shared_keys_that_a_family_does_not_read_are_not_read_here(architecture):
    target = tiny_target(architecture, num_key_value_heads=1)
    ids = torch.tensor([[3, 1, 4]])
    expected = target.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    found = PlainDecoder(target, Sampling(), Limits(8)).generate([3, 1, 4])
    assert found.ids == expected[0, 3:].tolist()


@pytest.mark.parametrize("architecture", ["mistral", "phi3", "qwen2", "qwen3"])
def test_kinds_of_layers_count_where_a_family_reads_them(architecture):
    """A Mistral that names them has its window in every layer, as transformers warns."""
    kinds = ["full_attention", "sliding_attention"] * 2
    windows = dict(sliding_window=4, use_sliding_window=True, layer_types=kinds)
    target = tiny_target(architecture, **windows)
    assert target.model.config.layer_types == kinds and target.family.sliding_window == 4
    ids = torch.tensor([[*range(1, 21)]])
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = target.model.generate(ids, use_cache=False, **options)
    found = PlainDecoder(target, Sampling(), Limits(8)).generate(ids[0].tolist())
    assert found.ids == expected[0, 20:].tolist()


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
    ],
)
def test_scaled_positions_reach_as_far_as_they_were_scaled_for(rope, positions):
    """YaRN is switched on in a config that names the old length; beyond it, too, answers are
    transformers'."""
    scaled = {"rope_theta": 10000.0} | rope
    target = tiny_target("qwen3", rope_parameters=scaled)
    assert target.max_positions == positions
    ids = 1 + torch.arange(199)[None] % (VOCABULARY - 1)
    if positions < ids.shape[1]:
        return
    expected = target.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    engine = Engine(target, PromptLookup(3, 7).attached(target), Sampling(), Limits(8), 8)
    assert engine.generate(ids[0].tolist()).ids == expected[0, 199:].tolist()


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 4.0}, None])
def test_scaled_positions_of_one_kind_of_layers_do_not_reach_further(rope):
    """A Gemma 3 that says how its full layers are scaled has the length after it."""
    target = tiny_target("gemma3_text", rope_scaling=rope)
    assert target.max_positions == 128
    ids = torch.tensor([[*range(1, 21)]])
    expected = target.model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    found = PlainDecoder(target, Sampling(), Limits(8)).generate(ids[0].tolist())
    assert found.ids == expected[0, 20:].tolist()


def test_capped_logits_are_refused():
    with pytest.raises(InputError, match="logits capped at 30"):
        tiny_target("gemma3_text", final_logit_softcapping=30.0)


def test_a_layer_without_any_tensor_runs_somewhere():
    assert device_of(nn.Identity()) == torch.device("cpu")
