"""The arithmetic of rules that end a draft, and what they refuse."""

from itertools import product
from math import log

import pytest
import torch
from tests.commands import refused
from tests.drafters import untrained
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.acceptance_length import AnyRejected, LastRejected
from slipstream.drafters.draft_length import AssistantThreshold, EntropyBound, Grown, Heuristic
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.checkpoint import save_speculator
from slipstream.speculators.classifiers import AcceptanceConfig, AcceptanceHead
from slipstream.targets.loading import load_target


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


CLASSIFIED = {"any_rejected": AnyRejected, "last_rejected": LastRejected}


def drawn(*logits: list[float]) -> Grown:
    """Drafts that drew token 0 from these."""
    return Grown(torch.tensor(logits), torch.zeros(len(logits), dtype=torch.long))


def stops(rule, *logits: list[float]) -> list[bool]:
    """Whether new requests' drafts end with token 0, drawn from these."""
    return [rule.start().stops(score) for score in rule.scores(drawn(*logits))]


def test_entropy_bound_by_numbers():
    """log 4 nats at scale 0.2: 1 - sqrt(0.2 * 1.38629) = 0.47345; certainty: 1."""
    even, sure = [1.0, 1.0, 1.0, 1.0], [50.0, 0.0, 0.0, -torch.inf]
    for threshold, stop in ((0.4734, False), (0.4735, True)):
        assert stops(entropy_bound(0.2, threshold), even, sure) == [stop, False]
    assert stops(entropy_bound(0.2, 1.01), sure) == [True]
    assert stops(entropy_bound(1 / log(4), 1e-4), even) == [True], "the bound is 0"
    assert stops(entropy_bound(2.0, -1.0), even) == [False], "it is 1 - sqrt(2 log 4) = -0.665"


def test_the_threshold_follows_the_share_of_accepted_tokens():
    """Shares 0.5 * 0.9 + 0.5 * 2/4 = 0.7, then 0.85, then 0.925, of which 0.9 is the goal; the
    threshold goes a tenth of the step of 0.01."""
    rule = entropy_bound()
    other, length = rule.start(), rule.start()
    assert (length.threshold, length.share) == (0.4, 0.9)
    steps = [((4, 2), 0.7, 0.401), ((2, 2), 0.85, 0.402), ((3, 3), 0.925, 0.401)]
    for (drafted, accepted), share, threshold in steps:
        length.begin()
        length.observe(drafted, accepted)
        assert (length.share, length.threshold) == pytest.approx((share, threshold))
    length.observe(0, 0)
    assert (length.share, length.threshold) == pytest.approx((0.925, 0.401))
    assert (other.threshold, other.share) == (0.4, 0.9)
    assert (rule.start().threshold, rule.start().share) == (0.4, 0.9)


def test_any_rejected_multiplies_over_the_draft_and_starts_over():
    """0.9 * 0.8 = 0.72 and 0.72 * 0.7 = 0.504: rejected with 0.28, then 0.496."""
    rule = AnyRejected("head", 0.4)
    length, other = rule.start(), rule.start()
    length.begin()
    assert [length.stops(score) for score in (0.9, 0.8, 0.7)] == [False, False, True]
    assert length.all_accepted == pytest.approx(0.504)
    assert other.stops(0.5)
    length.begin()
    assert not length.stops(0.7) and length.all_accepted == pytest.approx(0.7)


def test_last_rejected_looks_at_the_last_token_alone():
    length = LastRejected("head", 0.6).start()
    length.begin()
    assert [length.stops(score) for score in (0.61, 0.61, 0.61, 0.59)] == [False] * 3 + [True]


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
    rule = kind(head, 0.5).attach(draft)
    accepted = rule.scores(Grown(logits, tokens, states))
    torch.testing.assert_close(torch.tensor(accepted), reference)
    assert abs(accepted[0] - accepted[1]) > 0.01
    others = rule.scores(Grown(logits, torch.tensor([8, 2]), states))
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
    rule.attach(draft)
    assert "another draft model" in refused(lambda: rule.attach(tiny_target(seed=1)))


