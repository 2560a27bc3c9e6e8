"""SPRINTER's decoder against its algorithm written down without caches, batches and target calls.

By enumeration of all that chance may do: every continuation must come with the probability that
Algorithm 2, with a cap on runs that is not a rejection, gives it.
"""

import time
from collections import Counter
from itertools import product

import pytest
import torch
from studies.approximation import approximation, drafted_positions, emitted_distribution
from studies.sprinter_theory import Rates, expected_run_length, mean_run_length
from tests.decoding.test_every_option_samples import PROMPT, VOCABULARY
from tests.enumeration import EnumeratedChance, enumerated_together, fixed_first
from tests.exhaustive import sparing
from tests.tiny import VOCABULARY as WORDS
from tests.tiny import tiny_target

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Generation, Limits, Run
from slipstream.decoding.sprinter import SprinterDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.speculators.checkpoint import save_speculator
from slipstream.speculators.classifiers import FEATURES, SprinterConfig, SprinterVerifier, shape_of

FIRST, COUNT = 0, 3
COMPANIONS = ([[2, 2, 0, 1, 2, 2, 1]], [[0]])  # before and after the prompts that are looked at
TOLERANCE = 1e-12
ALWAYS, NEVER = 1e-9, 1 - 1e-9


def verifier_of(draft, features=FEATURES, seed: int = 13) -> SprinterVerifier:
    """A random verifier whose verdicts vary with prefix and token."""
    torch.manual_seed(seed)
    verifier = SprinterVerifier(draft, SprinterConfig(tuple(features), (1.0, 1.5)))
    with torch.no_grad():
        verifier.linear.weight.normal_(std=1.5)
    return verifier.eval()


def decoder_of(
    sampling=None, limits=None, threshold=0.5, cap=20, features=FEATURES, vocabulary=VOCABULARY
) -> SprinterDecoder:
    target = tiny_target(seed=3, vocab_size=vocabulary)
    draft = tiny_target(seed=8, vocab_size=vocabulary, hidden_size=16)
    limits = limits or Limits(1 + COUNT)
    verifier = verifier_of(draft, features)
    decoder = SprinterDecoder(
        target, draft, verifier, sampling or Sampling(1.0), limits, 1.5, threshold, cap
    )
    divide(decoder)
    return decoder


@torch.no_grad()
def divide(decoder: SprinterDecoder) -> None:
    """Let the verifier keep about half of what is drafted after the prompt."""
    tokens = range(VOCABULARY)
    texts = [
        [*PROMPT, FIRST, *others] for count in range(3) for others in product(tokens, repeat=count)
    ]
    weights, scores = [], []
    for text in texts:
        _, q, own = Written(decoder).after(text)
        scores.append(own[:VOCABULARY])
        weights.append(q[:VOCABULARY])
    order = torch.cat(scores).argsort()
    passed = torch.cat(weights)[order].cumsum(0)
    place, ordered = int((passed < passed[-1] / 2).sum()), torch.cat(scores)[order]
    decoder.verifier.linear.bias -= (ordered[place - 1] + ordered[place]) / 2


