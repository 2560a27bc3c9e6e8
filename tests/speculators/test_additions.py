"""What this project adds to the paper: off in its presets, named in tables."""

from tests.commands import config_of
from tests.tiny import tiny_speculator, tiny_target

from slipstream.configuration import build
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.streaming import Streaming


def test_the_papers_presets_have_no_additions():
    """Appendices H and N.1: gamma 4, N_s 4, rank 8, k 3, 64 attended tokens, no MLP for streams."""
    config = config_of("train", "speculator=streaming_paper")
    settings = build(config.speculator)
    assert (settings.num_streams, settings.num_msa_layers, settings.adapter_rank) == (4, 4, 8)
    assert (settings.mlp, settings.attended_tokens) == ("adapter", 64)
    assert settings.additions("deferred") == settings.additions("fused") == []
    ours = build(config_of("train", "speculator=streaming").speculator)
    assert ours.additions("deferred") == ["root", "pairs", "copying"]
    assert ours.additions("fused") == ["pairs", "copying"]
    drafter = build(config_of("infer", "drafter=streaming_paper").drafter)
    assert (drafter.schedule, drafter.top_k, drafter.prune_cap) == ("fused", 3, 32)
    assert drafter.prune_threshold > 0 and not drafter.pairs


def test_tables_name_the_additions_that_act():
    target = tiny_target()
    plain, more = tiny_speculator(target), tiny_speculator(target, root_rank=2, copy_scores=True)
    said = [
        Streaming(speculator, schedule, 2).attach(target).details
        for speculator in (plain, more)
        for schedule in ("fused", "deferred")
    ]
    assert said[:2] == ["fused: no additions", "deferred: no additions"]
    assert said[2:] == ["fused: copying", "deferred: root, copying"]
    paper = Streaming(more, "fused", 2, pairs=False)
    assert paper.attach(target).details == "fused: no additions"
    ids = Engine(target, paper, Sampling(), Limits(9), 9).generate([3, 1, 4]).ids
    assert ids == PlainDecoder(target, Sampling(), Limits(9)).generate([3, 1, 4]).ids
