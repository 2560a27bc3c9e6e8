"""What a forward of several rows is said to cost is what decoding does."""

from inspect import isfunction
from statistics import median

import pytest
from tests.graphs import Dispatches, stand_in
from tests.tiny import tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.evaluation import row_cost
from slipstream.evaluation.row_cost import row_costs
from slipstream.targets import compiled
from slipstream.targets.compiled import compile_target


class Operations(Dispatches):
    """A clock that a tenth of a second of goes by with every operation."""

    def perf_counter(self) -> float:
        return self.count / 10


@pytest.fixture
def decoder():
    return PlainDecoder(tiny_target(num_hidden_layers=12), Sampling(), Limits(31))


def test_one_row_is_as_much_work_as_a_step_of_plain_decoding(decoder, monkeypatch):
    """Operations are counted, not seconds: what the step does beside (argmax, commit) is little."""
    steps = []
    with Operations() as clock:
        decoder.start([decoder.request([3, 1, 4, 1, 5])])
        for _ in range(30):
            before = clock.perf_counter()
            decoder.step()
            steps.append(clock.perf_counter() - before)
        monkeypatch.setattr(row_cost, "time", clock)
        found = row_costs(decoder.target, 32, 5, (1,))[1]
    assert found == pytest.approx(median(steps), rel=0.1)


def test_graphs_are_those_of_decoding_and_hold_the_head(decoder, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr(compiled, "REPLAYING", ("cpu",))
    target = compile_target(decoder.target, "reduce-overhead")
    Engine(target, PromptLookup(2, 3), Sampling(), Limits(31), 4).generate([3, 1, 4])
    kinds = {key[0] for key in target.compiled.graphs.kept if isfunction(key[0]())}  # no prompt's
    target.compiled.graphs.kept.clear()
    heads, logits = [], target.logits
    monkeypatch.setattr(target, "logits", lambda hidden: heads.append(1) or logits(hidden))
    row_costs(target, 32, 20, (1, 4))
    graphs = list(target.compiled.graphs.kept)
    assert kinds == {key[0] for key in graphs} and len(graphs) == 2
    assert len(heads) == 3 * 2  # two warm-ups and a capture each, and not in every step
