"""What a device has room for."""

import torch
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.device import has_room_for
from slipstream.speculators.streaming import steps


def test_a_tenth_of_what_is_free_on_a_gpu_may_be_copied(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 80_000))
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert has_room_for(100, gpu) and not has_room_for(101, gpu)
    assert has_room_for(10**12, cpu)


def test_layers_are_merged_where_there_is_room_for_copies(monkeypatch):
    target = tiny_target()
    speculator, sizes = tiny_speculator(target), []
    assert speculator.merged_layers(target) is not None
    monkeypatch.setattr(steps, "has_room_for", lambda size, device: sizes.append(size))
    assert speculator.merged_layers(target) is None
    last = target.family.layers[speculator.first_layer :]
    assert sizes == [sum(weight.nbytes for weight in last.parameters())]