class Written:
    """Algorithm 2 as it is written, one whole forward for every token."""

    def __init__(self, decoder: SprinterDecoder):
        self.decoder = decoder
        self.found: dict[tuple[int, ...], float] = {}
        self.kinds = {"kept": 0.0, "doubted": 0.0, "capped": 0.0}

    @torch.no_grad()
    def after(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p, q and the verifier's score of each token, (V,) each."""
        own = self.decoder
        p = own.sampling.probabilities(own.target.model(torch.tensor([text])).logits[0, -1])
        draft = own.draft.model
        states = draft.model(torch.tensor([text])).last_hidden_state[0, -1]
        logits = draft.lm_head(states)
        logs, tokens = logits.float().log_softmax(-1), torch.arange(len(p))
        features = own.verifier.features(
            states.expand(len(p), -1),
            tokens,
            shape_of(logs).expand(len(p), -1),
            logs,
        )
        return p, own.sampling.probabilities(logits), own.verifier(features)[:, own.output]

    def judged(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p, q and whether the verifier keeps each token, (V,) each."""
        p, q, scores = self.after(text)
        return p, q, scores.sigmoid() >= self.decoder.threshold

    def go_on(self, text: list[int], run: int, probability: float) -> None:
        """Spread the probability of a text, at whose end `run` tokens were kept without a call."""
        done = len(text) - len(PROMPT) - 1
        if probability == 0:
            return
        if done == COUNT:
            key = tuple(text[-COUNT:])
            self.found[key] = self.found.get(key, 0.0) + probability
            return
        p, q, kept = self.judged(text)
        if run == self.decoder.cap:
            self.kinds["capped"] += probability
            for token, share in enumerate(p.tolist()):
                self.go_on([*text, token], 0, probability * share)
            return
        judged = emitted_distribution(p, q, kept) - torch.where(kept, q, 0.0)
        for token in range(len(p)):
            if kept[token]:
                self.kinds["kept"] += probability * float(q[token])
                self.go_on([*text, token], run + 1, probability * float(q[token]))
            self.kinds["doubted"] += probability * float(judged[token])
            self.go_on([*text, token], 0, probability * float(judged[token]))


SAMPLINGS = [Sampling(1.0), Sampling(0.7, top_k=2, top_p=0.95)]


def continuations(decoder: SprinterDecoder, together: int = 32) -> dict[tuple, float]:
    """What may be written after the first token, and how probably; so many runs `together`, in a
    batch with others of other lengths, or each alone."""
    before, after = COMPANIONS if together > 1 else ([], [])

    def outcomes(chances: list[EnumeratedChance]) -> list[tuple]:
        prompts = [*before, *[PROMPT] * len(chances), *after]
        seeds = [*[1] * len(before), *chances, *[2] * len(after)]
        answers = zip(prompts, decoder.generate_batch(prompts, seeds), strict=True)
        found = [answer.ids for ids, answer in answers if ids is PROMPT]
        assert all(first == FIRST for first, *_ in found)
        return [tuple(others) for _, *others in found]

    fixed = fixed_first(decoder.target, PROMPT, decoder.sampling, FIRST)
    return enumerated_together(outcomes, fixed, together)


@pytest.mark.parametrize(
    ("batched", "cap", "features", "sampling"),
    sparing(
        product((False, True), (1, 2, 20), (("hidden",), FEATURES), SAMPLINGS),
        lambda batched, cap, features, sampling: (
            batched == (cap > 1) and (features == FEATURES) == (sampling == SAMPLINGS[1])
        ),
    ),
)
def test_every_continuation_has_the_probability_of_the_algorithm(
    sampling, features, cap, batched, chance
):
    decoder = decoder_of(sampling, cap=cap, features=features)
    written = Written(decoder)
    written.go_on([*PROMPT, FIRST], 0, 1.0)
    assert min(written.kinds["kept"], written.kinds["doubted"]) > 0.1
    assert (written.kinds["capped"] > 0.02) == (cap == 1 or (cap == 2 and features == FEATURES))
    found = continuations(decoder, together=32 if batched else 1)
    for continuation in found.keys() | written.found.keys():
        expected = written.found.get(continuation, 0.0)
        assert found.get(continuation, 0.0) == pytest.approx(expected, abs=TOLERANCE)


def joint_of(decoder: SprinterDecoder, model) -> float:
    """Largest difference between the decoder's continuations and those of a model alone."""
    limits, decoder.limits = decoder.limits, Limits(3)
    found = continuations(decoder)
    decoder.limits = limits
    errors = []
    for first in range(VOCABULARY):
        for second in range(VOCABULARY):
            probability, text = 1.0, [*PROMPT, FIRST]
            for token in (first, second):
                logits = model(torch.tensor([text])).logits[0, -1]
                probability *= float(logits.softmax(-1)[token])
                text = [*text, token]
            errors.append(abs(found.get((first, second), 0.0) - probability))
    return max(errors)


@torch.no_grad()
def test_a_verifier_that_always_doubts_gives_the_target_s_distribution(chance):
    decoder = decoder_of(threshold=NEVER)
    assert joint_of(decoder, decoder.target.model) < TOLERANCE
    assert joint_of(decoder, decoder.draft.model) > 0.01


@torch.no_grad()
def test_a_verifier_that_never_doubts_gives_the_draft_model_s_distribution(chance):
    decoder = decoder_of(threshold=ALWAYS)
    assert joint_of(decoder, decoder.draft.model) < TOLERANCE
    assert joint_of(decoder, decoder.target.model) > 0.01


@torch.no_grad()
@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
def test_a_control_keeps_tokens_by_chance(keep, chance):
    """What it writes is a mixture of both models, token by token, and so its distance is known."""
    like = decoder_of()
    decoder = SprinterDecoder(
        like.target, like.draft, keep, Sampling(1.0), Limits(1 + COUNT), 1.0, 0.5, 20
    )
    found = continuations(decoder)
    written = Written(like)
    for continuation in product(range(VOCABULARY), repeat=COUNT):
        probability, text = 1.0, [*PROMPT, FIRST]
        for token in continuation:
            p, q, _ = written.after(text)
            probability *= float(keep * q[token] + (1 - keep) * p[token])
            text = [*text, token]
        assert found.get(continuation, 0.0) == pytest.approx(probability, abs=TOLERANCE)
    apart = approximation(decoder, PROMPT, decoder.generate(PROMPT, 5))
    assert apart.positions == COUNT
    assert apart.distance == pytest.approx(keep * apart.pair_distance, abs=1e-6)


@torch.no_grad()
def test_a_cap_that_ends_a_run_is_no_rejection(chance):
    """Every other token is the target's; the one before it stays whatever p/q says."""
    decoder = decoder_of(threshold=ALWAYS, cap=1)
    written = Written(decoder)
    written.go_on([*PROMPT, FIRST], 0, 1.0)
    assert written.kinds["doubted"] < TOLERANCE
    assert joint_of(decoder, decoder.draft.model) > 0.01


def test_the_target_sees_each_token_once_and_is_called_once_a_run():
    decoder, rows = decoder_of(limits=Limits(40), vocabulary=WORDS), []
    forward = decoder.target.forward
    decoder.target.forward = lambda ids, *args, **rest: (
        rows.append(ids.shape[1]) or forward(ids, *args, **rest)
    )
    answer = decoder.generate(PROMPT, seed=3)
    seen = answer.statistics
    assert rows[0] == len(PROMPT) and len(rows) - 1 == seen.target_forwards
    assert sum(rows[1:]) == seen.target_rows <= len(answer.ids)
    assert 1 < len(rows) < len(answer.ids)


def test_long_runs_are_cut_by_the_cap():
    decoder = decoder_of(limits=Limits(41), threshold=ALWAYS, cap=4, vocabulary=WORDS)
    statistics = decoder.generate(PROMPT).statistics
    assert statistics.target_forwards == 8 and statistics.tau == 5.0


@pytest.mark.parametrize("threshold", [ALWAYS, 0.5, NEVER])
def test_nothing_follows_an_end_token(threshold):
    """Drafted and kept, doubted and kept, or drawn by the target: the answer ends with it."""
    decoder = decoder_of(limits=Limits(30), threshold=threshold, vocabulary=8)
    decoder.target.model.generation_config.eos_token_id = [2]
    answers = [answer.ids for answer in decoder.generate_batch([PROMPT] * 30, list(range(30)))]
    assert all(answer.count(2) == (answer[-1] == 2) for answer in answers)
    ended = [answer for answer in answers if answer[-1] == 2]
    assert len(ended) > 20 and len(set(map(len, ended))) > 3


def test_batches_of_several_lengths_answer_as_each_prompt_alone():
    decoder = decoder_of(limits=Limits(25), vocabulary=WORDS)
    decoder.target.model.generation_config.eos_token_id = [7, 11]
    prompts, seeds = [[1, 2, 3], [4] * 9, [5, 6], [9, 8, 7, 6, 5]], [3, 1, 4, 1]
    together = [answer.ids for answer in decoder.generate_batch(prompts, seeds)]
    alone = [
        decoder.generate(prompt, seed).ids for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert together == alone and len(set(map(len, alone))) > 2


def test_tokens_are_shown_as_they_are_decided():
    decoder, shown = decoder_of(limits=Limits(30), vocabulary=WORDS), []
    answer = decoder.generate(PROMPT, 5, lambda token, drafted, _: shown.append((token, drafted)))
    assert [token for token, _ in shown] == answer.ids
    assert {drafted for _, drafted in shown} == {True, False} and not shown[0][1]


def test_a_draft_model_of_a_shorter_context_lets_the_target_go_on_alone():
    decoder = decoder_of(limits=Limits(30), threshold=ALWAYS, vocabulary=WORDS)
    decoder.draft.max_positions = 12
    answer = decoder.generate(PROMPT)
    drafted = 12 + 1 - len(PROMPT) - 1
    assert len(answer.ids) == 30
    assert answer.statistics.target_forwards == 30 - 1 - drafted


def test_no_second_is_counted_twice(monkeypatch):
    """Models alone advance the clock: each share is its own model's, and the sum is the whole."""
    now, drafted, verified = [0.0], [], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def timed(forward, seconds: float, calls: list[float]):
        def advance(*args, **rest):
            calls.append(seconds)
            now[0] += seconds
            return forward(*args, **rest)

        return advance

    decoder = decoder_of(limits=Limits(12), vocabulary=WORDS)
    decoder.draft.forward = timed(decoder.draft.forward, 0.02, drafted)
    decoder.target.forward = timed(decoder.target.forward, 0.05, verified)
    statistics = decoder.generate(PROMPT, seed=3).statistics
    shares = statistics.shares
    assert len(drafted) > 3 and len(verified) > 2
    assert shares["prefill"] == pytest.approx(verified[0] + drafted[0])  # both read the prompt
    assert shares["draft"] == pytest.approx(sum(drafted[1:]))
    assert shares["verify"] == pytest.approx(sum(verified[1:]))
    assert statistics.seconds == pytest.approx(sum(shares.values()))


def test_what_is_emitted_is_as_far_from_the_target_as_is_said():
    """The distance by formula against that of the algorithm's own next-token distribution."""
    decoder = decoder_of()
    runs = (Run(1, "doubt"), Run(0, "doubt"))
    found = approximation(
        decoder, PROMPT, Generation([FIRST, 1, 2, 0], "", "length", Statistics(), runs)
    )
    written, distance, pair = Written(decoder), 0.0, 0.0
    for end in range(3):
        text = [*PROMPT, FIRST, 1, 2][: len(PROMPT) + 1 + end]
        p, q, kept = written.judged(text)
        emitted = torch.zeros(VOCABULARY, dtype=torch.float64)
        residual = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
        for token in range(VOCABULARY):
            stays = 1.0 if kept[token] else min(1.0, float(p[token] / q[token]))
            emitted[token] += q[token] * stays
            emitted += q[token] * (1 - stays) * residual
        distance += float((emitted - p).abs().sum()) / 2
        pair += float((p - q).abs().sum()) / 2
    assert found.positions == 3 and found.tokens == 4 and (found.kept, found.doubts) == (1, 2)
    assert found.distance == pytest.approx(distance, abs=1e-9) and distance > 0.01
    assert found.pair_distance == pytest.approx(pair, abs=1e-9)


def test_runs_say_how_each_token_came_about():
    decoder = decoder_of(limits=Limits(60), cap=3, vocabulary=WORDS)
    decoder.target.model.generation_config.eos_token_id = [7]
    kinds = Counter()
    for seed in range(8):
        shown = []
        answer = decoder.generate(
            PROMPT, seed, lambda _, drafted, __, own=shown: own.append(drafted)
        )
        runs, places = answer.runs, drafted_positions(answer)
        kinds.update(run.ended for run in runs)
        assert all(run.ended != "end" for run in runs[:-1])
        judged = sum(run.ended != "end" for run in runs)
        assert len(answer.ids) == 1 + sum(run.kept for run in runs) + judged
        assert all((run.kept == 3) == (run.ended == "cap") for run in runs if run.ended != "end")
        assert len(runs) - (runs[-1].ended == "end") == answer.statistics.target_forwards
        own = [place for place in range(1, len(answer.ids)) if place not in places]
        assert len(own) == sum(run.ended == "cap" for run in runs)
        assert not any(shown[place] for place in own)
        assert sum(shown) >= sum(run.kept for run in runs)
    assert kinds.keys() == {"doubt", "cap", "end"}


def test_tokens_of_the_target_s_own_are_not_counted_as_drafted():
    """A verifier that never doubts, cut at 2: every third token is the target's."""
    decoder = decoder_of(limits=Limits(10), threshold=ALWAYS, cap=2, vocabulary=WORDS)
    answer = decoder.generate(PROMPT)
    found = approximation(decoder, PROMPT, answer)
    assert answer.runs == (Run(2, "cap"),) * 3
    assert drafted_positions(answer) == [1, 2, 4, 5, 7, 8]
    told = found.columns()
    assert found.positions == 6 and found.tokens == 10 and told["kept a doubt"] is None
    assert found.distance_of_answers == pytest.approx(told["distance"] * 6 / 10)
    assert told["distance"] == pytest.approx(told["d_TV(p, q)"], rel=1e-9)


@pytest.mark.parametrize("rates", [Rates(0.9, 0.5), Rates(0.6, 0.1)])
def test_the_mean_of_theorem_2_is_its_mean_over_all_lengths(rates):
    share = 0.7
    expected = sum(
        share**count * (1 - share) * expected_run_length(rates, count) for count in range(300)
    )
    assert mean_run_length(rates, share) == pytest.approx(expected, rel=1e-9)


def test_errors_that_know_nothing_of_the_prefix_are_as_far_off_as_theorem_1_says():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 8, generator=generator, dtype=torch.float64).softmax(-1)
    acceptable, num = q <= p, 40_000
    chances = torch.rand(num, 8, generator=generator)
    kept = torch.where(acceptable, chances < 0.8, chances < 0.3)
    emitted = emitted_distribution(p, q, kept).mean(0)
    torch.testing.assert_close(emitted, 0.7 * p + 0.3 * q, rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(threshold=0.0), "threshold: must be a finite number, above 0 and below 1"),
        (dict(threshold=1.0), "threshold: must be a finite number, above 0 and below 1"),
        (dict(cap=0), "cap: must be a whole number, at least 1"),
        (dict(sampling=Sampling(0.0)), "sampling.temperature: SPRINTER samples"),
    ],
)
def test_bad_dials_are_refused_in_one_sentence(changes, expected):
    with pytest.raises(InputError, match=expected):
        decoder_of(**changes)


