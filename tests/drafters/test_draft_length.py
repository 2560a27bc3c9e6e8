"""Rules that end a draft: decoding stays exact, each does its arithmetic, state goes by sequence.

Exact sampling is tested by enumeration, as in `test_every_option_samples.py`: the next three tokens
of a prompt must come with the probabilities of one token per forward, wherever the rules stop.
Where every token is possible one step is enumerated: what follows has the target's probabilities.
"""

from itertools import product
from math import log

import pytest
import torch
from slipstream.core.tree import DraftTree
from tests.commands import refused
from tests.core.test_exact_sampling import EnumeratedRandomness, enumerated
from tests.decoding.test_every_option_samples import FIRST, PROMPT, AfterFirst
from tests.decoding.test_greedy_identity import batch_of, prompts
from tests.decoding.test_sampling_table import COMPANIONS, SAMPLINGS
from tests.drafters import untrained
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling, SeededRandomness
from slipstream.decoding import decoder
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.acceptance_length import AnyRejected, LastRejected
from slipstream.drafters.base import Context
from slipstream.drafters.draft_length import (
    AssistantThreshold,
    DraftLength,
    Drawn,
    EntropyBound,
    Heuristic,
)
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import AdaptiveNgram, PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.acceptance import AcceptanceConfig, AcceptanceHead
from slipstream.speculators.checkpoint import save_speculator
from slipstream.targets.loading import load_target

VOCABULARY, COUNT, LONGER = 3, 3, 1
ENUMERATED = dict.fromkeys(SAMPLINGS, COUNT) | {"temperature": 1}
"""How many tokens at least."""
TOLERANCE = 1e-12
NUM_TOKENS = 24


def head_of(draft, seed: int = 2) -> AcceptanceHead:
    """Random weights large enough that most drawn tokens are surely accepted or rejected."""
    torch.manual_seed(seed)
    head = AcceptanceHead(draft, AcceptanceConfig(width=8, depth=2))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.6)
    return head.eval()


def entropy_bound(scale: float = 0.2, threshold: float = 0.4, **changes) -> EntropyBound:
    settings = dict(goal=0.9, step=0.01, memory=0.5, inertia=0.9) | changes
    return EntropyBound(scale, threshold, **settings)


RULES = {
    "entropy_bound": lambda draft: entropy_bound(0.5, 0.35, goal=0.5, step=0.1, inertia=0.2),
    "any_rejected": lambda draft: AnyRejected(head_of(draft), 0.5),
    "last_rejected": lambda draft: LastRejected(head_of(draft), 0.5),
} | {name: lambda _, rule=rule: rule() for name, rule in untrained.RULES.items()}
CLASSIFIED = {"any_rejected": AnyRejected, "last_rejected": LastRejected}


class Watched(DraftModel):
    """Notes of the drafts after each text how long they became and how long they could be."""

    def __init__(self, model, num_tokens: int, length: DraftLength | None):
        super().__init__(model, num_tokens, length)
        self.lengths: dict[tuple[int, ...], set[tuple[int, int]]] = {}

    def propose(self, contexts, budget):
        trees = super().propose(contexts, budget)
        for context, tree in zip(contexts, trees, strict=True):
            possible = min(self.num_tokens, budget - 1, context.max_depth)
            after = self.lengths.setdefault(tuple(context.tokens), set())
            after.add((len(tree) - 1, possible))
        return trees

    @property
    def varied(self) -> bool:
        """Whether some drafts were stopped early and some were not."""
        pairs = set().union(*self.lengths.values())
        assert all(drafted <= possible for drafted, possible in pairs)
        assert all(drafted for drafted, possible in pairs if possible)
        return {drafted < possible for drafted, possible in pairs if possible > 1} == {True, False}

    def lengths_after(self, text: list[int]) -> set[int]:
        return {drafted for drafted, _ in self.lengths[tuple(text)]}


class Forgetful(Watched):
    """Inexact: drops the token at which a rule that looks at it ends the draft."""

    def propose(self, contexts, budget):
        return [
            self._shortened(tree, min(self.num_tokens, context.max_depth))
            for tree, context in zip(super().propose(contexts, budget), contexts, strict=True)
        ]

    def _shortened(self, tree: DraftTree, possible: int) -> DraftTree:
        count = len(tree) - 1
        if count == possible:
            return tree
        shorter = DraftTree.chain(tree.tokens[:count])
        shorter.proposals = {node: own for node, own in tree.proposals.items() if node < count - 1}
        return shorter


