"""One tree of several drafters' trees: what is chosen, and what is learnt from answers."""

import random
from itertools import product

import pytest
import torch
from tests.commands import refused
from tests.drafters import reference_combined as reference
from tests.drafters.untrained import combined, lookahead, spectra, unispec
from tests.exhaustive import sparing
from tests.reference import DraftTree
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.drafts import Draft
from slipstream.core.sampling import Chance, Sampling
from slipstream.core.trees import Trees
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.auto import Auto
from slipstream.drafters.base import Attached, Drafter, Request, Session, Verified
from slipstream.drafters.combined import (
    Combined,
    PromptRecords,
    Record,
    chosen,
    outcomes,
    together,
)
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import AdaptiveNgram
from slipstream.drafters.streaming import Streaming

PROMPT = [3, 14, 15, 9, 26, 5, 3, 14, 15]
CPU = torch.device("cpu")


def answered(drafter, target, **sampling):
    return Engine(target, drafter, Sampling(**sampling), Limits(24), 14).generate(PROMPT)


def claims_of(*said: tuple[float, ...]) -> torch.Tensor:
    """(1, M, drafters) claims, -1 where a drafter has named none."""
    return torch.tensor([said], dtype=torch.float64)


def flags(*values: bool) -> torch.Tensor:
    return torch.tensor([values])


def random_draft(chance: random.Random, root: int) -> DraftTree:
    """Few different tokens, so that drafts have much in common."""
    tokens, parents, confidences, taken = [root], [-1], [1.0], set()
    for _ in range(chance.randrange(9)):
        parent, token = chance.randrange(len(tokens)), chance.randrange(3)
        if (parent, token) not in taken:
            taken.add((parent, token))
            own = chance.choice([0.0, 1.0, *(chance.random() for _ in range(18))])
            confidences.append(torch.tensor(confidences[parent] * own).item())
            tokens, parents = [*tokens, token], [*parents, parent]
    return DraftTree(tokens, parents, confidences)


@pytest.mark.parametrize(
    ("num_drafters", "batch"),
    sparing(product((1, 2, 3), (1, 3)), lambda *each: each in ((1, 3), (2, 1), (3, 3))),
)
def test_the_trees_of_a_batch_are_those_of_plain_python(num_drafters, batch):
    """Over many steps, in which requests leave and join: trees, outcomes and records."""
    chance = random.Random(10 * num_drafters + batch)
    record, plain = Record(num_drafters, CPU), reference.Record()
    prompts = PromptRecords(batch, CPU)
    plain_prompts = [reference.PromptRecord() for _ in range(batch)]
    for step in range(150):
        drafts = [
            [random_draft(chance, root) for root in range(batch)] for _ in range(num_drafters)
        ]
        answers = [
            [chance.randrange(3) for _ in range(chance.randrange(1, 5))] for _ in range(batch)
        ]
        budget = chance.randrange(1, 14)
        trees, claims = together([Trees.of(own) for own in drafts])
        probabilities = record.proven(claims) * prompts.correction(claims)
        found = chosen(trees, probabilities, budget).drafts()
        longest = max(map(len, answers))
        padded = torch.tensor([own + [-1] * (longest - len(own)) for own in answers])
        tested, right = outcomes(trees, padded)
        prompts.count(claims, tested, right, record.proven(claims))
        counted = []
        for place, own in enumerate(zip(*drafts, strict=True)):
            tree, words = reference.together(own)
            here = plain_prompts[place]
            wanted = reference.chosen(tree, words, plain, here, budget)
            assert (found[place].tokens, found[place].parents) == (wanted.tokens, wanted.parents)
            assert found[place].confidences == pytest.approx(wanted.confidences)
            known = list(reference.outcomes(tree, answers[place]))
            assert (len(known), sum(r for _, r in known)) == (
                tested[place].sum(),
                right[place].sum(),
            )
            for node, agrees in known:
                here.count(words[node], agrees, plain.proven(words[node]))
            counted += [(words[node], agrees) for node, agrees in known]
        record.count(claims, tested, right)
        for said, agrees in counted:
            plain.count(said, agrees)
        if step % 40 == 39:  # the first leaves, another one comes
            prompts.keep(torch.arange(1, batch))
            prompts.join(PromptRecords(1, CPU))
            plain_prompts = [*plain_prompts[1:], reference.PromptRecord()]
    assert record.right.sum() == sum(plain.right.values()) > 50
    assert record.claimed.sum().item() == pytest.approx(sum(plain.claimed.values()))