def parts(vocabulary: int = WORDS, width: int = 16):
    draft = tiny_target(seed=8, vocab_size=vocabulary, hidden_size=width)
    return tiny_target(seed=3), draft, verifier_of(tiny_target(seed=8, hidden_size=16))


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.2])
def test_a_lambda_that_the_verifier_does_not_know_is_refused(ratio):
    with pytest.raises(InputError, match=r"^ratio: "):
        SprinterDecoder(*parts(), Sampling(1.0), Limits(3), ratio, 0.5, 5)


def test_another_vocabulary_is_refused():
    with pytest.raises(InputError, match=r"^draft: tiny-llama has another vocabulary"):
        SprinterDecoder(*parts(vocabulary=39), Sampling(1.0), Limits(3), 1.5, 0.5, 5)


def test_a_verifier_for_another_draft_width_is_refused():
    with pytest.raises(InputError, match="of width 16, of another draft model than this one"):
        SprinterDecoder(*parts(width=24), Sampling(1.0), Limits(3), 1.5, 0.5, 5)


def test_a_verifier_for_another_draft_of_the_same_width_is_refused():
    target, draft, verifier = parts()
    draft.fingerprint = {"weights": "a"}
    verifier.features.draft.fingerprint = {"weights": "b"}
    with pytest.raises(InputError, match="of another draft model than this one"):
        SprinterDecoder(target, draft, verifier, Sampling(1.0), Limits(3), 1.5, 0.5, 5)