class Enough(Exception):
    """The enumerated prompt has all tokens that are looked at."""


class Interrupted(Engine):
    """Raises `Enough` with the first tokens of the enumerated prompt, `enough` at least."""

    enough = COUNT

    def _decide(self, line, step, drafted) -> None:
        super()._decide(line, step, drafted)
        if isinstance(line.context.randomness, AfterFirst) and len(line.answer.ids) > self.enough:
            raise Enough(line.answer.ids[: 1 + COUNT])


@pytest.fixture
def chance_is_handed_in_as_the_seed(monkeypatch):
    monkeypatch.setattr(decoder, "SeededRandomness", lambda randomness: randomness)


def expected(target, sampling: Sampling) -> torch.Tensor:
    """(3, 3, 3) probabilities of the sequences, each text anew through transformers' model."""
    texts, joint = torch.tensor([[*PROMPT, FIRST]]), torch.ones(1, dtype=torch.float64)
    for _ in range(COUNT):
        logits = target.model(texts).logits[:, -1]
        joint = (joint[:, None] * sampling.probabilities(logits)).flatten()
        following = torch.arange(VOCABULARY).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCABULARY, dim=0), following], dim=1)
    return joint.reshape([VOCABULARY] * COUNT)


def largest_error(drafter: Watched, target, setting: str, batched: bool = False) -> float:
    """Of the probabilities with which the engine emits the sequences."""
    sampling, limits = SAMPLINGS[setting], Limits(1 + COUNT + LONGER)
    engine = Interrupted(target, drafter, sampling, limits, drafter.num_tokens + 1)
    engine.enough = ENUMERATED[setting]
    exact = expected(target, sampling)
    assert 0 < exact.max() < 0.75
    found = torch.zeros_like(exact)
    batch = [COMPANIONS[0], PROMPT, COMPANIONS[1]] if batched else [PROMPT]

    def outcome(randomness: EnumeratedRandomness) -> tuple:
        chance = AfterFirst(randomness)
        seeds = [SeededRandomness(1), chance, SeededRandomness(2)] if batched else [chance]
        with pytest.raises(Enough) as caught:
            engine.generate_batch(batch, seeds)
        first, *others = caught.value.args[0]
        assert first == FIRST
        return tuple(others)

    for emitted, probability in enumerated(outcome).items():
        found[emitted] += probability * exact[emitted] / exact[emitted].sum()
    return float((found - exact).abs().max())


def small_pair():
    """A target and a draft model of three tokens."""
    target = tiny_target(seed=3, vocab_size=VOCABULARY, num_hidden_layers=2)
    return target, tiny_target(seed=12, vocab_size=VOCABULARY, num_hidden_layers=1)


