"""What the engine promises drafters of others, and what it refuses of them."""

from dataclasses import dataclass

import pytest
import torch
from tests.tiny import tiny_target
from torch import nn

from slipstream.core.drafts import Draft
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.trees import Trees
from slipstream.decoding.answer import Limits
from slipstream.decoding.calibrated import described
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.base import Attached, AttachedHost, Drafter, Session
from slipstream.drafters.combined import Combined
from slipstream.speculators.base import DraftingSpeculator
from slipstream.training.speculator import check_tensors

PROMPT = list(range(2, 39))
SETTINGS = Sampling(), Limits(12)


@dataclass(eq=False)
class Phrase(Drafter):
    """One phrase, whatever was said, under a root of its own or the right one."""

    tokens: list[int]
    root: int | None = None

    def attach(self, target):
        return AttachedPhrase(target, self)


class AttachedPhrase(AttachedHost):
    def drafted(self, request, state, budget):
        root = request.tokens[-1] if self.settings.root is None else self.settings.root
        return Draft.chain([root, *self.settings.tokens])


class StatesSession(Session):
    """Drafts nothing, and counts the states of the target that it was given."""

    def __init__(self, attached, requests, budget):
        self.attached = attached

    def read_part(self, rows, counts):
        self.attached.parts.append(counts)
        self.attached.states.append(rows.hidden[0, : counts[0]])

    def draft(self, verified, budget):
        if verified.prompt:
            self.attached.states.append(verified.rows.hidden[0, : verified.last[0] + 1])
        return Trees.roots(verified.next_tokens)


class AttachedStates(Attached):
    session = StatesSession

    def __init__(self, target):
        super().__init__(target)
        self.states, self.parts = [], []


class States(Drafter):
    def attach(self, target):
        return AttachedStates(target)


def test_a_draft_with_another_root_is_refused_and_one_that_is_too_large_is_cut():
    target = tiny_target()
    engine = Engine(target, Phrase([3] * 90), *SETTINGS, budget=6)
    assert engine.generate(PROMPT).ids == PlainDecoder(target, *SETTINGS).generate(PROMPT).ids
    with pytest.raises(ValueError, match=r"AttachedPhrase.*last token"):
        Engine(target, Phrase([3], root=1), *SETTINGS, budget=6).generate(PROMPT)


@pytest.mark.parametrize("within", [False, True])
def test_a_session_gets_the_states_of_all_tokens_of_a_prompt(within):
    target = tiny_target()
    drafter = Combined({"states": States()}) if within else States()
    engine = Engine(target, drafter, *SETTINGS, budget=4)
    attached = engine.attached.parts["states"] if within else engine.attached
    engine.running = engine._fresh([engine.request(PROMPT, 0)])
    for _ in engine._prefill(engine.running, 10):
        pass
    whole = target.forward(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None], None, None)
    assert attached.parts == [[7], [10], [10]]
    torch.testing.assert_close(torch.cat(attached.states), whole.hidden[0], atol=1e-5, rtol=1e-4)


def test_calibrations_tell_drafters_of_others_apart():
    assert described(Phrase([1])) != described(Phrase([2]))
    assert described(Phrase([1])) == described(Phrase([1]))


@pytest.mark.parametrize(
    "wrong", [torch.ones(2, dtype=torch.long), torch.tensor([0.0, -torch.inf]), "shared"]
)
def test_tensors_that_no_folder_opens_with_are_refused_before_the_training(wrong):
    module = nn.Linear(2, 2)
    module.kind = "owl"
    check_tensors(module)
    module.register_buffer("other", module.weight[0] if isinstance(wrong, str) else wrong)
    with pytest.raises(InputError, match=r"'other' of kind 'owl'.*persistent=False"):
        check_tensors(module)


def test_a_speculators_layers_go_on_reading_the_config_of_their_target():
    """Which says how attention is made, and changes while ours runs."""
    target, module = tiny_target(), nn.Linear(2, 2)
    module.config = target.model.config
    placed = DraftingSpeculator.placed(module, target)
    assert placed is not module and placed.config is target.model.config