def test_a_verifier_for_another_target_is_refused():
    target, draft, verifier = parts()
    target.fingerprint = {"weights": "a"}
    judged = SprinterConfig(verifier.config.features, (1.5,), {"weights": "b"})
    other = SprinterVerifier(draft, judged)
    with pytest.raises(InputError, match="judge drafts for another target"):
        SprinterDecoder(target, draft, other, Sampling(1.0), Limits(3), 1.5, 0.5, 5)


def test_it_says_that_it_is_approximate():
    assert SprinterDecoder.exact is False


def test_a_folder_that_names_no_target_is_refused(tmp_path):
    target = tiny_target(seed=3, vocab_size=VOCABULARY)
    draft = tiny_target(seed=8, vocab_size=VOCABULARY, hidden_size=16)
    target.fingerprint, draft.fingerprint = {"weights": "a"}, {"weights": "d"}
    folder = save_speculator(tmp_path / "verifier", verifier_of(draft), draft, 9, "# A")
    with pytest.raises(InputError, match="judge drafts for another target"):
        SprinterDecoder(target, draft, folder, Sampling(1.0), Limits(3), 1.5, 0.5, 5)


def test_a_draft_model_that_is_not_finite_is_named():
    draft = tiny_target(seed=8)
    draft.model.lm_head.weight.data[3] = float("nan")
    decoder = SprinterDecoder(
        tiny_target(seed=3), draft, 1.0, Sampling(1.0), Limits(8), 1.0, 0.5, 4
    )
    with pytest.raises(InputError, match=r"^draft: its logits are not finite"):
        decoder.generate(PROMPT)


@pytest.mark.parametrize("keep", [0, 1])
def test_a_control_may_keep_all_or_nothing_in_whole_numbers(keep):
    decoder = SprinterDecoder(*parts()[:2], keep, Sampling(1.0), Limits(3), 1.0, 0.5, 5)
    assert decoder.verifier is None and decoder.kept == float(keep)


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_requests_are_sampled_as_each_asks(kept):
    """Beside others that ask otherwise; with one token to choose from no chance is left."""
    decoder = SprinterDecoder(*parts()[:2], kept, Sampling(1.0), Limits(8), 1.0, 0.5, 5)
    narrow = [decoder.request(PROMPT, seed, sampling=Sampling(1.0, top_k=1)) for seed in range(5)]
    wide = [decoder.request(PROMPT, seed) for seed in range(5)]
    decoder.start([*narrow, *wide])
    while decoder.running:
        decoder.step()
    assert len({tuple(request.answer.ids) for request in narrow}) == 1
    assert len({tuple(request.answer.ids) for request in wide}) > 1
    with pytest.raises(InputError, match=r"^sampling.temperature: SPRINTER samples"):
        decoder.start([decoder.request(PROMPT, sampling=Sampling(0.0))])
