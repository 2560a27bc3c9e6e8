"""Auto: at every step the drafter that promises most for its time, or none."""

import gc
import weakref
from itertools import count

import pytest
from tests.commands import refused
from tests.drafters.untrained import lookahead, unispec
from tests.tiny import tiny_speculator, tiny_target

from slipstream import generate
from slipstream.core.drafts import Draft
from slipstream.core.sampling import Sampling
from slipstream.core.trees import Trees
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters import auto
from slipstream.drafters.auto import Auto, AutoSession
from slipstream.drafters.base import Attached, AttachedHost, Drafter, Session
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.experience import (
    CLAIMS,
    FEW,
    GLANCE,
    KEPT,
    MOST,
    NEAR,
    NEIGHBOURS,
    PACE,
    TREES,
    Episode,
    Experience,
    sizes_up_to,
)
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.stream_sessions import DeferredSession, StreamSession
from slipstream.drafters.streaming import Streaming
from slipstream.targets.compiled import compile_target

PROMPT = [3, 14, 15, 9, 26, 5, 3, 14, 15]
LONG = Limits(240)


class Told(Drafter):
    """Drafts what it is told comes next, or always something else, surely."""

    def __init__(self, answer: list[int], right: bool, near: bool = True):
        self.answer, self.right, self.near = answer, right, near

    def attach(self, target):
        return ToldNear(target, self) if self.near else ToldWorking(target, self)

    def draft(self, tokens: list[int], budget: int) -> Draft:
        start = len(tokens) - len(PROMPT)
        coming = self.answer[start : start + min(3, budget - 1)]
        coming = coming if self.right else [(token + 1) % 30 for token in coming]
        return Draft.chain([tokens[-1], *coming])


class ToldNear(AttachedHost):
    def drafted(self, request, state, budget):
        return self.settings.draft(request.tokens, budget)


class ToldWorking(Attached):
    def __init__(self, target, settings):
        super().__init__(target)
        self.settings = settings

    def start(self, requests, budget):
        return WorkingSession(self.settings, requests)


class WorkingSession(Session):
    def __init__(self, settings, requests):
        self.settings, self.requests = settings, requests

    def draft(self, verified, budget):
        verified.host()
        return Trees.of([self.settings.draft(each.tokens, budget) for each in self.requests])


def endless():
    target = tiny_target(seed=3)
    target.model.generation_config.eos_token_id = None
    return target


@pytest.fixture
def target():
    return endless()


@pytest.fixture
def clock(monkeypatch):
    """All steps seem to take equally long."""
    ticks = count()
    monkeypatch.setattr(auto.time, "perf_counter", lambda: float(next(ticks)))


@pytest.fixture(scope="module")
def answer():
    return PlainDecoder(endless(), Sampling(), LONG).generate(PROMPT).ids


def widths(engine: Engine, monkeypatch, prompt=PROMPT) -> list[int]:
    """How many nodes the trees of an answer had, step by step."""
    seen, forward = [], Engine._forward
    with monkeypatch.context() as patched:

        def noted(self, batch):
            seen.append(batch.trees.width)
            return forward(self, batch)

        patched.setattr(Engine, "_forward", noted)
        engine.generate(prompt)
    return seen


