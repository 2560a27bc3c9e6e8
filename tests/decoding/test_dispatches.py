"""How much Python starts in a step, with stand-ins for graphs: their inside costs nothing, copies
into and out of them do."""

import pytest
import torch
from tests.graphs import Dispatches, stand_in
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.streaming import Streaming
from slipstream.targets import compiled, graphs
from slipstream.targets.compiled import compile_target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def dispatches(monkeypatch):
    stand_in(monkeypatch)
    for name, value in {"REPLAYING": ("cpu",), "GRANULARITY": 256, "CAPACITY": 1024}.items():
        monkeypatch.setattr(compiled, name, value)
    yield Dispatches()
    graphs._stream.cache_clear()


@pytest.mark.parametrize(
    ("options", "temperature", "batch", "most"),
    [({}, 0.0, 1, 40), ({}, 0.0, 8, 40), ({}, 1.0, 1, 46),
     ({"transition_rank": 2, "copy_scores": True}, 0.0, 1, 48)],
)  # fmt: skip
def test_a_deferred_step_starts_little_outside_its_graphs(
    dispatches, options, temperature, batch, most
):
    target = tiny_target("llama", num_hidden_layers=4)
    compile_target(target, "reduce-overhead")
    drafter = Streaming(tiny_speculator(target, **options), "deferred", 4)
    engine = Engine(target, drafter, Sampling(temperature), Limits(200), 12)
    engine.start([engine.request(PROMPT, seed) for seed in range(batch)])
    engine.step()
    with dispatches:
        engine.step()
    assert 10 < dispatches.count <= most


class Masks(Dispatches):
    """Counts operators that read a boolean tensor as large as a mask."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        given = [each for each in arguments if isinstance(each, torch.Tensor)]
        self.count += any(each.dtype == torch.bool and each.ndim == 4 for each in given)
        return function(*arguments, **(options or {}))


def test_the_mask_of_a_forward_is_made_once_and_not_once_a_layer():
    counts = []
    for layers in (2, 6):
        target, masks = tiny_target("llama", num_hidden_layers=layers), Masks()
        mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
        with masks, torch.no_grad():
            target.forward(torch.tensor([PROMPT[:3]]), torch.arange(3)[None], mask, None)
        counts.append(masks.count)
    assert 0 < counts[0] == counts[1]