@pytest.mark.parametrize("batched", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize(("name", "setting"), list(product(RULES, SAMPLINGS)))
def test_every_continuation_has_the_probability_of_one_token_per_forward(
    chance_is_handed_in_as_the_seed, name, setting, batched
):
    target, draft = small_pair()
    drafter = Watched(draft, 3, RULES[name](draft))
    assert largest_error(drafter, target, setting, batched) < TOLERANCE
    after = drafter.lengths_after([*PROMPT, FIRST])
    if drafter.length.looks_at == "nothing":
        assert after == {2}, "rules that count begin with two tokens"
        return
    assert drafter.varied
    assert len(after) > 1, "the first draft is of one length, whatever is drawn"
    if name in CLASSIFIED:
        assert 1 in after, "the first token drawn makes no difference"


def test_a_rule_that_drops_the_token_it_looked_at_is_noticed(chance_is_handed_in_as_the_seed):
    target, draft = small_pair()
    drafter = Forgetful(draft, 3, RULES["last_rejected"](draft))
    assert largest_error(drafter, target, "all") > 1e-3
    assert largest_error(Forgetful(draft, 3, None), target, "all") < TOLERANCE


def likely_pair():
    """A target and a draft model that mostly agrees with it."""
    target, draft = tiny_target(num_hidden_layers=2), tiny_target(num_hidden_layers=2)
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += 0.015 * noise
    return target, draft


LIKELY_RULES = RULES | {
    "entropy_bound": lambda draft: entropy_bound(0.2, 0.22, goal=0.7, step=0.02, inertia=0.3),
    "gammatune_plus": lambda draft: untrained.gammatune(0.13, most=6),
    "assistant_threshold": lambda draft: AssistantThreshold(0.1),
}


@pytest.mark.parametrize("name", LIKELY_RULES)
def test_greedy_answers_are_those_of_plain_decoding(name):
    """Alone, and in batches whose answers end at different lengths."""
    target, draft = likely_pair()
    limits = Limits(NUM_TOKENS)
    plain, drafter = PlainDecoder(target, Sampling(), limits), Watched(draft, 5, None)
    drafter.length = LIKELY_RULES[name](draft)
    engine = Engine(target, drafter, Sampling(), limits, budget=7)
    taus = []
    for prompt in prompts(seed=3, count=6):
        answer = engine.generate(prompt)
        assert answer.ids == plain.generate(prompt).ids
        taus.append(answer.statistics.tau)
    assert max(taus) > 1.5 and drafter.varied
    drafter.lengths.clear()
    for size in (2, 4, 8):
        batch = batch_of(size)
        endless = [plain.generate(prompt).ids for prompt in batch]
        ends = [endless[0][17], endless[size // 2][11], endless[-1][5]]
        target.model.generation_config.eos_token_id = ends
        alone = [plain.generate(prompt).ids for prompt in batch]
        assert len({len(ids) for ids in alone}) >= min(size, 3)
        assert [answer.ids for answer in engine.generate_batch(batch)] == alone
        target.model.generation_config.eos_token_id = None
    assert drafter.varied


@pytest.mark.parametrize("name", LIKELY_RULES)
def test_sampled_answers_of_a_batch_are_those_alone_with_the_same_seeds(name):
    """How much chance is used depends on the lengths of the drafts: their states go with their
    sequences, which leave one after the other."""
    target, draft = likely_pair()
    drafter = Watched(draft, 5, LIKELY_RULES[name](draft))
    engine = Engine(target, drafter, Sampling(0.7), Limits(NUM_TOKENS), budget=6)
    batch, seeds = batch_of(6), [11, 12, 13, 11, 15, 16]
    pairs = list(zip(batch, seeds, strict=True))
    endless = [engine.generate(*pair).ids for pair in pairs]
    target.model.generation_config.eos_token_id = [endless[0][9], endless[3][6]]
    alone = [engine.generate(*pair).ids for pair in pairs]
    assert len({len(ids) for ids in alone}) >= 3 and drafter.varied
    assert [answer.ids for answer in engine.generate_batch(batch, seeds)] == alone


class Spy(DraftLength):
    """Compares what it is shown with the draft model's plain forwards, and stops at even tokens."""

    def __init__(self, model):
        self.model = model
        self.texts: list[list[int]] = []
        self.drafted: list[int] = []
        self.going: list[bool] = []
        self.seen: list[tuple[int, int]] = []

    def begin(self, count: int) -> None:
        self.count = count

    def start(self) -> None:
        self.drafted, self.going = [0] * self.count, [True] * self.count

    def leave(self, kept: list[int]) -> None:
        self.count = len(kept)

    def stops(self, drawn: Drawn) -> list[bool]:
        assert len(drawn.places) == len(drawn.tokens) == len(drawn.hidden) == len(drawn.logits)
        assert all(self.going[place] for place in drawn.places)
        assert torch.equal(self.model.logits(drawn.hidden), drawn.logits)
        for place, token, logits in zip(drawn.places, drawn.tokens, drawn.logits, strict=True):
            plain = self.model.model(torch.tensor([self.texts[place]])).logits[0, -1]
            torch.testing.assert_close(logits, plain, rtol=0, atol=1e-10)
            self.texts[place].append(token)
            self.drafted[place] += 1
        stops = [token % 2 == 0 for token in drawn.tokens]
        for place, stop in zip(drawn.places, stops, strict=True):
            self.going[place] = not stop
        return stops

    def observe(self, place: int, drafted: int, accepted: int) -> None:
        assert drafted == self.drafted[place] and 0 <= accepted <= drafted
        self.seen.append((drafted, accepted))


class Shown(Watched):
    """Tells its `Spy` the texts."""

    def propose(self, contexts, budget):
        self.length.texts = [list(context.tokens) for context in contexts]
        return super().propose(contexts, budget)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7)], ids=["greedy", "sampled"])
