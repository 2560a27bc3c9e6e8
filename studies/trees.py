"""Chains, trees and pruned trees: speed and tau by the number of streams and children (Figures 10
and 13)."""

from itertools import product

from slipstream.core.errors import InputError
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import divided
from slipstream.speculators.checkpoint import load_speculator
from studies import Plot, Prompt, Result, Target
from studies.decoding import columns, compared, token_ids
from studies.pruning import calibrate, record_trees


def trees(
    target: Target,
    prompts: list[Prompt],
    speculator: str,
    schedule: str,
    gammas: list[int],
    top_ks: list[int],
    largest: int,
    keep: float,
    calibration_prompts: int,
    repeats: int,
) -> Result:
    """Trees of `gammas` levels with `top_ks` children each: full ones of up to `largest` nodes,
    beyond that their most probable `largest` nodes. With pruning, threshold and cap are calibrated
    so that `keep` of the accepted drafts survive. The first `calibration_prompts` serve that alone;
    the others are decoded by all, interleaved."""
    streams = load_speculator(speculator, target)
    if streams.config.mode == "shared":
        raise InputError("study.speculator: in shared mode no stream can be left out")
    first, rest = divided(prompts, calibration_prompts)
    methods: dict[str, Method] = {"plain": Plain()}
    points: dict[str, dict[str, object]] = {}
    for gamma, top_k in product(gammas, top_ks):
        part = streams.first_streams(target, gamma)
        nodes = min(largest, sum(top_k**level for level in range(gamma + 1)))
        drafter = Streaming(part, schedule, top_k)
        found = calibrate(record_trees(target, drafter, token_ids(target, first), nodes), keep)
        pruning = Streaming(part, schedule, top_k, found.threshold, found.cap)
        for pruned, own in (("", drafter), (", pruned", pruning)):
            name = f"gamma {gamma}, k {top_k}{pruned}"
            points[name] = {"trees": f"gamma {gamma}{pruned}", "k": top_k, "nodes": nodes}
            methods[name] = Speculative(own, nodes)
    _, records = compared(target, methods, rest, repeats)
    rows = [
        point
        | {"speed vs plain": records[name].speedup_vs_plain}
        | columns(vars(records[name]), "tau", "verify, s", "draft, s")
        for name, point in points.items()
    ]
    title = f"Chains, trees and pruned trees, {schedule} (Figures 10 and 13)"
    return Result(title, rows, (Plot("k", ("speed vs plain", "tau"), hue="trees", reference=1.0),))
