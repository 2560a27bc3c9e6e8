"""What crosses from the device to the host in a step, with a vocabulary of which a single row of
logits is more than all that may cross in these steps.

On the CPU nothing crosses; what would is counted in place of it: every tensor that Python reads, or
that is copied to the CPU.
"""

from itertools import product

import pytest
import torch
from tests.drafters import untrained
from tests.exhaustive import sparing
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core import transfer
from slipstream.core.sampling import Sampling
from slipstream.decoding import engine as engine_file
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters import base
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.targets.rows import Rows

BUDGET, STEPS, DRAFTED = 64, 4, 4
MOST_BYTES = 16 * 1024
READING = "tolist", "item", "numpy", "cpu", "__int__", "__float__", "__bool__", "__index__"
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [1, 2, 3, 1, 2, 3, 1, 2]]


class Traffic:
    """Bytes that were read, and how often was waited; what was brought once costs nothing more."""

    def __init__(self, monkeypatch):
        self.bytes = self.waits = self.reads = 0
        self.brought: set[int] = set()
        self.kept: list[torch.Tensor] = []
        for name in READING:
            monkeypatch.setattr(torch.Tensor, name, self._reading(getattr(torch.Tensor, name)))
        monkeypatch.setattr(base, "sent", self._bring)

    def _reading(self, read):
        def counted(tensor, *arguments, **options):
            if tensor.untyped_storage().data_ptr() not in self.brought:
                self._count(tensor)
            return read(tensor, *arguments, **options)

        return counted

    def _bring(self, *tensors):
        self.waits += 1
        copies = [tensor.clone() for tensor in transfer.sent(*tensors)()]  # when it is sent
        self.bytes += sum(copy.numel() * copy.element_size() for copy in copies)
        self.brought |= {copy.untyped_storage().data_ptr() for copy in copies}
        self.kept += copies  # so that nothing else gets their place
        return lambda: copies

    def _count(self, tensor: torch.Tensor) -> None:
        self.reads += 1
        self.bytes += tensor.numel() * tensor.element_size()


@pytest.fixture(
    scope="module", params=[32_000, pytest.param(128_000, marks=pytest.mark.exhaustive)]
)
def target(request):
    assert MOST_BYTES * STEPS * len(PROMPTS) < 8 * request.param
    return tiny_target("llama", vocab_size=request.param, hidden_size=16, num_hidden_layers=4)


def drafters(target) -> dict[str, object]:
    speculator = tiny_speculator(target, transition_rank=2, copy_scores=True)
    found = untrained.untrained([[1, 2, 3, 4], [4, 3, 2, 1]])
    found |= {
        "unispec, ten successors": untrained.unispec(top_k=10, ranks=[0.1] * 10),
        "fused": Streaming(speculator, "fused", 4),
        "deferred": Streaming(speculator, "deferred", 4),
        "deferred, pruned": Streaming(speculator, "deferred", 4, 0.01, 6),
        "deferred, gammatune": Streaming(speculator, "deferred", 4, length=untrained.gammatune()),
        "draft model": DraftModel(target, DRAFTED),
    }
    return found


NAMES = [*untrained.untrained([[1]]), "unispec, ten successors", "fused", "deferred",
         "deferred, pruned", "deferred, gammatune", "draft model"]  # fmt: skip


def once(name: str, temperature: float) -> bool:
    """Each drafter once, and what brings most bytes or has most to do."""
    most = "unispec, ten successors", "deferred, pruned", "deferred, gammatune"
    if temperature:
        return name in ("deferred", "draft model")
    return name in most or "," not in name


@pytest.mark.parametrize(("name", "temperature"), sparing(product(NAMES, (0.0, 0.8)), once))
def test_few_bytes_cross_and_a_step_waits_once(monkeypatch, target, name, temperature):
    sampling = Sampling(temperature)
    engine = Engine(target, drafters(target)[name], sampling, Limits(200), BUDGET)
    engine.start([engine.request(ids, seed) for seed, ids in enumerate(PROMPTS)])
    traffic = Traffic(monkeypatch)
    for _ in range(STEPS):
        engine.step()
    assert 0 < traffic.bytes <= MOST_BYTES * STEPS * len(PROMPTS)
    assert traffic.waits == STEPS
    # A draft model reads its own tokens from lists on the host: it waits for each but the last.
    assert traffic.reads == (STEPS * (DRAFTED - 1) if name == "draft model" else 0)


@pytest.mark.parametrize("schedule", ["fused", "deferred"])
@pytest.mark.parametrize(("threshold", "cap", "kept"), [(0.01, 6, 6), (0.01, None, BUDGET // 2)])
def test_a_pruned_step_keeps_a_fixed_number_of_rows_and_waits_once(
    monkeypatch, target, schedule, threshold, cap, kept
):
    """A batch is not pruned, so one request; as where the host would have to wait."""
    drafter = Streaming(tiny_speculator(target), schedule, 4, threshold, cap)
    engine = Engine(target, drafter, Sampling(), Limits(200), BUDGET)
    engine.start([engine.request(PROMPTS[0])])
    engine.running.session.visitors[0].counts = False
    widths, keep = [], Rows.keep
    monkeypatch.setattr(Rows, "keep", lambda *given: widths.append(given[1].shape) or keep(*given))
    engine.step()  # the first tree may be small
    traffic = Traffic(monkeypatch)
    widths.clear()
    for _ in range(STEPS):
        engine.step()
    assert widths == [(1, kept)] * STEPS
    assert (traffic.waits, traffic.reads) == (STEPS, 0)


def test_logits_that_cross_are_noticed(monkeypatch, target):
    engine = Engine(target, drafters(target)["prompt lookup"], Sampling(), Limits(200), BUDGET)
    engine.start([engine.request(PROMPTS[0])])
    traffic = Traffic(monkeypatch)
    choose = engine_file.choose
    monkeypatch.setattr(
        engine_file, "choose", lambda samplings, logits: choose(samplings, logits.cpu())
    )
    engine.step()
    assert traffic.bytes > MOST_BYTES