def test_rules_are_shown_what_each_token_was_drawn_from_and_what_became_of_it(sampling):
    target, draft = likely_pair()
    spy = Spy(draft)
    drafter = Shown(draft, 5, spy)
    engine = Engine(target, drafter, sampling, Limits(NUM_TOKENS), budget=6)
    batch = batch_of(4)
    endless = engine.generate_batch(batch, [1, 2, 3, 4])
    assert drafter.varied
    target.model.generation_config.eos_token_id = [endless[0].ids[12], endless[2].ids[6]]
    answers = engine.generate_batch(batch, [1, 2, 3, 4])
    assert len({len(answer.ids) for answer in answers}) > 1 and spy.count < len(batch)
    target.model.generation_config.eos_token_id = None
    spy.seen.clear()
    answer = engine.generate(batch[0])
    assert len(spy.seen) == answer.statistics.target_forwards - 1  # the last one ends the answer
    decided = 1 + sum(1 + accepted for _, accepted in spy.seen)
    assert NUM_TOKENS - 6 <= decided < NUM_TOKENS
    assert {accepted == drafted for drafted, accepted in spy.seen} == {True, False}


def drawn(*logits: list[float], places: list[int] | None = None) -> Drawn:
    """Sequences that drew token 0 from these."""
    places = list(range(len(logits))) if places is None else places
    hidden = torch.zeros(len(places), 2)
    return Drawn(places, torch.tensor(logits), [0] * len(places), hidden)


def test_entropy_bound_by_numbers():
    """log 4 nats at scale 0.2: 1 - sqrt(0.2 * 1.38629) = 0.47345; certainty: 1."""
    even, sure = [1.0, 1.0, 1.0, 1.0], [50.0, 0.0, 0.0, -torch.inf]
    for threshold, stops in ((0.4734, False), (0.4735, True)):
        rule = entropy_bound(0.2, threshold)
        rule.begin(3)
        assert rule.stops(drawn(even, sure)) == [stops, False]
    rule.thresholds = [0.9, 0.4, 1.01]
    assert rule.stops(drawn(even, even, sure)) == [True, False, True]
    assert rule.stops(drawn(even, even, places=[1, 2])) == [False, True]
    rule = entropy_bound(1 / log(4), 1e-4)  # the bound is 0
    rule.begin(1)
    assert rule.stops(drawn(even)) == [True]
    rule = entropy_bound(2.0, -1.0)  # and here 1 - sqrt(2 log 4) = -0.665
    rule.begin(1)
    assert rule.stops(drawn(even)) == [False]


def test_the_threshold_follows_the_share_of_accepted_tokens():
    """Shares 0.5 * 0.9 + 0.5 * 2/4 = 0.7, then 0.85, then 0.925, of which 0.9 is the goal; the
    threshold goes a tenth of the step of 0.01."""
    rule = entropy_bound()
    rule.begin(2)
    assert (rule.thresholds, rule.shares) == ([0.4, 0.4], [0.9, 0.9])
    steps = [((4, 2), 0.7, 0.401), ((2, 2), 0.85, 0.402), ((3, 3), 0.925, 0.401)]
    for (drafted, accepted), share, threshold in steps:
        rule.observe(1, drafted, accepted)
        assert rule.shares == pytest.approx([0.9, share])
        assert rule.thresholds == pytest.approx([0.4, threshold])
    rule.observe(0, 0, 0)
    assert (rule.thresholds[0], rule.shares[0]) == (0.4, 0.9)
    rule.start()
    assert rule.thresholds == pytest.approx([0.4, 0.401])
    rule.begin(1)
    assert (rule.thresholds, rule.shares) == ([0.4], [0.9])


def told(kind, threshold: float, *answers: list[float]):
    """A rule whose head gives these probabilities, call after call."""
    rule, waiting = kind(None, threshold), list(answers)
    rule.accepted = lambda drawn: waiting.pop(0)
    return rule


