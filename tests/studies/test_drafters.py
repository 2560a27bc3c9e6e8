"""Studies of draft sizes, of acceptance and of what drafting costs, on tiny models."""

import pytest
from studies.acceptance import acceptance
from studies.draft_size import draft_size
from studies.drafting_costs import ZipfCorpus, drafting_costs
from tests.commands import refused
from tests.drafters import untrained
from tests.tiny import tiny_speculator

from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.rest import Rest
from slipstream.drafters.streaming import Streaming
from slipstream.drafters.suffixes import Retrieval
from slipstream.evaluation.prompts import Prompt
from slipstream.results.picture import draw

PROMPTS = [
    Prompt(text, name)
    for text, name in (
        ("w3 w5 w8 w13 w3 w5", "a"), ("w1 w2", "b"), ("w9 w4 w7 w9", "a"), ("w6 w2 w6", "b"),
    )
]  # fmt: skip


@pytest.mark.exhaustive
def test_calibrated_sizes_are_compared_with_all_sizes(target, tmp_path):
    drafters = {
        "streaming": Streaming(tiny_speculator(target), "auto", 2),
        "lookup": PromptLookup(2, 8),
    }
    usual = {"lookup": 12}
    others = dict(calibration_prompts=1, repeats=1, sample_sizes=[])
    found = draft_size(target, PROMPTS, drafters, [2, 4, 8], 1, [2], usual, **others)
    # Three sizes of each way, and plain decoding, on one prompt, and larger ones while the largest
    # is the best; seven sizes on three.
    measured = {"streaming": 2 * 3 + 1, "lookup": 3 + 1}
    for row in found.rows:
        assert row["drafter"] in drafters and row["best g"] in {*range(2, 9), row["g*"]}
        assert 0 < row["g* vs best"] <= 1
        low, high = map(float, row["95 %"].split(" to "))
        assert low <= row["g* vs best"] <= high
        count = row["share of the search's measurements"] * 7 * 3
        assert count == pytest.approx(round(count)) and count > measured[row["drafter"]] - 0.5
    assert [row["usual g"] for row in found.rows] == ["-", 12]
    assert found.rows[0]["g* vs usual"] == "-" and found.rows[1]["g* vs usual"] > 0
    wrong = refused(lambda: draft_size(target, [], drafters, [2], 1, [], {"streams": 4}, **others))
    assert wrong == "study.usual: there is no drafter streams; name some of streaming, lookup"
    around = found.more["Sizes around g* (Table 13)"]
    assert {row["minus g*"] for row in around if row["vs g*"] == "1.00"} == {0}
    lookup = {"lookup": PromptLookup(2, 8)}
    found = draft_size(
        target, PROMPTS, lookup, [2, 4, 8], 6, [], {}, **others | {"sample_sizes": [1, 3]}
    )
    draw(tmp_path / "plot.png", found)
    sampled, sizes = found.more.values()
    few, all_of_them = sampled
    assert [few["prompts"], all_of_them["prompts"]] == [1, 3]
    # All prompts drawn are the same ones every time; a third of them takes a third of the time.
    assert all_of_them["g*, 95 %"] == "{0:.3g} to {0:.3g}".format(all_of_them["g*"])
    assert 0 < few["measuring, s"] < all_of_them["measuring, s"]
    assert all(2 <= row["g*"] <= 8 and 0 < row["vs best"] <= 1 for row in sampled)
    more = others | {"sample_sizes": [4]}
    wrong = refused(lambda: draft_size(target, PROMPTS, lookup, [2, 4], 2, [], {}, **more))
    assert wrong == (
        "study.sample_sizes: 4 is more than the 3 prompts to be measured; lower it, or give more "
        "num_prompts"
    )
    assert {row["measured in"] for row in sizes} == {"search", "calibration, PromptLookup"}
    assert all(row["low"] <= 1.01 * row["tokens/s"] <= 1.02 * 1.01 * row["high"] for row in sizes)


def test_acceptance_is_counted_by_source_and_by_confidence(target):
    retrieval = untrained.retrieval([[3, 5, 8], [9, 4, 7, 9, 4]])
    spectra = untrained.spectra(text=True, retrieval=retrieval)
    scores = {"one": untrained.unispec(threshold=0.0), "other": untrained.unispec(threshold=0.2)}
    found = acceptance(target, PROMPTS, spectra, scores, 12)
    assert [row["source"] for row in found.rows] == [
        "backward dictionary", "forward dictionary", "corpus"
    ]  # fmt: skip
    steps = {row["steps"] for row in found.rows}
    (bins,) = found.more.values()
    assert len(steps) == 1
    for row, name in [(row, "right share of tokens") for row in found.rows] + [
        (row, "accepted") for row in bins
    ]:
        assert 0 <= row["low"] <= row[name] <= row["high"] <= 1
    for name in scores:
        own = [row for row in bins if row["scores"] == name]
        assert sum(row["share of nodes"] for row in own) == pytest.approx(1)
        assert all(0 <= row["accepted"] <= 1 for row in own)
        for row in own:
            low, high = map(float, row["confidence"].split(" to "))
            assert low - 1e-6 <= row["mean"] <= high + 1e-6
    # Below its threshold nodes are drafted, too.
    assert min(row["mean"] for row in bins if row["scores"] == "other") < 0.2


def test_costs_are_measured_by_vocabulary_and_by_corpus(target):
    rest = Rest(Retrieval(ZipfCorpus(2000), 4, 8, 4))
    drafters = {"unispec": untrained.unispec(), "rest": rest}
    found = drafting_costs(target, PROMPTS[:1], drafters, 6, [100], [3000], lookups=20)
    row, retrieved = found.rows
    names = (f"{target.vocab_size} (the target)", "100")
    assert all(row[f"ms a step, {name}"] > 0 for name in names)
    assert 0 < row["store MB, 100"] < 100 * 400 / 1e6
    for each in found.rows:
        assert 0 < each["share of the target's step, %"] < 100
    assert retrieved["store MB, 100"] == pytest.approx(8 * (2000 + 2000 // 512) / 1e6)
    (corpus,) = found.more["Sorted corpora"]
    assert corpus["tokens"] == 3000 + 3000 // 512
    assert corpus["MB"] == pytest.approx(8 * corpus["tokens"] / 1e6)
    assert corpus["found a look-up, tokens"] > 1
