"""Chains, trees and pruned trees: speed and tau by the number of streams and children (Figures 10
and 13)."""

from itertools import product

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.comparison import compare, overall
from slipstream.evaluation.methods import Method, Plain, Speculative
from slipstream.evaluation.prompts import Prompt, divided
from slipstream.results.record import Plot, Result
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.target import Target
from studies.pruning_calibration import calibrate, record_trees


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
    chosen = [render_prompt(target.tokenizer, prompt.text) for prompt in first]
    methods: dict[str, Method] = {"plain": Plain()}
    points: dict[str, dict[str, object]] = {}
    for gamma, top_k in product(gammas, top_ks):
        part = streams.first_streams(target, gamma)
        nodes = min(largest, sum(top_k**level for level in range(gamma + 1)))
        drafter = Streaming(part, schedule, top_k)
        found = calibrate(record_trees(target, drafter, chosen, nodes), keep)
        pruning = Streaming(part, schedule, top_k, found.threshold, found.cap)
        for pruned, own in (("", drafter), (", pruned", pruning)):
            name = f"gamma {gamma}, k {top_k}{pruned}"
            points[name] = {"trees": f"gamma {gamma}{pruned}", "k": top_k, "nodes": nodes}
            methods[name] = Speculative(own, nodes)
    runs = compare(methods, rest, target, Sampling(), Limits(96), repeats, seed=0)
    records = overall(runs, rest, str(target.dtype))
    rows = [
        point
        | {
            "tau": records[name].tau,
            "speed vs plain": records[name].speedup_vs_plain,
            "verify, s": records[name].seconds_verify,
            "draft, s": records[name].seconds_draft,
            "identical": f"{records[name].identical}/{len(rest)}",
        }
        for name, point in points.items()
    ]
    title = f"Chains, trees and pruned trees, {schedule} (Figures 10 and 13)"
    return Result(title, rows, (Plot("k", ("speed vs plain", "tau"), hue="trees", reference=1.0),))