@pytest.mark.parametrize("near", [True, False])
def test_it_drafts_with_who_is_right(target, answer, clock, near, monkeypatch):
    """Of two that are equally sure; what a plain step costs is found out first."""
    drafters = {"wrong": Told(answer, False, near), "right": Told(answer, True, near)}
    engine = Engine(target, Auto(drafters), Sampling(), LONG, 8)
    assert engine.generate(PROMPT).ids == answer
    seen = widths(engine, monkeypatch)
    assert sum(width == 4 for width in seen) > 0.9 * len(seen)
    found = engine.generate(PROMPT).statistics
    assert found.target_forwards <= -(-found.tokens // 4) + FEW


@pytest.mark.parametrize("near", [True, False])
def test_where_nothing_is_right_nothing_is_drafted(target, answer, clock, near, monkeypatch):
    engine = Engine(target, Auto({"wrong": Told(answer, False, near)}), Sampling(), LONG, 8)
    assert engine.generate(PROMPT).ids == answer
    monkeypatch.setattr(engine.attached.record, "_cost", lambda name, rows: 1.0 + 0.3 * rows)
    seen = widths(engine, monkeypatch)
    assert len(seen) == len(answer) - 1
    assert sum(width > 1 for width in seen) <= (0 if near else len(seen) // 10)


def test_drafts_that_were_not_verified_are_judged_as_if_they_had_been(target, answer, clock):
    """Plain decoding goes on, one token at a time; what it shows of a draft is waited for."""
    told = Told(answer, True)
    engine = Engine(target, Auto({"right": told}), Sampling(), Limits(12), 8)
    attached = engine.attached
    attached.record.choice = lambda *_: ("plain", 1, [])
    engine.generate(PROMPT)
    claimed, right = attached.record.past[0].own[CLAIMS, "right"]
    assert claimed == right == pytest.approx(sum(3 * 0.98**n for n in range(9)))
    attached.forget()
    assert not attached.record.past


def told(steps: int = FEW, rows: int = 1, seconds: float = 1.0) -> Experience:
    """What plain steps cost is known."""
    record = Experience()
    for _ in range(steps):
        record.passed("plain", rows, seconds)
    return record


def tried(record: Experience, prompt: list[int], right: int, steps: int = 100) -> int:
    """How often a drafter that must work, in a second more than a plain step, drafted for the
    answer to this prompt."""
    now, drafted = record.opened([prompt]), 0
    for _ in range(steps):
        name, width, _ = record.choice(now, {}, ["streams"], 8)
        tokens = 1 + right * (name == "streams")
        record.passed(name, width, 1.0 + (name == "streams"))
        now[0].add(PACE, "", tokens, 1.0 + (name == "streams"))
        if name == "streams":
            now[0].add(TREES, name, 3, right)
            drafted += 1
    return drafted


def test_who_must_work_is_tried_where_prompts_are_new():
    """Later prompts of the kind begin with what was found, those of another kind do not."""
    record = told()
    assert 1 <= tried(record, [1, 2, 3, 4], right=0) <= 8
    assert [tried(record, [1, 2, 3, n], right=0) for n in range(5, 9)] == [0] * 4
    assert tried(record, [21, 22, 23, 24], right=3) > 90
    assert tried(record, [21, 22, 23, 25], right=3) == 100
    assert tried(record, [1, 2, 3, 9], right=0) == 0


def test_what_was_found_in_the_most_similar_prompts_counts():
    """At most so much of it, and as much less as they have less in common."""
    alike, other, half = (Episode(ids) for ids in ([1, 2, 3, 4], [7, 8, 9], [1, 11, 12, 13, 14]))
    for place, episode in enumerate((alike, other, half)):
        episode.add(CLAIMS, "lookup", 10, place)
    now = Episode([1, 2, 3, 5])
    now.follow([alike, other, half])
    share = 1 / 8 / 0.15
    assert now.all[CLAIMS, "lookup"] == pytest.approx((10 + 10 * share**2, 2 * share**2))
    now = Episode([1, 2, 3, 5])
    now.follow([other, *[alike] * NEIGHBOURS])
    assert now.all[CLAIMS, "lookup"] == (MOST[CLAIMS], 0.0)
    record = Experience()
    record.opened([[n] for n in range(KEPT + 3)])
    assert len(record.past) == KEPT


def test_a_tree_is_as_wide_as_pays():
    record = told()
    for rows in (4, 8) * FEW:
        record.passed("plain", rows, 1.0 if rows < 8 else 3.0)
    now, draft = record.opened([[1]]), Draft.chain([7] * 9, [1, *(0.9**n for n in range(1, 9))])
    # 3.4 tokens in one second, or 6.1 in three: what tells is how many a second there are anyway
    assert record.choice(now, {"one": [draft]}, [], 12) == ("near", 9, [draft])
    now[0].add(PACE, NEAR, 33, 10.0)
    assert record.choice(now, {"one": [draft]}, [], 12) == ("near", 4, [draft])
    for _ in range(9):
        record.passed("plain", 8, 1.1)
    assert record.choice(now, {"one": [draft]}, [], 12)[1] > 4
    record.passed("plain", 12, 9.0)  # once: it may have been chance
    assert record.choice(now, {"one": [draft]}, [], 12) == ("near", 9, [draft])
    now += record.opened([[2]])
    pair = {"one": [draft, Draft.chain([7])]}
    assert record.choice(now, pair, [], 12) == ("plain", 1, [])  # too little is known of two rows
    for _ in range(FEW):
        record.passed("plain", 2, 1.0)
    assert record.choice(now, pair, [], 12)[0] == "near"


def test_sizes_end_with_the_budget():
    assert [sizes_up_to(n) for n in (2, 3, 7, 9)] == [
        (1, 2),
        (1, 2, 3),
        (1, 2, 3, 4, 6, 7),
        (1, 2, 3, 4, 6, 8, 9),
    ]


def test_trees_of_who_must_work_are_as_wide_as_pays_too():
    """Between the sizes that were measured costs lie on a line; gains are logarithmic."""
    record = told()
    now = record.opened([[1]])
    for width, right in ((16, 3), (8, 2)) * 9:
        record.passed("streams", width, 1.0 + 0.1 * width)
        now[0].add(TREES, "streams", 4 if width == 16 else 3, right)
        now[0].add(PACE, "", 1 + right, 1.0 + 0.1 * width)
    # about 1 + 0.7 log2(g) tokens in 1 + g / 10 steps: 1.75 a step with 8 nodes, 1.48 with 16
    assert record.choice(now, {}, ["streams"], 16) == ("streams", 8, [])
    for _ in range(50):
        record.passed("streams", 16, 1.2)
        record.passed("plain", 1, 1.0)
    assert record.choice(now, {}, ["streams"], 16) == ("streams", 16, [])


def test_a_cheap_draft_that_is_right_now_and_then_makes_slow_steps_dear():
    """A slow step has 3.4 tokens in 2 s, more a second than a plain one with 1 in 1 s. Of its 1 s
    more, decoding at 2.5 tokens a second makes more than its 2.4 tokens more."""
    record = told()
    for _ in range(99):
        record.passed("slow", 8, 2.0)
    for tokens, name in ((20, "slow"), (25, "plain")):
        (now,) = record.opened([[1]])
        now.all = {(TREES, "slow"): (300, 240), (PACE, NEAR): (tokens, 10.0)}
        assert record.choice([now], {"none": [Draft.chain([7])]}, ["slow"], 8)[0] == name


def test_longer_texts_make_all_steps_dearer_alike():
    """Costs of eight rows that were measured on short texts are not compared with those of one row
    after long ones; and where steps are now and then disturbed, nothing drifts."""
    record, draft = told(25), Draft.chain([7] * 8, [1.0] + [0.5] * 7)
    for _ in range(25):
        record.passed("plain", 1, 1.0)
        record.passed("plain", 8, 1.5)
    record.look_back()
    before = record._cost("plain", 8) / record._cost("plain", 1)
    for _ in range(60):
        record.passed("plain", 1, 2.0)
    record.look_back()
    assert record._cost("plain", 8) / record._cost("plain", 1) == pytest.approx(before, rel=0.15)
    assert record.level == pytest.approx(2.0, rel=0.15)
    assert record.choice(record.opened([[1]]), {"one": [draft]}, [], 8)[0] == "near"
    for step in range(20_000):
        record.passed("plain", 1, 3.0 if step % 10 == 0 else 1.0)
    record.look_back()
    assert record.level == pytest.approx(1.0, rel=0.15)
    assert record._cost("plain", 1) == pytest.approx(1.0, rel=0.15)


def test_steps_without_near_drafters_have_the_pace_of_the_best_of_them():
    """However it went so far: where streams are worth less than usual, nothing else is better."""
    now = Episode([1])
    now.add(PACE, "", 40, 10.0)
    assert now.pace(2.0) == 2.0
    now.add(PACE, NEAR, 50, 10.0)
    assert now.pace(2.0) == (50 + 2 * 10) / 20


def test_no_node_is_believed_more_than_its_parent():
    sure = Draft.chain([7, 1, 2], [1, 0.5, 0.9]).believed(1.2).confidences
    assert sure == pytest.approx([1, 0.6, 0.6])


def test_near_drafters_draft_one_tree():
    """Each node as sure as whoever names it has proven: of 10 tokens that `bold` claimed in texts
    like this one none was right, of `shy`'s 2 all 10."""
    record, now = told(), Episode([1])
    for rows in (4, 6):
        for _ in range(FEW):
            record.passed("plain", rows, 1.0)
    now.add(CLAIMS, "bold", 10.0, 0.0)
    now.add(CLAIMS, "shy", 2.0, 10.0)
    assert now.trust("bold") == pytest.approx(1 / 6) and now.trust("shy") == 3
    bold, shy = (
        Draft.chain([7, 1, 2], [1, 0.9, 0.6]),
        Draft([7, 3, 1, 4], [-1, 0, 0, 1], [1, 0.2, 0.1, 0.1]),
    )
    name, width, (tree,) = record.choice([now], {"bold": [bold], "shy": [shy]}, [], 12)
    assert (name, width) == ("near", 5)
    assert (tree.tokens, tree.parents) == ([7, 3, 1, 4, 2], [-1, 0, 0, 1, 2])
    assert tree.confidences == pytest.approx([1, 0.6, 0.3, 0.3, 0.1])
    now.add(CLAIMS, "shy", 1000.0, 0.0)
    assert record.choice([now], {"bold": [bold], "shy": [shy]}, [], 12)[0] == "near"
    now.add(CLAIMS, "bold", 1000.0, 0.0)
    assert record.choice([now], {"bold": [bold], "shy": [shy]}, [], 12)[0] == "plain"


def test_who_saves_less_than_looking_takes_looks_rarely():
    """Of two with the same draft the quicker one is credited."""
    record, draft = told(), Draft.chain([7, 1, 2, 3], [1, 0.9, 0.8, 0.7])
    record.passed("plain", 4, 1.0)
    now = record.opened([[1, 2, 3]])
    for _ in range(9):
        record.spent({"slow": 0.2, "quick": 0.1})
        record.choice(now, {"slow": [draft], "quick": [draft]}, [], 12)
    for episodes in (now, record.opened([[1, 2, 4]])):  # and in prompts like this one
        looking = {"slow": 0, "quick": 0}
        for record.steps in range(4 * GLANCE):
            for name in looking:
                looking[name] += record.glances or record.pays(name, episodes)
        assert looking == {"slow": 4, "quick": 4 * GLANCE}
        assert [record.pays(name, episodes) for name in looking] == [False, True]
    assert record.pays("slow", record.opened([[8, 9]]))


def test_streams_and_lookups_in_turn_and_in_batches(target):
    """Whoever drafts, and whoever leaves: the answers are the target's own."""
    speculator = tiny_speculator(target, seed=2, num_streams=3)
    parts = {
        "streaming": Streaming(speculator, "deferred", 2),
        "unispec": unispec(),
        "prompt_lookup": PromptLookup(2, 3),
    }
    engine = Engine(target, Auto(parts), Sampling(), Limits(40), 8)
    turn, chosen = count(), []

    def choice(episodes, drafts, working, budget, begun):
        name = ["streaming", "plain", *drafts][next(turn) % (2 + len(drafts))]
        chosen.append(name)
        if name in drafts:
            return "near", budget, drafts[name]
        return name, budget if name != "plain" else 1, []

    engine.attached.record.choice = choice
    engine.attached.record.pays = lambda *_: True
    prompts = [PROMPT, PROMPT[:3], [*PROMPT, 8, 2]]
    plain = PlainDecoder(target, Sampling(), Limits(40))
    for batch in ([PROMPT], prompts):
        answers = engine.generate_batch(batch)
        assert [each.ids for each in answers] == [plain.generate(ids).ids for ids in batch]
    assert set(chosen) == {"streaming", "plain", "unispec", "prompt_lookup"}


def test_streams_that_draft_again_read_what_was_decided_meanwhile(target, monkeypatch):
    """Scores of copies look tokens up in the text."""
    speculator = tiny_speculator(target, seed=2, copy_scores=True)
    parts = {"streaming": Streaming(speculator, "deferred", 2), "unispec": unispec()}
    engine = Engine(target, Auto(parts), Sampling(), Limits(30), 8)
    turn, read, wholes = count(), StreamSession._read, []

    def choice(*_):
        return ("plain", 1, []) if next(turn) % 5 < 3 else ("streaming", 8, [])

    def checked(session, verified):
        read(session, verified)
        verified.host()
        for text, request in zip(session.texts.tolist(), verified.requests, strict=True):
            known = len(request.tokens)
            wholes.append(text[:known] == request.tokens and set(text[known:]) <= {-1})

    engine.attached.record.choice = choice
    monkeypatch.setattr(StreamSession, "_read", checked)
    engine.generate_batch([PROMPT, PROMPT[:3]])
    assert len(wholes) > 6 and all(wholes)


def test_a_draft_that_is_begun_gives_way_to_more_tokens_alone():
    """Three tokens in 3 s, or 2.5 in 1: what is drafted already takes its time anyway."""
    record = told()
    for _ in range(FEW):
        record.passed("plain", 8, 1.0)
        record.passed("streams", 8, 3.0)
    (now,) = record.opened([[1]])
    now.all = {(TREES, "streams"): (90, 60), (PACE, NEAR): (20, 10.0)}
    short, long = Draft.chain([7, 1, 2], [1, 0.8, 0.7]), Draft.chain([7] * 5, [1, *[0.9] * 4])
    for begun, draft, name in ((None, short, NEAR), (8, short, "streams"), (8, long, NEAR)):
        asked = [now], {"one": [draft]}, ["streams"], 8, begun and ("streams", begun)
        assert record.choice(*asked)[0] == name


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("looking", [True, False])
def test_where_steps_are_compiled_streams_draft_before_the_host_knows(
    looking, drafting, target, monkeypatch
):
    """Near drafters look meanwhile; where none does, the next forward begins, too, drafted or not.
    What became of trees is learned of all steps."""
    speculator = tiny_speculator(target, seed=2, num_streams=3)
    parts = {"streaming": Streaming(speculator, "deferred", 2), "lookup": PromptLookup(2, 3)}
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    monkeypatch.setattr(Experience, "pays", lambda *_: looking)
    monkeypatch.setattr(Experience, "glances", False)
    costs = {"plain": 1.0, "streaming": 1.0 if drafting else 99.0}
    monkeypatch.setattr(Experience, "_cost", lambda _, name, rows: costs[name])
    plain = PlainDecoder(target, Sampling(), Limits(40))
    expected = [plain.generate(ids).ids for ids in (PROMPT, PROMPT[:3])]
    engine = Engine(
        compile_target(target, "reduce-overhead"), Auto(parts), Sampling(), Limits(40), 8
    )
    record, drafted, begun = engine.attached.record, [], []
    for _ in range(FEW):
        record.passed("plain", 1, 1.0)
    draft, begin = DeferredSession.draft, Engine._begin_next

    def noted(session, verified, budget):
        drafted.append(verified.known)
        return draft(session, verified, budget)

    def noticed(self, batch, verified):
        begun.append(not verified.known)
        return begin(self, batch, verified)

    monkeypatch.setattr(DeferredSession, "draft", noted)
    monkeypatch.setattr(Engine, "_begin_next", noticed)
    found = [engine.generate(ids) for ids in (PROMPT, PROMPT[:3])]
    assert [each.ids for each in found] == expected
    assert all(begun) == any(begun) == (not looking)
    if drafting or not looking:
        assert drafted and not any(drafted)
    steps = sum(each.statistics.target_forwards for each in found)
    assert record.steps == FEW + steps


def test_what_was_verified_is_let_go_at_once(target, monkeypatch):
    """Its logits and states are large: they do not wait for the garbage collector."""
    kept, draft = [], AutoSession.draft

    def noted(session, verified, budget):
        kept.append(weakref.ref(verified))
        return draft(session, verified, budget)

    monkeypatch.setattr(AutoSession, "draft", noted)
    engine = Engine(target, Auto({"lookup": PromptLookup(2, 3)}), Sampling(), Limits(20), 8)
    gc.disable()
    try:
        engine.generate(PROMPT)
        assert len(kept) > 5 and sum(each() is not None for each in kept) <= 1
    finally:
        gc.enable()


def test_a_call_by_name():
    text = "name[The Mill], eatType[pub], food[English]"
    found = generate([text, text[:20]], drafter="auto", max_new_tokens=20)
    alone = generate([text, text[:20]], drafter=None, max_new_tokens=20)
    assert [each.ids for each in found] == [each.ids for each in alone]


def test_what_cannot_be_chosen_from_is_refused(target):
    assert "name at least one" in refused(lambda: Auto({"one": None}))
    assert "cannot be parts" in refused(lambda: Auto({"one": lookahead()}).attach(target))
    for name in ("plain", "near"):
        assert "another name" in refused(lambda: Auto({name: unispec()}).attach(target))  # noqa: B023
    draft = DraftModel(tiny_target(seed=8), 3)
    assert "must read along" in refused(lambda: Auto({"one": draft}).attach(target))
