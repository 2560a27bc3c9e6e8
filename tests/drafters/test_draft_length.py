"""Rules that end a draft: decoding stays exact, and each request has a length of its own.

Exact sampling is tested by enumeration, as in `test_every_option_samples.py`: the next three tokens
of a prompt must come with the probabilities of one token per forward, wherever the rules stop.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import cycle, product

import pytest
import torch
from tests.decoding.test_greedy_identity import batch_of, prompts
from tests.decoding.test_sampling_table import COMPANIONS, SAMPLINGS
from tests.drafters import untrained
from tests.drafters.test_length_rules import CLASSIFIED, entropy_bound, head_of
from tests.enumeration import EnumeratedChance, enumerated_together, fixed_first
from tests.exhaustive import sparing
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.acceptance_length import AnyRejected, LastRejected
from slipstream.drafters.base import Request, Verified
from slipstream.drafters.draft_length import AssistantThreshold, DraftLength, Grown
from slipstream.drafters.draft_model import DraftModel, DraftModelSession
from slipstream.drafters.prompt_lookup import AdaptiveNgram
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.checkpoint import save_speculator

VOCABULARY, COUNT, LONGER, TOGETHER = 3, 3, 1, 32
PROMPT, FIRST = [0, 0, 2, 2], 1
TOLERANCE = 1e-12
NUM_TOKENS = 24

RULES = {name: lambda _, rule=rule: rule() for name, rule in untrained.RULES.items()} | {
    "entropy_bound": lambda draft: entropy_bound(0.5, 0.35, goal=0.5, step=0.1, inertia=0.2),
    "any_rejected": lambda draft: AnyRejected(head_of(draft), 0.5),
    "last_rejected": lambda draft: LastRejected(head_of(draft), 0.5),
    "gammatune_plus": lambda _: untrained.gammatune(0.55, initial=3),
}


ONE_OF_A_KIND = "gammatune_plus", "entropy_bound", "last_rejected"


class Watched:
    """A draft model attached to a target; notes of the drafts after each text how long they became
    and how long they could be.

    forgetful: inexact: drops the token at which a rule that looks at it ends the draft.
    """

    def __init__(self, target, drafter: DraftModel, forgetful: bool = False):
        self.lengths: dict[tuple[int, ...], set[tuple[int, int]]] = {}
        self.most, self.forgetful = drafter.num_tokens, forgetful
        self.attached = untrained.watched(drafter, target, self._watch)

    def engine(self, sampling: Sampling, count: int) -> Engine:
        return Engine(
            self.attached.target, self.attached, sampling, Limits(count), budget=self.most + 2
        )

    def _watch(self, session: DraftModelSession) -> None:
        draft, session._chains = session.draft, partial(self._chains, session._chains)

        def noted(verified: Verified, budget: int):
            self.requests = verified.requests
            return draft(verified, budget)

        session.draft = noted

    def _chains(self, chains, levels, depths: list[int], drawn_from):
        for place, request in enumerate(self.requests):
            possible = max(0, min(self.most, request.room - 1))
            if self.forgetful and depths[place] < possible:
                depths[place] -= 1
            after = self.lengths.setdefault(tuple(request.tokens), set())
            after.add((depths[place], possible))
        return chains(levels, depths, drawn_from)

    @property
    def varied(self) -> bool:
        """Whether some drafts were stopped early and some were not."""
        pairs = set().union(*self.lengths.values())
        assert all(drafted <= possible for drafted, possible in pairs)
        assert all(drafted for drafted, possible in pairs if possible)
        return {drafted < possible for drafted, possible in pairs if possible > 1} == {True, False}

    def lengths_after_texts(self) -> list[set[int]]:
        """After each text the lengths of the drafts for which there was room for two tokens."""
        own = ({n for n, possible in pairs if possible > 1} for pairs in self.lengths.values())
        return [lengths for lengths in own if lengths]


def expected(target, sampling: Sampling) -> torch.Tensor:
    """(3, 3, 3) probabilities of the sequences, each text anew through transformers' model."""
    texts, joint = torch.tensor([[*PROMPT, FIRST]]), torch.ones(1, dtype=torch.float64)
    for _ in range(COUNT):
        logits = target.model(texts).logits[:, -1]
        joint = (joint[:, None] * sampling.probabilities(logits)).flatten()
        following = torch.arange(VOCABULARY).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCABULARY, dim=0), following], dim=1)
    return joint.reshape([VOCABULARY] * COUNT)


