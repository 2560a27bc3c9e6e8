"""A larger model with the same function: the same logits, answers and drafts, also from folders."""

from functools import cache
from itertools import product

import pytest
import torch
from studies import enlargement, scale
from studies.enlargement import (
    Shape,
    enlarged_speculator,
    enlarged_target,
    enlarged_verifier,
)
from tests.commands import config_of
from tests.exhaustive import sparing
from tests.tiny import tiny_speculator, tiny_target

from slipstream import app
from slipstream.assets import locate
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.classifiers import SprinterConfig, SprinterVerifier
from slipstream.targets.loading import load_target

# More query heads in a group, more groups, wider heads; tokens that the small one has not.
SHAPES = {
    "groups": Shape(576, 1088, 10, 9, 3, vocabulary=None, tied=True),
    "vocabulary": Shape(512, 1088, 9, 8, 2, vocabulary=6000),
    "heads": Shape(512, 1088, 9, 8, 2, 128, 6000, tied=True),
}
ONCE = ("groups", "fused"), ("heads", "deferred")
PROMPT = "CREATE TABLE singer (name VARCHAR, age INTEGER)\nQuestion: How old is the singer Joe?"


@pytest.fixture(scope="module")
def small():
    return load_target("slipstream/small-target", packed=False)


@pytest.fixture(scope="module")
def speculator(small):
    return load_speculator("slipstream/small-streaming", small)


@pytest.fixture(scope="module", params=SHAPES)
def pair(small, request):
    return small, enlarged_target(small, SHAPES[request.param], torch.float32), request.param


def test_the_large_target_has_its_shape_and_the_same_logits(pair):
    small, large, name = pair
    shape, config = SHAPES[name], large.model.config
    assert (config.hidden_size, config.intermediate_size) == (shape.hidden, shape.intermediate)
    assert (large.num_layers, large.vocab_size) == (shape.layers, shape.vocabulary or 4096)
    assert large.family.cache_shape == (shape.kv_heads, shape.head_dim)
    ids = torch.tensor([render_prompt(small.tokenizer, PROMPT)])
    positions = torch.arange(ids.shape[1])[None]
    found, expected = (
        target.logits(target.forward(ids, positions, None, None).hidden)
        for target in (large, small)
    )
    torch.testing.assert_close(found[..., :4096], expected, rtol=0, atol=2e-3)
    assert (found[..., 4096:] < expected.min() - 1000).all()


@pytest.fixture(scope="module")
def drafted(small):
    """The answer of an engine with this target, speculator and schedule; the small ones' is made
    once."""

    def answer(target, speculator, schedule):
        engine = Engine(target, Streaming(speculator, schedule, 4), Sampling(), Limits(24), 8)
        return engine.generate(render_prompt(small.tokenizer, PROMPT))

    return cache(answer)


@pytest.mark.parametrize(
    ("pair", "schedule"),
    sparing(product(SHAPES, ("fused", "deferred")), lambda *each: each in ONCE),
    indirect=["pair"],
)
def test_streams_draft_the_same(pair, speculator, drafted, schedule):
    small, large, _ = pair
    expected = drafted(small, speculator, schedule)
    found = drafted(large, enlarged_speculator(speculator, small, large), schedule)
    assert found.ids == expected.ids
    steps = [each.statistics.target_forwards for each in (found, expected)]
    assert steps[0] == steps[1] < len(expected.ids) - 1


def test_what_is_compared_is_the_answer_of_plain_decoding(small, speculator, drafted):
    plain = PlainDecoder(small, Sampling(), Limits(24))
    expected = plain.generate(render_prompt(small.tokenizer, PROMPT)).ids
    assert drafted(small, speculator, "fused").ids == expected


@pytest.fixture(scope="module")
def drafts():
    """A draft model, and the same enlarged."""
    draft = load_target("slipstream/small-draft", packed=False)
    shape = Shape(288, 768, 2, 8, 8, 32, 6000, tied=True)
    return draft, enlarged_target(draft, shape, torch.float32)


@pytest.mark.parametrize("kinds", [("hidden", "distribution", "rank"), ("hidden",), ("rank",)])
def test_a_verifier_says_the_same(drafts, kinds):
    """Of states after the final norm, where the large draft model's have more dimensions."""
    draft, large = drafts
    torch.manual_seed(0)
    verifier = SprinterVerifier(draft, SprinterConfig(kinds, (1.2, 1.5)))
    own = enlarged_verifier(verifier, large, {"weights": "those of the large target"})
    assert own.config.judged == {"weights": "those of the large target"}
    ids = torch.tensor([render_prompt(draft.tokenizer, PROMPT)])
    said = []
    for model, judge in ((draft, verifier), (large, own)):
        positions = torch.arange(ids.shape[1])[None]
        normed = model.norm(model.forward(ids, positions, None, None).hidden)[0, -8:]
        features = judge.features.of_drawn(normed, ids[0, -8:], model.logits_of_normed(normed))
        said.append(judge(features))
    torch.testing.assert_close(*said, rtol=0, atol=2e-3)
    assert said[0].std() > 0.05