def test_claims_of_several_drafters_count_as_far_as_they_have_proven():
    """Prompt lookup is never right here: its claims wear off."""
    lookup = Trees.of([Draft([7, 1, 2], [-1, 0, 1], [1.0, 0.9, 0.81])])
    other = Trees.of([Draft([7, 4], [-1, 0], [1.0, 0.5])])
    record, (trees, claims) = Record(2, CPU), together([lookup, other])
    assert trees.tokens[trees.real].tolist() == [7, 1, 2, 4]
    own = claims[trees.real][1:].tolist()
    assert own == [pytest.approx(said) for said in ([0.9, 0], [0.9, -1], [0, 0.5])]
    before = record.proven(claims)[trees.real][1:].tolist()
    assert before == pytest.approx([0.9, 0.9, 0.5])
    tested, right = outcomes(trees, torch.tensor([[4, 6]]))
    for _ in range(50):
        record.count(claims, tested, right)
    # Of the second nothing has been learned.
    expected = [0.9 * 3 / (50 * 0.9 + 3), 0.9, min(1, 0.5 * (50 + 3) / (50 * 0.5 + 3))]
    assert record.proven(claims)[trees.real][1:].tolist() == pytest.approx(expected)


def test_only_children_of_nodes_that_the_target_reached_are_tested():
    trees = Trees.of([Draft([7, 1, 2, 3, 4], [-1, 0, 0, 1, 3])])

    def tests(answer: list[int]) -> list[tuple[int, bool]]:
        tested, right = outcomes(trees, torch.tensor([answer], dtype=torch.long))
        return [(node, bool(right[0, node])) for node in tested[0].nonzero()[:, 0].tolist()]

    assert tests([1, 5]) == [(1, True), (2, False), (3, False)]
    assert tests([1, 3]) == [(1, True), (2, False), (3, True)]
    assert tests([1, -1]) == [(1, True), (2, False)] and tests([]) == []


def test_a_combination_believes_each_prompt_in_what_it_shows():
    """Both name one token each; in this prompt those of the second are right."""
    here, both = PromptRecords(1, CPU), claims_of((0.6, 0), (0, 0.6), (-1, 0.6))
    first, second, unnamed = here.correction(both)[0].tolist()
    assert first == 1 > second == unnamed
    for _ in range(20):
        here.count(
            both,
            flags(True, True, False),
            flags(False, True, False),
            torch.full((1, 3), 0.3).double(),
        )
    now = here.correction(both)[0].tolist()
    assert now[1] > 2 > 0.5 > now[0] and now[2] == unnamed


class Naming(Drafter):
    """Always names the same continuations of the root."""

    def __init__(self, parents: list[int], tokens: list[int], confidences: list[float]):
        self.draft = Draft([7, *tokens], [-1, *parents], [1.0, *confidences])

    def attach(self, target):
        attached = _AttachedNaming(target)
        attached.named = self.draft
        return attached


class _AttachedNaming(Attached):
    def start(self, requests, budget):
        session = _NamingSession()
        session.trees = Trees.of([self.named] * len(requests))
        return session


class _NamingSession(Session):
    def draft(self, verified, budget):
        return self.trees

    def keep(self, indices):
        self.trees = self.trees.only(indices)

    def join(self, other):
        self.trees = self.trees.join(other.trees)


def requests_of(count: int) -> list[Request]:
    return [Request([7], Sampling(), Chance(0, 9), 9) for _ in range(count)]


def decided(*next_tokens: int) -> Verified:
    """What followed the roots, of which no child was accepted."""
    tokens, zeros = torch.tensor(next_tokens), torch.zeros(len(next_tokens), dtype=torch.long)
    roots = Trees.roots(zeros + 7)
    none = dict(cache=None, rows=None, logits=None, requests=requests_of(len(tokens)))
    return Verified(
        trees=roots, paths=zeros[:, None], counts=zeros + 1, last=zeros, next_tokens=tokens,
        decided=tokens[:, None],
        room=zeros + 9, most_room=9, **none,
    )  # fmt: skip