def hearing(chance: EnumeratedChance) -> Callable:
    """What follows the tokens that are looked at does not matter."""
    emitted = []

    def emit(token: int, *_) -> None:
        emitted.append(token)
        chance.deaf = len(emitted) > COUNT

    return emit


def largest_error(watched: Watched, setting: str, batched: bool = False) -> float:
    """Of the probabilities with which the engine emits the sequences."""
    sampling = SAMPLINGS[setting]
    engine = watched.engine(sampling, 1 + COUNT + LONGER)
    exact = expected(engine.target, sampling)
    assert 0 < exact.max() < 0.75
    found = torch.zeros_like(exact)
    before, after = ([COMPANIONS[0]], [COMPANIONS[1]]) if batched else ([], [])

    def outcomes(chances: list[EnumeratedChance]) -> list[tuple]:
        batch = [*before, *[PROMPT] * len(chances), *after]
        seeds = [*[1] * len(before), *chances, *[1] * len(after)]
        callbacks = [*[None] * len(before), *map(hearing, chances), *[None] * len(after)]
        answers = engine.generate_batch(batch, seeds, callbacks)[len(before) :][: len(chances)]
        assert all(answer.ids[0] == FIRST for answer in answers)
        return [tuple(answer.ids[1 : 1 + COUNT]) for answer in answers]

    fixed = fixed_first(engine.target, PROMPT, sampling, FIRST)
    for emitted, probability in enumerated_together(outcomes, fixed, TOGETHER).items():
        found[emitted] += probability
    return float((found - exact).abs().max())


def small_pair():
    """A target and a draft model of three tokens."""
    target = tiny_target(seed=3, vocab_size=VOCABULARY, num_hidden_layers=2)
    return target, tiny_target(seed=12, vocab_size=VOCABULARY, num_hidden_layers=1)


CASES = [
    (name, setting, bool((place + turn) % 2))
    for place, name in enumerate(RULES)
    for turn, setting in enumerate(SAMPLINGS)
]
"""Each rule with each setting, among prompts of its length and of others by turns."""


def once(name: str, setting: str, batched: bool) -> bool:
    """A rule of each kind once, with settings of their own."""
    turn = list(RULES).index(name) % len(SAMPLINGS)
    return name in ONE_OF_A_KIND and setting == list(SAMPLINGS)[turn]


@pytest.mark.parametrize(("name", "setting", "batched"), sparing(CASES, once))
def test_every_continuation_has_the_probability_of_one_token_per_forward(
    chance, name, setting, batched
):
    target, draft = small_pair()
    rule = RULES[name](draft)
    watched = Watched(target, DraftModel(draft, 3, rule))
    assert largest_error(watched, setting, batched) < TOLERANCE
    if rule.looks_at == "nothing":
        first = watched.lengths[(*PROMPT, FIRST)]
        assert first == {(2, COUNT)}, "rules that count begin with two tokens"
        return
    assert watched.varied
    found = watched.lengths_after_texts()
    assert any(len(lengths) > 1 for lengths in found), "they are of one length, whatever is drawn"
    if name in CLASSIFIED:
        assert any(1 in lengths for lengths in found), "the first token makes no difference"


def test_a_rule_that_drops_the_token_it_looked_at_is_noticed(chance):
    target, draft = small_pair()
    drafter = DraftModel(draft, 3, RULES["last_rejected"](draft))
    assert largest_error(Watched(target, drafter, forgetful=True), "all") > 1e-3
    drafter = DraftModel(draft, 3)
    assert largest_error(Watched(target, drafter, forgetful=True), "all") < TOLERANCE