def test_any_rejected_multiplies_over_the_draft_and_starts_over():
    """0.9 * 0.8 = 0.72 and 0.72 * 0.7 = 0.504: rejected with 0.28, then 0.496."""
    rule = told(AnyRejected, 0.4, [0.9, 0.5], [0.8], [0.7], [0.7, 0.7])
    one = [0.0, 0.0]
    rule.begin(2)
    rule.start()
    assert rule.stops(drawn(one, one)) == [False, True]
    assert rule.stops(drawn(one, places=[0])) == [False]
    assert rule.stops(drawn(one, places=[0])) == [True]
    assert rule.all_accepted == pytest.approx([0.504, 0.5])
    rule.start()
    assert rule.stops(drawn(one, one)) == [False, False]
    assert rule.all_accepted == pytest.approx([0.7, 0.7])


def test_last_rejected_looks_at_the_last_token_alone():
    rule = told(LastRejected, 0.6, [0.61, 0.59], [0.61], [0.61], [0.59])
    one = [0.0, 0.0]
    rule.begin(2)
    rule.start()
    assert rule.stops(drawn(one, one)) == [False, True]
    assert rule.stops(drawn(one, places=[0])) == [False]
    assert rule.stops(drawn(one, places=[0])) == [False]
    assert rule.stops(drawn(one, places=[0])) == [True]


def test_leaving_takes_the_states_along():
    rule = entropy_bound()
    rule.begin(4)
    rule.thresholds, rule.shares = [0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]
    rule.leave([1, 3])
    assert (rule.thresholds, rule.shares) == ([0.2, 0.4], [0.6, 0.8])
    rule.leave([1])
    assert (rule.thresholds, rule.shares) == ([0.4], [0.8])
    rule = told(AnyRejected, 0.4, [0.9, 0.8, 0.7], [0.5, 0.5])
    one = [0.0, 0.0]
    rule.begin(3)
    rule.stops(drawn(one, one, one))
    rule.leave([0, 2])
    assert rule.all_accepted == pytest.approx([0.9, 0.7])
    rule.stops(drawn(one, one))
    assert rule.all_accepted == pytest.approx([0.45, 0.35])
    rule.start()
    assert rule.all_accepted == [1.0, 1.0]


@torch.no_grad()
@pytest.mark.parametrize("kind", CLASSIFIED.values())
def test_the_head_is_asked_about_the_token_and_what_it_was_drawn_from(kind):
    """Its features by transformers' own forward: the last hidden state, after the norm."""
    draft = tiny_target(seed=4)
    text, tokens = torch.tensor([[3, 1, 4], [1, 5, 9]]), torch.tensor([7, 2])
    head, last = head_of(draft), draft.model.model(text).last_hidden_state[:, -1]
    logits = draft.model(text).logits[:, -1]
    logs = logits.log_softmax(-1)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    (first, second), rows = logs.sort(descending=True).values[:, :2].T, range(2)
    distribution = torch.stack([entropy, first.exp(), first - second, logs[rows, tokens]], 1)
    embedding = draft.model.get_input_embeddings().weight[tokens]
    features = torch.cat([last, embedding, distribution], 1).float()
    reference = head(features)[:, 0].sigmoid()
    states = draft.forward(text, torch.arange(3).expand(2, -1), None, None).hidden[:, -1]
    rule = kind(head, 0.5)
    rule.bind(draft)
    accepted = rule.accepted(Drawn([0, 1], logits, tokens.tolist(), states))
    torch.testing.assert_close(torch.tensor(accepted), reference)
    assert abs(accepted[0] - accepted[1]) > 0.01
    others = rule.accepted(Drawn([0, 1], logits, [8, 2], states))
    assert others[0] != pytest.approx(accepted[0]) and others[1] == pytest.approx(accepted[1])


@pytest.mark.parametrize("kind", CLASSIFIED.values())
@pytest.mark.parametrize("threshold", [0, 1, -0.1, 1.5, float("nan")])
def test_a_threshold_that_never_or_always_stops_is_refused(kind, threshold):
    assert refused(lambda: kind("folder", threshold)).startswith("length.threshold: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *product(["scale"], [0, -1.0]),
        *product(["goal", "memory", "inertia"], [-0.1, 1.1, float("nan")]),
        *product(["scale", "threshold", "step"], [float("inf"), float("nan")]),
        ("step", -0.1),
    ],
)
def test_settings_of_the_entropy_bound_out_of_range_are_refused(field, value):
    message = refused(lambda: entropy_bound(**{field: value}))
    assert message.startswith("length") and field in message


