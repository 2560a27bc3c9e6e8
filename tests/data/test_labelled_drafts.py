"""Labelled drafts: read at the right positions, drawn at temperature 1, resumable.

Two faults of SPRINTER's public code are put in place here, pad positions and greedy labels, and
the checks must notice them.
"""

from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

import pytest
import torch
from tests.commands import refused
from tests.tiny import VOCABULARY, tiny_target, tiny_tokenizer

import slipstream.data.labelled_drafts as drafting
from slipstream.core.files import load_tensors, locked, save_tensors
from slipstream.data.labelled_drafts import KINDS, LabelledDrafts, complete, judged, labelled_drafts
from slipstream.data.rendering import Sample
from slipstream.targets.fingerprints import fingerprint
from slipstream.targets.target import Target

END = 3
RAREST = 8.0
FIELDS = list(LabelledDrafts.__dataclass_fields__)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model_of(seed: int, **changes) -> Target:
    """A tiny model in float64, which autocast leaves alone, with an end token."""
    model = tiny_target(seed=seed, **changes)
    model.model.generation_config.eos_token_id = END
    model.fingerprint = fingerprint(model)
    return model


@pytest.fixture(scope="module")
def draft() -> Target:
    return model_of(1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def target() -> Target:
    return model_of(0)


def some_texts(lengths: list[int]) -> list[list[int]]:
    generator = seeded()
    return [torch.randint(4, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def some_samples(lengths: list[tuple[int, int]]) -> list[Sample]:
    """Lengths of prompts and of answers."""
    texts = some_texts([sum(pair) for pair in lengths])
    return [Sample(text, pair[0]) for text, pair in zip(texts, lengths, strict=True)]


SAMPLES = some_samples([(4, 9), (11, 3), (2, 12), (7, 6), (5, 9), (3, 2), (6, 8)])


def log_probabilities(model: Target, prefix: list[int]) -> torch.Tensor:
    """(V,): transformers' own, of the token after one unpadded prefix."""
    return model.model(torch.tensor([prefix])).logits[0, -1].log_softmax(-1)


def mistakes(draft: Target, target: Target, prefixes: list[list[int]], part: dict) -> int:
    """How many rows disagree anywhere with the models run on their prefix alone."""
    count = 0
    for row, prefix in enumerate(prefixes):
        ours, token = log_probabilities(draft, prefix), int(part["tokens"][row])
        first, second = ours.topk(2).values
        expected = {
            "hidden": draft.model.base_model(torch.tensor([prefix])).last_hidden_state[0, -1],
            "shapes": torch.stack([-(ours.exp() * ours).sum(), first.exp(), first - second]),
            "log_probabilities": ours[token],
            "log_ratios": ours[token] - log_probabilities(target, prefix)[token],
        }
        count += not all(
            torch.allclose(part[name][row].double(), value, rtol=1e-4, atol=1e-4)
            for name, value in expected.items()
        )
    return count


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of a chi-square test; the rarest cells are pooled until each expects at least `RAREST`."""
    expected, pooled = probabilities.double() * counts.sum(), [[0.0, 0.0]]
    for cell in expected.argsort().tolist():
        if pooled[-1][0] >= RAREST:
            pooled.append([0.0, 0.0])
        pooled[-1][0] += float(expected[cell])
        pooled[-1][1] += float(counts[cell])
    wanted, found = torch.tensor(pooled, dtype=torch.float64).T
    assert len(pooled) > 2
    statistic = ((found - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(pooled) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def at_every_position(draft: Target, target: Target) -> tuple[dict, list[list[int]]]:
    """What is judged at all positions of texts of very different lengths, and their prefixes."""
    texts = some_texts([1, 30, 7, 2, 13])
    places = [(row, end) for row, text in enumerate(texts) for end in range(len(text))]
    rows, ends = map(list, zip(*places, strict=True))
    return judged(draft, target, texts, rows, ends, seeded()), [
        texts[row][: end + 1] for row, end in places
    ]


def test_every_row_is_what_the_models_say_of_its_prefix(draft, target):
    part, prefixes = at_every_position(draft, target)
    assert len(part["tokens"]) == len(prefixes) == 53
    assert mistakes(draft, target, prefixes, part) == 0


def test_few_logits_are_held_at_once_and_make_no_difference(draft, target, monkeypatch):
    whole, _ = at_every_position(draft, target)
    most, logits = [], Target.logits

    def watched(model, states):
        most.append(len(states))
        return logits(model, states)

    monkeypatch.setattr(drafting, "HELD", 5 * VOCABULARY)
    monkeypatch.setattr(Target, "logits", watched)
    parts, _ = at_every_position(draft, target)
    assert max(most) == 5 and sum(most) == 2 * 53
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor)


@pytest.mark.parametrize(
    "fault",
    [lambda states: states.roll(1, 1), lambda states: states[:, -1:].expand_as(states)],
    ids=["the position before", "the last column, pads included"],
)
def test_reading_at_a_wrong_position_would_be_noticed(draft, target, monkeypatch, fault):
    states = drafting.states
    monkeypatch.setattr(drafting, "states", lambda model, texts: fault(states(model, texts)))
    part, prefixes = at_every_position(draft, target)
    assert mistakes(draft, target, prefixes, part) >= len(prefixes) - 1


def test_tokens_are_samples_of_the_draft_model_at_temperature_1(draft, target):
    texts, count = some_texts([9, 4]), 4000
    part = judged(draft, target, texts, [1] * count, [2] * count, seeded())
    counts = torch.bincount(part["tokens"], minlength=VOCABULARY)
    ours = log_probabilities(draft, texts[1][:3])
    assert p_value(counts, ours.exp()) > 1e-3
    for temperature in (0.8, 1.25):
        assert p_value(counts, (ours / temperature).softmax(-1)) < 1e-6
    assert counts.max() < count / 2, "hardly more than the most probable token"


@pytest.fixture(scope="module")
def watched(draft, target, tmp_path_factory):
    """Labelled drafts; what `judged` was asked, call by call; and what `complete` gave, by share of
    the target."""
    asked, completed = [], []

    def judging(draft, target, texts, rows, ends, generator):
        asked.append((texts, rows, ends))
        return judged(draft, target, texts, rows, ends, generator)

    def completing(draft, target, prompts, share, *settings):
        completed.append((share, complete(draft, target, prompts, share, *settings)))
        return completed[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "judged", judging)
        patch.setattr(drafting, "complete", completing)
        folder = tmp_path_factory.mktemp("labels")
        drafts = labelled_drafts(draft, target, SAMPLES, 8, folder, seed=0, batch_size=3)
    return drafts, asked, completed


def test_kinds_have_equal_parts_of_each_prompt(watched):
    drafts, asked, _ = watched
    found = torch.bincount(drafts.prompts * 4 + drafts.kinds, minlength=4 * len(SAMPLES))
    shortest = [
        min(len(asked[4 * (number // 3) + kind][0][number % 3]) for kind in range(4))
        for number in range(len(SAMPLES))
    ]
    expected = [
        max(0, length - sample.prompt_length - 1)
        for length, sample in zip(shortest, SAMPLES, strict=True)
    ]
    assert found.view(-1, 4).tolist() == [[count] * 4 for count in expected]
    assert sum(expected) * 4 == len(drafts.tokens) and len(set(expected)) > 2


def test_rows_tell_their_prompt_and_kind_and_come_from_its_text(watched):
    """Each prefix has the sample's prompt and at least a token of the answer, and is not all."""
    drafts, asked, completed = watched
    row = 0
    for number, (texts, rows, ends) in enumerate(asked):
        kind, first = number % 4, number // 4 * 3
        samples = SAMPLES[first : first + 3]
        if kind == 0:
            assert texts == [sample.ids for sample in samples]
        else:
            assert completed.pop(0) == (list(KINDS.values())[kind], texts)
        assert len(set(zip(rows, ends, strict=True))) == len(rows)
        for place, end in zip(rows, ends, strict=True):
            length = samples[place].prompt_length
            assert texts[place][:length] == samples[place].ids[:length]
            assert length <= end < len(texts[place]) - 1
            assert (int(drafts.prompts[row]), int(drafts.kinds[row])) == (first + place, kind)
            row += 1
    assert row == len(drafts.tokens) and not completed


def test_all_labelled_drafts_are_what_the_models_say(watched, draft, target):
    drafts, asked, _ = watched
    prefixes = [
        texts[row][: end + 1]
        for texts, rows, ends in asked
        for row, end in zip(rows, ends, strict=True)
    ]
    assert mistakes(draft, target, prefixes, vars(drafts)) == 0


def test_labels_are_not_greedy(watched):
    """As many most probable tokens as their probabilities say, within four deviations."""
    drafts, _, _ = watched
    largest = drafts.shapes[:, 1].double()
    found = int(torch.isclose(drafts.log_probabilities.double(), largest.log()).sum())
    spread = float((largest * (1 - largest)).sum()) ** 0.5
    assert abs(found - float(largest.sum())) < 4 * spread
    assert len(drafts.tokens) - float(largest.sum()) > 8 * spread, "greedy labels would be noticed"


SMALL = 4
PROMPT = [0, 1, 2]


def exact_pairs(draft: Target, target: Target, share: float) -> torch.Tensor:
    """(SMALL * SMALL,): probabilities of the first two tokens, the second summed up over an end."""

    def after(prefix: list[int]) -> torch.Tensor:
        ours, theirs = (log_probabilities(model, prefix).exp() for model in (draft, target))
        return (1 - share) * ours + share * theirs

    return torch.cat([after(PROMPT)[n] * after([*PROMPT, n]) for n in range(SMALL)])


@pytest.fixture(scope="module")
def small_pair() -> tuple[Target, Target]:
    """Models of four words, none of which ends a text."""
    return (
        tiny_target(seed=109, num_hidden_layers=1, vocab_size=SMALL),
        tiny_target(seed=10, num_hidden_layers=2, vocab_size=SMALL),
    )


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_completions_are_samples_of_the_mixture(small_pair, share):
    texts = complete(*small_pair, [PROMPT] * 2000, share, 2, seeded())
    assert all(text[:3] == PROMPT and len(text) == 5 for text in texts)
    pairs = torch.tensor([SMALL * text[3] + text[4] for text in texts])
    counts = torch.bincount(pairs, minlength=SMALL * SMALL)
    for other in (0.0, 0.5, 1.0):
        found = p_value(counts, exact_pairs(*small_pair, other))
        assert found > 1e-3 if other == share else found < 1e-6


def test_both_models_draw_in_turns_within_a_text(small_pair):
    """Not one model a text: that has the same distribution of each token, and another of pairs."""
    texts = complete(*small_pair, [PROMPT] * 4000, 0.5, 2, seeded(1))
    pairs = torch.tensor([SMALL * text[3] + text[4] for text in texts])
    counts = torch.bincount(pairs, minlength=SMALL * SMALL)
    by_text = sum(exact_pairs(*small_pair, share) for share in (0.0, 1.0)) / 2
    assert p_value(counts, exact_pairs(*small_pair, 0.5)) > 1e-3
    assert p_value(counts, by_text) < 1e-6


def test_completions_in_bfloat16_arithmetic(small_pair):
    """Of float32 models, as they are used; rounding moves the distribution a little."""
    single = [
        tiny_target(seed=seed, num_hidden_layers=layers, vocab_size=SMALL)
        for seed, layers in ((109, 1), (10, 2))
    ]
    for model in single:
        model.model.float()
    texts = complete(*single, [PROMPT] * 1000, 0.5, 2, seeded())
    pairs = torch.tensor([SMALL * text[3] + text[4] for text in texts])
    found = torch.bincount(pairs, minlength=SMALL * SMALL) / len(pairs)
    distance = (found - exact_pairs(*small_pair, 0.5)).abs().sum() / 2
    assert distance < 0.06
    assert (found - exact_pairs(*small_pair, 0.0)).abs().sum() / 2 > 0.2


def certain(seed: int, **changes) -> Target:
    """A model whose samples are its most probable token, which depends on the whole prefix."""
    model = model_of(seed, **changes)
    model.head.weight.data *= 1e4
    return model


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_texts_of_a_batch_are_not_mixed_up(share):
    """Every token is the choice of a model that may draw, although texts end at other times."""
    models, most = (certain(6, num_hidden_layers=2), certain(0)), 40
    prompts = some_texts([5, 9, 2, 5, 7, 1, 12, 3, 4, 6])
    texts = complete(*models, prompts, share, most, seeded())
    drawn = set()
    for prompt, text in zip(prompts, texts, strict=True):
        assert text[: len(prompt)] == prompt
        answer = text[len(prompt) :]
        assert END not in answer[:-1]
        assert len(answer) == most or (answer[-1] == END and len(answer) < most)
        said = [model.model(torch.tensor([text])).logits[0].argmax(-1).tolist() for model in models]
        for end in range(len(prompt), len(text)):
            matching = [number for number in (0, 1) if said[number][end - 1] == text[end]]
            assert matching
            drawn |= {matching[0]} if len(matching) == 1 else set()
    lengths = [len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)]
    assert len(set(lengths)) > 2, "texts end at different times"
    assert drawn == {0.0: {0}, 0.5: {0, 1}, 1.0: {1}}[share]


def test_completions_stay_within_the_context():
    models = [tiny_target(seed=seed, max_position_embeddings=12) for seed in (1, 0)]
    texts = complete(*models, some_texts([4, 11, 8]), 0.5, 6, seeded())
    assert [len(text) for text in texts] == [10, 12, 12]


def same(one: LabelledDrafts, other: LabelledDrafts) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in FIELDS)


def made(draft: Target, target: Target, folder: Path, seed: int = 0, samples=SAMPLES):
    return labelled_drafts(draft, target, samples[:6], 4, folder, seed, batch_size=2)


def test_an_interrupted_run_goes_on(draft, target, tmp_path, monkeypatch):
    whole, label, starts = made(draft, target, tmp_path / "whole"), drafting._labelled, []

    def breaking(draft, target, samples, start, *settings):
        if starts == [0]:
            raise KeyboardInterrupt
        starts.append(start)
        return label(draft, target, samples, start, *settings)

    monkeypatch.setattr(drafting, "_labelled", breaking)
    with pytest.raises(KeyboardInterrupt):
        made(draft, target, tmp_path / "parts")
    starts.clear()
    monkeypatch.setattr(
        drafting, "_labelled", lambda *settings: starts.append(settings[3]) or label(*settings)
    )
    assert same(made(draft, target, tmp_path / "parts"), whole)
    assert starts == [2, 4]
    assert same(made(draft, target, tmp_path / "parts"), whole)
    assert starts == [2, 4]


def test_an_unfinished_file_is_not_taken_for_a_part(draft, target, tmp_path, monkeypatch):
    whole = made(draft, target, tmp_path / "whole")

    def breaking(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("slipstream.core.files.os.fsync", breaking)
        with pytest.raises(KeyboardInterrupt):
            made(draft, target, tmp_path / "parts")
    assert not [path for path in (tmp_path / "parts").rglob("*") if path.is_file()]
    assert same(made(draft, target, tmp_path / "parts"), whole)


def test_a_part_that_another_process_makes_is_waited_for(draft, target, tmp_path, monkeypatch):
    whole = made(draft, target, tmp_path)
    (part,) = tmp_path.rglob("part_00001.pt")
    content, waiting = part.read_bytes(), ThreadPoolExecutor()
    part.unlink()
    monkeypatch.setattr(drafting, "_labelled", lambda *_: pytest.fail("made twice"))
    with locked(part.with_suffix(".lock"), "x"):
        found = waiting.submit(made, draft, target, tmp_path)
        with pytest.raises(TimeoutError):
            found.result(0.2)
        part.write_bytes(content)
    assert same(found.result(60), whole)


@pytest.mark.parametrize("other", [{"other": torch.zeros(1)}, [torch.zeros(1)]], ids=str)
def test_a_part_that_holds_something_else_is_made_anew(draft, target, tmp_path, other):
    whole = made(draft, target, tmp_path)
    path = min(tmp_path.rglob("part_*.pt"))
    save_tensors(path, other)
    assert same(made(draft, target, tmp_path), whole)
    assert load_tensors(path).keys() == set(FIELDS)


def test_other_seeds_models_and_texts_have_their_own_folder(draft, target, tmp_path):
    first = made(draft, target, tmp_path)
    folders = len(list(tmp_path.iterdir()))
    assert folders == 1
    others = [
        made(draft, target, tmp_path, seed=1),
        made(model_of(7, num_hidden_layers=2), target, tmp_path),
        made(draft, model_of(8), tmp_path),
        made(draft, target, tmp_path, samples=SAMPLES[1:]),
        made(draft, target, tmp_path, samples=[Sample(each.ids, 2) for each in SAMPLES]),
        labelled_drafts(draft, target, SAMPLES[:6], 5, tmp_path, 0, batch_size=2),
    ]
    assert len(list(tmp_path.iterdir())) == 1 + len(others)
    assert not any(same(first, other) for other in others)
    assert same(made(draft, target, tmp_path), first)


def refusal(*arguments) -> str:
    return refused(lambda: labelled_drafts(*arguments))


def test_another_vocabulary_is_refused(draft, target, tmp_path):
    larger = model_of(1, vocab_size=VOCABULARY + 1)
    assert "training.draft: " in refusal(larger, target, SAMPLES, 4, tmp_path, 0)
    named = [
        Target(model.model, tiny_tokenizer(prefix=prefix))
        for model, prefix in ((draft, "v"), (target, "w"))
    ]
    assert "another vocabulary" in refusal(*named, SAMPLES, 4, tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_texts_without_a_second_token_are_refused(draft, target, tmp_path):
    short = some_samples([(4, 1), (2, 1)])
    assert "second token" in refusal(draft, target, short, 4, tmp_path / "text", 0)
    assert "second token" in refusal(draft, target, SAMPLES, 1, tmp_path / "completions", 0)