def drafted(session: Session, *next_tokens: int, budget: int = 2) -> list[list[int]]:
    """Tokens that it drafts for each request, after these."""
    verified = decided(*next_tokens)
    session.ask(verified)
    return [draft.tokens[1:] for draft in session.draft(verified, budget).drafts()]


def test_each_prompt_gets_the_tokens_that_have_proven_right_in_it():
    drafter = Combined({"first": Naming([0], [1], [0.6]), "second": Naming([0], [2], [0.6])})
    attached = drafter.attach(tiny_target())
    session = attached.start(requests_of(2), 2)
    assert drafted(session, 7, 7) == [[1], [1]]  # the first is trusted before the second
    for _ in range(10):
        found = drafted(session, 2, 1)
    assert found == [[2], [1]]
    record = attached.record
    assert record.right.nonzero().flatten().tolist() == [2, 10]  # kinds (2, 0) and (0, 2)
    assert record.right[[2, 10]].tolist() == [10, 10]
    assert record.claimed[[2, 10]].tolist() == pytest.approx([20 * 0.6] * 2)
    joining = attached.start(requests_of(1), 2)
    assert drafted(joining, 7) == [[1]]
    session.keep([0])
    session.join(joining)
    assert drafted(session, 2, 1) == [[2], [1]]
    attached.forget()
    assert not attached.record.right.any() and not drafter.attach(tiny_target()).record.right.any()


def test_a_combination_weighs_paths_and_not_single_tokens():
    """After 1, which is right in half of the cases, 2 is likely; 3 instead of 1 is likelier."""
    drafter = Combined({"only": Naming([0, 1, 0], [1, 2, 3], [0.5, 0.4, 0.45])})
    session = drafter.attach(tiny_target()).start(requests_of(1), 3)
    assert drafted(session, 7, budget=3) == [[1, 3]]


def test_claims_of_like_confidence_are_of_one_kind():
    record, claims = Record(2, CPU), claims_of((0.95, -1), (0.9, -1), (0.3, -1))
    for _ in range(20):
        record.count(claims, flags(True, False, False), flags(False, False, False))
    _, alike, other = record.proven(claims)[0].tolist()
    assert alike < 0.2 and other == 0.3


def test_shares_at_the_bounds_of_a_kind_are_of_one_kind_however_they_are_rounded():
    """2/3 of 3/4 of 2/3 in float32, each given its parent."""
    shares = [2 / 3, 3 / 4, 2 / 3]
    draft = Draft.chain([7, 1, 2, 3], [1.0, 2 / 3, 2 / 3 * 3 / 4, 2 / 3 * 3 / 4 * 2 / 3])
    _, claims = together([Trees.of([draft])])
    assert claims[0, 1:, 0].tolist() == pytest.approx(shares)
    record = Record(1, CPU)
    record.count(claims, flags(False, True, True, True), flags(*[False] * 4))
    assert record.claimed.tolist() == pytest.approx([0, 0, 4 / 3, 3 / 4, 0])


def test_a_combination_is_verified_as_its_parts_are():
    target = tiny_target()
    attached, alone = combined(more=AdaptiveNgram(2, 3)).attach(target), unispec().attach(target)
    assert answered(attached, target).ids == answered(alone, target).ids
    assert attached.record.claimed.sum() > 0
    assert (
        attached.memory() == sum(part.memory() for part in attached.parts.values()) > alone.memory()
    )


def test_what_cannot_be_combined_is_refused():
    target = tiny_target()
    assert "cannot be parts" in refused(lambda: combined(more=lookahead()).attach(target))
    assert "cannot be parts" in refused(lambda: combined(more=spectra()).attach(target))
    assert "at least one" in refused(lambda: Combined({}))
    sampled = combined(more=DraftModel(target, 3))
    assert "cannot be combined" in refused(lambda: answered(sampled, target, temperature=1.0))
    assert answered(sampled, target).ids == answered(unispec(), target).ids


def test_nodes_carry_the_streams_of_one_drafter():
    target = tiny_target()
    parts = {
        str(seed): Streaming(tiny_speculator(target, seed=seed), "fused", 2) for seed in (1, 2)
    }
    assert "schedule=deferred" in refused(lambda: Auto(parts).attach(target))
    parts["1"].schedule = "deferred"
    assert Auto(parts).attach(target)