def likely_pair():
    """A target and a draft model that mostly agrees with it."""
    target, draft = tiny_target(num_hidden_layers=2), tiny_target(num_hidden_layers=2)
    generator = torch.Generator().manual_seed(1)
    for parameter in draft.model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += 0.015 * noise.to(parameter.device)
    return target, draft


LIKELY_RULES = RULES | {
    "entropy_bound": lambda draft: entropy_bound(0.2, 0.22, goal=0.7, step=0.02, inertia=0.3),
    "gammatune_plus": lambda draft: untrained.gammatune(0.13, most=6),
    "assistant_threshold": lambda draft: AssistantThreshold(0.1),
}


@pytest.fixture(scope="module")
def plainly():
    """The greedy answers of `likely_pair`: to prompts alone, and to batches, with their ends."""
    target, _ = likely_pair()
    plain = PlainDecoder(target, Sampling(), Limits(NUM_TOKENS))
    alone = [(prompt, plain.generate(prompt).ids) for prompt in prompts(seed=3, count=4)]
    batches = []
    for size in (2, 8):
        batch = batch_of(size)
        endless = [plain.generate(prompt).ids for prompt in batch]
        ends = [endless[0][17], endless[size // 2][11], endless[-1][5]]
        target.model.generation_config.eos_token_id = ends
        answers = [plain.generate(prompt).ids for prompt in batch]
        assert len({len(ids) for ids in answers}) >= min(size, 3)
        batches.append((batch, ends, answers))
        target.model.generation_config.eos_token_id = None
    return alone, batches


@pytest.mark.parametrize(("name",), sparing(zip(LIKELY_RULES), ONE_OF_A_KIND.__contains__))
def test_greedy_answers_are_those_of_plain_decoding(name, plainly):
    """Alone, and in batches whose answers end at different lengths."""
    (alone, batches), (target, draft) = plainly, likely_pair()
    watched = Watched(target, DraftModel(draft, 5, LIKELY_RULES[name](draft)))
    engine = watched.engine(Sampling(), NUM_TOKENS)
    taus = []
    for prompt, expected in alone:
        answer = engine.generate(prompt)
        assert answer.ids == expected
        taus.append(answer.statistics.tau)
    assert max(taus) > 1.5 and watched.varied
    watched.lengths.clear()
    for batch, ends, expected in batches:
        target.model.generation_config.eos_token_id = ends
        assert [answer.ids for answer in engine.generate_batch(batch)] == expected
    assert watched.varied


@pytest.mark.parametrize(("name",), sparing(zip(LIKELY_RULES), ONE_OF_A_KIND.__contains__))
def test_sampled_answers_of_a_batch_are_those_alone_with_the_same_seeds(name):
    """How much chance is used depends on the lengths of the drafts: each request has its own, and
    requests leave one after the other."""
    target, draft = likely_pair()
    watched = Watched(target, DraftModel(draft, 5, LIKELY_RULES[name](draft)))
    engine = watched.engine(Sampling(0.7), NUM_TOKENS)
    batch, seeds = batch_of(6), [11, 12, 13, 11, 15, 16]
    pairs = list(zip(batch, seeds, strict=True))
    endless = [engine.generate(*pair).ids for pair in pairs]
    target.model.generation_config.eos_token_id = [endless[0][9], endless[3][6]]
    alone = [engine.generate(*pair).ids for pair in pairs]
    assert len({len(ids) for ids in alone}) >= 3 and watched.varied
    assert [answer.ids for answer in engine.generate_batch(batch, seeds)] == alone


class Spy(DraftLength):
    """Compares what it is shown with the draft model's plain forwards, and stops at even tokens.

    texts: of the drafts that are still going on, in the order of the requests.
    """

    looks_at = "states"

    def __init__(self, model):
        self.model = model
        self.started: list[SpyingLength] = []
        self.seen: list[tuple[int, int]] = []

    def attach(self, model=None):
        assert model is self.model
        return self

    def start(self) -> "SpyingLength":
        self.started.append(SpyingLength(self))
        return self.started[-1]

    def scores(self, grown: Grown) -> list[float]:
        going = [each for each in self.started if each.going]
        assert len(going) == len(grown.tokens) == len(grown.hidden) == len(grown.logits)
        told = self.model.logits(grown.hidden)
        torch.testing.assert_close(told, grown.logits, rtol=0, atol=1e-10)
        for length, token, logits in zip(going, grown.tokens.tolist(), grown.logits, strict=True):
            plain = self.model.model(torch.tensor([length.text])).logits[0, -1]
            torch.testing.assert_close(logits, plain, rtol=0, atol=1e-10)
            length.text.append(token)
            length.drafted += 1
            length.going = length.drafted < length.most
        return [float(token) for token in grown.tokens]


class SpyingLength(DraftLength):
    def __init__(self, spy: Spy):
        self.spy, self.drafted, self.going, self.most, self.text = spy, 0, False, 0, []

    def begin(self) -> None:
        self.drafted = 0

    def stops(self, score: float) -> bool:
        stop = score % 2 == 0
        self.going = self.going and not stop
        return stop

    def observe(self, drafted: int, accepted: int) -> None:
        assert drafted == self.drafted and 0 <= accepted <= drafted
        self.spy.seen.append((drafted, accepted))


def tell(session: DraftModelSession) -> None:
    """The lengths of this session know, at each draft, their texts and how much room there is."""
    draft = session.draft

    def told(verified: Verified, budget: int):
        verified.host()
        for length in session.lengths.rule.started:
            length.going = False
        for length, request in zip(session.lengths.each, verified.requests, strict=True):
            length.text, length.most = list(request.tokens), session._room(request, budget)
            length.going = length.most > 0
        return draft(verified, budget)

    session.draft = told


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7)], ids=["greedy", "sampled"])
def test_rules_are_shown_what_each_token_was_drawn_from_and_what_became_of_it(sampling):
    target, draft = likely_pair()
    spy, sessions = Spy(draft), []
    attached = untrained.watched(
        DraftModel(draft, 5, spy), target, lambda each: (tell(each), sessions.append(each))
    )
    engine = Engine(target, attached, sampling, Limits(NUM_TOKENS), budget=6)
    batch = batch_of(4)
    endless = engine.generate_batch(batch, [1, 2, 3, 4])
    target.model.generation_config.eos_token_id = [endless[0].ids[12], endless[2].ids[6]]
    spy.started.clear()
    answers = engine.generate_batch(batch, [1, 2, 3, 4])
    assert len({len(answer.ids) for answer in answers}) > 1
    assert len(sessions[-1].lengths.each) < len(spy.started) == len(batch)
    target.model.generation_config.eos_token_id = None
    spy.seen.clear()
    spy.started.clear()
    answer = engine.generate(batch[0])
    assert len(spy.seen) == answer.statistics.target_forwards
    assert [accepted for _, accepted in spy.seen] == list(answer.accepted)
    assert {accepted == drafted for drafted, accepted in spy.seen} == {True, False}