def test_what_cannot_be_enlarged_is_one_sentence(small):
    with pytest.raises(InputError, match="only a Llama can be enlarged"):
        enlarged_target(tiny_target("opt"), SHAPES["groups"], torch.float32)
    shared = tiny_speculator(tiny := tiny_target(), mode="shared")
    with pytest.raises(InputError, match="only lossless streams can be enlarged"):
        enlarged_speculator(shared, tiny, tiny)
    reads_tokens = SprinterVerifier(tiny, SprinterConfig(("token",)))
    with pytest.raises(InputError, match="take one without the feature token"):
        enlarged_verifier(reads_tokens, tiny, {})
    for shape, fault in (
        (Shape(256, 1088, 10, 6, 2, vocabulary=None), "hidden"),
        (Shape(384, 1088, 10, 6, 2, vocabulary=6000), "hidden"),
        (Shape(512, 1088, 10, 8, 4), "heads"),
        (Shape(512, 1088, 10, 8, 2, 96), "head_dim"),
    ):
        with pytest.raises(InputError, match=f"shape: .*{fault}.* cannot hold the target"):
            enlarged_target(small, shape, torch.float32)


@pytest.fixture
def tiny_size(monkeypatch):
    """A size for tests."""
    draft = Shape(320, 1024, 3, 8, 8, 32, 6000, tied=True)
    monkeypatch.setitem(enlargement.SHAPES, "tiny", (SHAPES["vocabulary"], draft))


@pytest.mark.exhaustive
def test_folders_of_large_models_are_decoded_by_the_command(tmp_path, tiny_size):
    """Target, draft model and streams, written in bfloat16, and transformers beside them."""
    folder = enlargement.write(tmp_path / "tiny", "tiny")
    records = app.infer(
        config_of(
            "infer", "experiment=demo", f"target.name={folder}/target", f"draft={folder}/draft",
            f"speculator_path={folder}/streaming", "target.dtype=bfloat16", "num_prompts=2",
            "limits.max_new_tokens=24", "repeats=1", "~methods.streaming_shipped",
            f"output_dir={tmp_path / 'out'}",
        )
    )  # fmt: skip
    found = {record["method"]: record for record in records if record["prompt_set"] == "all"}
    assert found["streaming_deferred"]["tau"] > 1.5 and found["draft_model"]["tau"] > 1.2
    assert found["plain"]["tau"] == 1
    plain, approximate = app.infer(
        config_of(
            "infer", "methods=sprinter", f"target.name={folder}/target", f"draft={folder}/draft",
            f"methods.sprinter.verifier={folder}/sprinter", "target.dtype=bfloat16",
            "sampling.temperature=1", "data.synthetic_kinds=[text_to_sql]", "num_prompts=1",
            "limits.max_new_tokens=24", "repeats=1", f"output_dir={tmp_path / 'sprinter'}",
        )
    )  # fmt: skip
    assert plain["tau"] == 1 and approximate["tau"] > 1.5
    more = locate("slipstream/small-streaming")
    assert enlargement.write(tmp_path / "tiny", "tiny", streams=[more]) == folder
    again = folder / more.parent.name / more.name / "model.safetensors"
    assert again.read_bytes() == (folder / "streaming" / "model.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_speed_is_measured_over_sizes(tmp_path, tiny_size, monkeypatch):
    monkeypatch.setattr(scale, "LIMITS", Limits(8))
    rows = app.infer(
        config_of(
            "infer", "study=scale", "study.sizes=[tiny]", "num_prompts=2",
            "study.calibration_prompts=1", "study.budgets=[2,4]", "study.dtype=float32",
            f"study.folder={tmp_path}/sizes", f"output_dir={tmp_path / 'out'}",
        )
    )  # fmt: skip
    assert {(row["size"], row["temperature"]) for row in rows} == {
        (size, temperature) for size in ("tiny",) for temperature in (0.0, 1.0)
    }
    assert len(rows) == 2 * 2 * 12
    for row in rows:
        assert row["tokens/s"] > 0 and row["vs generate, whole calls"] > 0
        if row["method"] in ("transformers", "plain"):
            assert row["tau"] in (None, 1.0)
        if row["temperature"] == 0:
            different = 1 - int(row["identical"].partition("/")[0])
            assert row["ties"] == different
    assert (tmp_path / "out" / "plot.png").stat().st_size > 10_000