@pytest.mark.parametrize("kind", CLASSIFIED.values())
def test_a_head_for_another_draft_model_is_refused(kind, tmp_path):
    draft = tiny_target()
    rule = kind(head_of(draft), 0.5)
    rule.bind(draft)
    assert "another draft model" in refused(lambda: rule.bind(tiny_target(seed=1)))


@pytest.mark.parametrize("kind", CLASSIFIED.values())
def test_a_folder_of_another_kind_is_refused(kind, tmp_path):
    draft = tiny_target()
    streaming = tiny_speculator(draft)
    folder = save_speculator(tmp_path / "streaming", streaming, draft, 9, "# A")
    for head in (str(folder), streaming):
        rule = kind(head, 0.5)
        for _ in range(2):
            message = refused(lambda rule=rule: rule.bind(draft))
            assert message.startswith("length.head: ") and "'streaming'" in message
    assert "absent" in refused(lambda: kind(str(tmp_path / "absent"), 0.5).bind(draft))


def test_a_shipped_speculator_is_no_acceptance_head():
    """Of the target it was trained for it is of another kind; of a draft model, for another."""
    own = load_target("slipstream/small-target", device="cpu", packed=False)
    drafter = DraftModel(own, 3, AnyRejected("slipstream/small-streaming", 0.5))
    message = refused(lambda: Engine(own, drafter, Sampling(), Limits(4), 4))
    assert message.startswith("length.head: ") and "'streaming'" in message
    draft = load_target("slipstream/small-draft", device="cpu", packed=False)
    drafter = DraftModel(draft, 3, LastRejected("slipstream/small-streaming", 0.5))
    message = refused(lambda: Engine(own, drafter, Sampling(), Limits(4), 4))
    assert "slipstream/small-draft differs" in message


def test_a_head_opens_by_its_folder_and_decides_as_before(tmp_path):
    target, draft = likely_pair()
    folder = save_speculator(tmp_path / "head", head_of(draft), draft, 9, "# A")
    lengths = []
    for head in (str(folder), head_of(draft)):
        drafter = Watched(draft, 5, AnyRejected(head, 0.5))
        for batch in (prompts(seed=3, count=6), batch_of(4)):  # an engine each, of one drafter
            engine = Engine(target, drafter, Sampling(), Limits(NUM_TOKENS), budget=6)
            engine.generate_batch(batch)
        assert drafter.varied
        lengths.append(drafter.lengths)
    assert lengths[0] == lengths[1]


def test_gammatune_follows_the_accepted_tokens_by_numbers():
    """eta 0.25, delta 2, from 4: all 4 accepted count as 6; (1 - 0.25) 4 + 0.25 * 6 = 4.5, drafted
    as 5. Then 1 of 5: 0.75 * 4.5 + 0.25 = 3.625, drafted as 4."""
    rule = untrained.gammatune(initial=4, rate=0.25, most=24)
    rule.begin(2)
    assert rule.limit(0) == 4
    rule.start()
    rule.observe(0, 4, 4)
    assert rule.lengths == pytest.approx([4.5, 4]) and rule.limit(0) == 5
    rule.observe(0, 5, 1)
    assert rule.lengths[0] == pytest.approx(3.625) and rule.limit(0) == 4
    rule.observe(0, 2, 2)  # cut short by something else: says nothing
    assert rule.lengths[0] == pytest.approx(3.625)
    rule.observe(0, 2, 0)
    assert rule.lengths[0] == pytest.approx(2.71875)
    for _ in range(40):
        rule.observe(1, rule.limit(1), rule.limit(1))
    assert rule.lengths[1] == 24
    for _ in range(40):
        rule.observe(1, rule.limit(1), 0)
    assert rule.lengths[1] == 1
    rule.leave([1])
    assert rule.lengths == [1]


def test_gammatune_plus_counts_what_it_stopped_itself():
    """A largest probability of 0.5 is below 0.6, one of 0.99 is not."""
    rule = untrained.gammatune(0.6, initial=4, rate=0.5)
    rule.begin(1)
    rule.start()
    assert rule.stops(drawn([5.0, 0.0])) == [False] and rule.stops(drawn([1.0, 1.0])) == [True]
    rule.observe(0, 2, 2)
    assert rule.lengths == [3.0]