def test_a_head_opens_by_its_folder_and_decides_as_before(tmp_path):
    target, draft = likely_pair()
    folder = save_speculator(tmp_path / "head", head_of(draft), draft, 9, "# A")
    lengths = []
    for head in (str(folder), head_of(draft)):
        drafter = DraftModel(draft, 5, AnyRejected(head, 0.5))
        watched = Watched(target, drafter)
        for batch in (prompts(seed=3, count=6), batch_of(4)):  # an engine each, of one drafter
            watched.engine(Sampling(), NUM_TOKENS).generate_batch(batch)
        assert watched.varied
        lengths.append(watched.lengths)
    assert lengths[0] == lengths[1]


LOOKING = "gammatune_plus", "assistant_threshold", "adaedl"
"""Rules that look at more than how many tokens were accepted."""


def depths(target, drafter) -> dict[tuple[int, ...], int]:
    """How deep the drafts after each text are, while some prompts are answered."""
    found: dict[tuple[int, ...], int] = {}

    def watch(session) -> None:
        draft = session.draft

        def watched(verified: Verified, budget: int):
            trees = draft(verified, budget)
            verified.host()
            real = trees.depths.masked_fill(~trees.real, 0)
            (request,) = verified.requests
            found[tuple(request.tokens)] = int(real.max())
            return trees

        session.draft = watched

    engine = Engine(
        target, untrained.watched(drafter, target, watch), Sampling(), Limits(NUM_TOKENS), 9
    )
    for prompt in prompts(seed=3):
        engine.generate(prompt)
    return found