@pytest.mark.parametrize("kind", CLASSIFIED.values())
def test_a_folder_of_another_kind_is_refused(kind, tmp_path):
    draft = tiny_target()
    streaming = tiny_speculator(draft)
    folder = save_speculator(tmp_path / "streaming", streaming, draft, 9, "# A")
    rule = kind(str(folder), 0.5)
    for _ in range(2):
        message = refused(lambda: rule.attach(draft))
        assert message.startswith("length.head: ") and "'streaming'" in message
    message = refused(lambda: kind(streaming, 0.5))
    assert message.startswith("length.head: must be") and "StreamingSpeculator" in message
    assert "absent" in refused(lambda: kind(str(tmp_path / "absent"), 0.5).attach(draft))


def test_a_shipped_speculator_is_no_acceptance_head():
    """Of the target it was trained for it is of another kind; of a draft model, for another."""
    own = load_target("slipstream/small-target", device="cpu", packed=False)
    drafter = DraftModel(own, 3, AnyRejected("slipstream/small-streaming", 0.5))
    message = refused(lambda: Engine(own, drafter, Sampling(), Limits(4), 4))
    assert message.startswith("length.head: ") and "'streaming'" in message
    draft = load_target("slipstream/small-draft", device="cpu", packed=False)
    drafter = DraftModel(draft, 3, LastRejected("slipstream/small-streaming", 0.5))
    message = refused(lambda: Engine(own, drafter, Sampling(), Limits(4), 4))
    assert "slipstream/small-draft differ" in message


def test_gammatune_follows_the_accepted_tokens_by_numbers():
    """eta 0.25, delta 2, from 4: all 4 accepted count as 6; (1 - 0.25) 4 + 0.25 * 6 = 4.5, drafted
    as 5. Then 1 of 5: 0.75 * 4.5 + 0.25 = 3.625, drafted as 4."""
    rule = untrained.gammatune(initial=4, rate=0.25, most=24)
    length, other = rule.start(), rule.start()
    assert length.limit() == 4
    length.begin()
    length.observe(4, 4)
    assert (length.value, other.value) == pytest.approx((4.5, 4)) and length.limit() == 5
    length.observe(5, 1)
    assert length.value == pytest.approx(3.625) and length.limit() == 4
    length.observe(2, 2)  # cut short by something else: says nothing
    assert length.value == pytest.approx(3.625)
    length.observe(2, 0)
    assert length.value == pytest.approx(2.71875)
    for _ in range(40):
        other.observe(other.limit(), other.limit())
    assert other.value == 24
    for _ in range(40):
        other.observe(other.limit(), 0)
    assert other.value == 1


def test_gammatune_plus_counts_what_it_stopped_itself():
    """A largest probability of 0.5 is below 0.6, one of 0.99 is not."""
    rule = untrained.gammatune(0.6, initial=4, rate=0.5)
    length = rule.start()
    length.begin()
    assert not length.stops(*rule.scores(drawn([5.0, 0.0])))
    assert length.stops(*rule.scores(drawn([1.0, 1.0])))
    length.observe(2, 2)
    assert length.value == 3.0


def test_the_heuristic_adds_two_or_takes_one():
    length = Heuristic(initial=2, carry=False).start()
    lengths = []
    for accepted in (2, 4, 3, 0, 0, 0, 0, 0, 0, 0):
        length.observe(length.limit(), accepted)
        lengths.append(length.limit())
    assert lengths == [4, 6, 5, 4, 3, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("carry", [True, False])
def test_a_length_is_carried_from_prompt_to_prompt_or_reset(carry):
    for rule in (Heuristic(3, carry), untrained.gammatune(initial=3, carry=carry)):
        first = rule.start()
        first.observe(3, 3)
        assert first.value != 3
        assert rule.start().value == (first.value if carry else 3)
        rule.forget()
        assert rule.start().value == 3


def test_the_assistant_threshold_looks_at_the_token_drawn():
    """Token 0 with probabilities 0.5 and e^2 / (e^2 + 1) = 0.88."""
    assert stops(AssistantThreshold(0.6), [1.0, 1.0], [2.0, 0.0]) == [True, False]


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