def test_the_heuristic_adds_two_or_takes_one():
    rule = Heuristic(initial=2, carry=False)
    rule.begin(1)
    lengths = []
    for accepted in (2, 4, 3, 0, 0, 0, 0, 0, 0, 0):
        rule.observe(0, rule.limit(0), accepted)
        lengths.append(rule.limit(0))
    assert lengths == [4, 6, 5, 4, 3, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("carry", [True, False])
def test_a_length_is_carried_from_prompt_to_prompt_or_reset(carry):
    for rule in (Heuristic(3, carry), untrained.gammatune(initial=3, carry=carry)):
        rule.begin(1)
        rule.observe(0, 3, 3)
        ended = rule.lengths[0]
        assert ended != 3
        rule.begin(2)
        assert rule.lengths == [ended if carry else 3] * 2


def test_the_assistant_threshold_looks_at_the_token_drawn():
    """Token 0 with probabilities 0.5 and e^2 / (e^2 + 1) = 0.88."""
    rule = AssistantThreshold(0.6)
    assert rule.stops(drawn([1.0, 1.0], [2.0, 0.0])) == [True, False]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(initial=0), "length.initial"),
        (dict(rate=0), "length.rate"),
        (dict(bonus=-1), "length.bonus"),
        (dict(least=5), "least <= most"),
        (dict(threshold=1.0), "length.threshold"),
    ],
)
def test_settings_of_gammatune_out_of_range_are_refused(changes, field):
    assert field in refused(lambda: untrained.gammatune(**changes))


def depths(target, drafter) -> dict[tuple[int, ...], int]:
    """How deep the drafts after each text are, while some prompts are answered."""
    found, propose = {}, drafter.propose

    def watched(contexts, budget):
        trees = propose(contexts, budget)
        for context, tree in zip(contexts, trees, strict=True):
            found[tuple(context.tokens)] = tree.depth
        return trees

    drafter.propose = watched
    engine = Engine(target, drafter, Sampling(), Limits(NUM_TOKENS), 9)
    for prompt in prompts(seed=3):
        engine.generate(prompt)
    return found


@pytest.mark.parametrize("shape", ["deferred trees", "fused chains"])
@pytest.mark.parametrize("name", untrained.STREAM_RULES)
def test_rules_end_some_drafts_of_streams_and_not_others(shape, name):
    ended_and_not(f"{shape}, {name}")


@pytest.mark.parametrize("kind", ["prompt lookup", "adaptive n-grams"])
@pytest.mark.parametrize("name", untrained.NGRAM_RULES)
def test_rules_end_some_drafts_of_ngrams_and_not_others(kind, name):
    ended_and_not(f"{kind}, {name}")


def ended_and_not(way: str) -> None:
    """With the rule no draft is deeper than without it, some are less deep, some as deep."""
    target = tiny_target()
    ruled, free = (
        depths(target, untrained.with_rules(target, tiny_speculator(target), 2, free)[way])
        for free in (False, True)
    )
    pairs = [(ruled[text], depth) for text, depth in free.items() if depth > 1 and text in ruled]
    assert all(0 < own <= depth for own, depth in pairs)
    assert {own < depth for own, depth in pairs} == {True, False}, pairs


def test_ngrams_are_drafted_up_to_the_first_doubtful_token():
    """After 3 always comes 4, after 4 comes 5 two times of three; then 6, always."""
    drafter = AdaptiveNgram(1, 9, AssistantThreshold(0.7))
    context = Context([3, 4, 5, 6, 3, 4, 9, 3, 4, 5, 6, 3], None, Sampling(), None, max_depth=9)
    drafter.begin([context], 9)
    (tree,) = drafter.propose([context], 9)
    assert tree.tokens == [3, 4, 5] and tree.confidences == pytest.approx([1, 1, 2 / 3])


def test_rules_that_look_at_what_a_drafter_does_not_know_are_refused():
    target = tiny_target()
    speculator = tiny_speculator(target)
    head = AnyRejected(head_of(target), 0.5)
    for rule, drafter in (
        (head, lambda rule: Streaming(speculator, "deferred", 2, length=rule)),
        (entropy_bound(), lambda rule: PromptLookup(2, 3, rule)),
    ):
        message = refused(
            lambda rule=rule, drafter=drafter: Engine(
                target, drafter(rule), Sampling(), Limits(4), 4
            )
        )
        assert message.startswith("drafter.length: ") and type(rule).__name__ in message