@pytest.mark.parametrize(
    ("shape", "name"),
    sparing(
        product(("deferred trees", "fused chains"), untrained.STREAM_RULES),
        lambda shape, name: (shape == "deferred trees") == (name in LOOKING),
    ),
)
def test_rules_end_some_drafts_of_streams_and_not_others(shape, name):
    ended_and_not(shape, name)


@pytest.mark.parametrize(
    ("kind", "name"),
    sparing(
        product(("prompt lookup", "adaptive n-grams"), untrained.NGRAM_RULES),
        lambda kind, name: (kind == "prompt lookup") == (name in LOOKING),
    ),
)
def test_rules_end_some_drafts_of_ngrams_and_not_others(kind, name):
    ended_and_not(kind, name)


@cache
def depths_of(way: str, free: bool) -> dict[tuple[int, ...], int]:
    target = tiny_target()
    return depths(target, untrained.with_rules(target, tiny_speculator(target), 2, free)[way])


def ended_and_not(kind: str, name: str) -> None:
    """With the rule no draft is deeper than without it, some are less deep, some as deep."""
    ruled, free = depths_of(f"{kind}, {name}", False), depths_of(f"{kind}, heuristic", True)
    pairs = [(ruled[text], depth) for text, depth in free.items() if depth > 1 and text in ruled]
    assert all(0 < own <= depth for own, depth in pairs)
    assert {own < depth for own, depth in pairs} == {True, False}, pairs


def test_ngrams_are_drafted_up_to_the_first_doubtful_token():
    """After 3 came 4 in all three places, after 4 came 5 in two of three; what has not come counts
    as two more."""
    drafter = AdaptiveNgram(1, 9, AssistantThreshold(0.5)).attach(tiny_target())
    text = [3, 4, 5, 6, 3, 4, 9, 3, 4, 5, 6, 3]
    request = Request(text, Sampling(), None, 10)
    session = drafter.start([request], 9)
    draft = drafter.drafted(request, session.states[0], 9)
    assert draft.tokens == [3, 4, 5]
    assert draft.confidences == pytest.approx([1, 3 / 5, 3 / 5 * 2 / 5])


def test_rules_hear_of_drafts_before_steps_that_draft_nothing(monkeypatch):
    """Other requests may leave a request no nodes, and `auto` may choose another drafter."""
    told = []

    class Noted(DraftLength):
        def start(self):
            return self

        def observe(self, drafted, accepted):
            told.append(drafted)

    target = tiny_target()
    drafter = Streaming(tiny_speculator(target), "deferred", 2, length=Noted())
    engine = Engine(target, drafter, Sampling(), Limits(24), 8)
    budgets = cycle([8, 8, 1])
    monkeypatch.setattr(engine, "allowed", lambda count: next(budgets))
    answer = engine.generate(PROMPT)
    assert answer.ids == PlainDecoder(target, Sampling(), Limits(24)).generate(PROMPT).ids
    assert told[:6] == [3, 3, 0, 3, 3, 0]
