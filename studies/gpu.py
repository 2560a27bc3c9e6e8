"""What a GPU makes of it: `python -m studies.gpu`, or `PYTHONPATH=src:. python studies/gpu.py`.

It needs torch, transformers, safetensors and this repository, and no installation. It checks that
answers are exact on the device, eager and compiled; then it measures, at the shape of Llama 3 8B,
the memory bandwidth, plain decoding and streams, the cost of sampling and of rows, where the time
of a step goes, and a training step. The large model computes what the small one does
(`studies.enlargement`), so drafts are accepted as they are there. Tables are printed as they are
made; --out has them as JSON.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.core.files import write_json
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.auto import Auto
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.row_cost import row_costs
from slipstream.results.record import cell
from slipstream.speculators.checkpoint import load_speculator
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.compiled import compile_target
from slipstream.targets.loading import DTYPES, load_target
from slipstream.targets.packed import fuse_linears
from studies import Rows, Target
from studies.enlargement import SHAPES, enlarged_speculator, enlarged_target
from studies.timing import measured_bandwidth, training_steps

PROMPTS = (
    "name[The Mill], eatType[pub], food[English], priceRange[cheap], near[Raja]",
    "CREATE TABLE singer (name VARCHAR, age INTEGER)\nQuestion: How old is the singer Joe?",
    "name[Aromi], food[Chinese], customer rating[5 out of 5], area[riverside]",
    "CREATE TABLE race (year INTEGER, winner VARCHAR)\nQuestion: Who was the winner in 1998?",
)
GREEDY, TOP_K = Sampling(), 4
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature 1": Sampling(1.0),
    "temperature 1, top-p 0.95": Sampling(1.0, top_p=0.95),
}
# Sizes of trees; fused streams add a row for each stream of each node.
DEFERRED, FUSED, ROW_COUNTS = (4, 8, 12, 16, 32), (4, 6, 8), (1, 2, 4, 8, 16, 32, 64)
COPIED = 4 * 2**30
KERNELS = 12


def exactness(device: str, modes: list[str]) -> Iterator[dict]:
    """Of every drafter and mode, how many float32 answers of the shipped target are `generate`'s
    (sampled ones: plain decoding's with the same seed)."""
    reference, limits, drawn = _shipped(device), Limits(64), Sampling(0.8)
    prompts, plain = _prompts(reference), PlainDecoder(reference, drawn, limits)
    greedy = [_generate(reference, ids, limits.max_new_tokens) for ids in prompts]
    sampled = [plain.generate(ids, 7).ids for ids in prompts]
    expected = {"greedy": greedy, "batch": greedy, "sampled": sampled}
    for mode in modes:
        target = compile_target(_shipped(device), mode)
        streams = partial(Streaming, load_speculator("slipstream/small-streaming", target))
        drafters = {
            "plain": None,
            "streams, deferred": streams("deferred", TOP_K),
            "streams, fused": streams("fused", TOP_K),
            "streams, pruned": streams("deferred", TOP_K, 0.02, 8),
            "prompt lookup": PromptLookup(3, 7),
            "auto": Auto({"streams": streams("deferred", TOP_K), "lookup": PromptLookup(3, 7)}),
        }
        for name, drafter in drafters.items():
            likeliest, drawing = (
                _decoder(target, drafter, sampling, limits) for sampling in (GREEDY, drawn)
            )
            found = {
                "greedy": [likeliest.generate(ids).ids for ids in prompts],
                "batch": [each.ids for each in likeliest.generate_batch(prompts)],
                "sampled": [drawing.generate(ids, 7).ids for ids in prompts],
            }
            right = {
                way: f"{sum(map(list.__eq__, answers, expected[way]))}/{len(prompts)}"
                for way, answers in found.items()
            }
            exact = {"exact": "yes" if found == expected else "no"}
            yield {"steps": mode, "drafter": name} | right | exact


def decoding(
    target: Target, streams: StreamingSpeculator, modes: list[str], repeats: int, bandwidth: float
) -> Rows:
    """Plain decoding, streams of both schedules and the choice at every step, eager and compiled,
    beside `generate`; the prefill is left out of all but `generate`."""
    limits, prompts = Limits(96), _prompts(target)
    columns = "method", "steps", "tokens/s", "vs plain", "tau", "ms/step", "of bandwidth"
    read = sum(p.nbytes for p in target.family.layers.parameters()) + target.head.weight.nbytes
    _generate(target, prompts[0], 8)  # the first call loads libraries
    started = time.perf_counter()
    count = sum(len(_generate(target, ids, limits.max_new_tokens)) for ids in prompts)
    rows = [("generate", "eager", count / (time.perf_counter() - started), *[None] * 4)]
    for mode in modes:
        compile_target(target, mode)
        decoders = {"plain": _decoder(target, None, GREEDY, limits)}
        for schedule, budgets in (("deferred", DEFERRED), ("fused", FUSED)):
            attached = Streaming(streams, schedule, TOP_K).attach(target)
            for nodes in budgets:
                name = f"{schedule}, {nodes} nodes"
                decoders[name] = Engine(target, attached, GREEDY, limits, nodes)
        parts = {"streams": Streaming(streams, "deferred", TOP_K), "lookup": PromptLookup(3, 7)}
        name = f"auto, {max(DEFERRED)} nodes"
        decoders[name] = Engine(target, Auto(parts), GREEDY, limits, max(DEFERRED))
        totals = dict.fromkeys(decoders, Statistics())
        for turn, ids, name in product(range(repeats + 1), prompts, decoders):
            taken = decoders[name].generate(ids).statistics
            totals[name] += taken if turn else Statistics()  # the first compiles and captures
        steps = {name: total.step_seconds for name, total in totals.items()}
        for name, total in totals.items():
            step, over = steps[name], total.tau * steps["plain"] / steps[name]
            share = read / step / bandwidth
            rows += [(name, mode, total.tau / step, over, total.tau, 1000 * step, share)]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def sampling_costs(target: Target, streams: StreamingSpeculator, repeats: int) -> Rows:
    """What a step costs where tokens are drawn, against the greedy step of the same method."""
    limits, attached = Limits(32), Streaming(streams, "deferred", TOP_K).attach(target)
    drafters = {"plain": None, "deferred": attached}
    decoders = {
        (name, how): _decoder(target, drafter, sampling, limits)
        for name, drafter in drafters.items()
        for how, sampling in SAMPLINGS.items()
    }
    totals = dict.fromkeys(decoders, Statistics())
    for turn, ids, key in product(range(repeats + 1), _prompts(target), decoders):
        taken = decoders[key].generate(ids, turn).statistics
        totals[key] += taken if turn else Statistics()
    steps = {key: total.step_seconds for key, total in totals.items()}
    return [
        {"method": name, "sampling": how, "ms/step": 1000 * step,
         "vs greedy": step / steps[name, "greedy"]}
        for (name, how), step in steps.items()
    ]  # fmt: skip


def rows_of(target: Target) -> Rows:
    """What a verifying forward of n rows costs."""
    costs = row_costs(target, 512, 15, ROW_COUNTS)
    return [
        {"rows": count, "ms": 1000 * each, "vs one row": each / costs[1]}
        for count, each in costs.items()
    ]


def time_line(target: Target, streams: StreamingSpeculator) -> Rows:
    """Where the time of a step goes: its kernels by device time, and what the host adds."""
    ids, rows, on_gpu = _prompts(target)[0], [], target.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    spent = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    for name, drafter in (("plain", None), ("deferred", Streaming(streams, "deferred", TOP_K))):
        decoder = _decoder(target, drafter, GREEDY, Limits(32))
        decoder.generate(ids)  # compiles and captures
        total = decoder.generate(ids).statistics
        with profile(activities=[activity]) as profiled:
            decoder.generate(ids)
        steps, ms = total.target_forwards, 0.001 / total.target_forwards
        kernels = [
            (getattr(k, spent) * ms, k.count / steps, k.key) for k in profiled.key_averages()
        ]
        kernels.sort(reverse=True)
        found = [(key[:60], calls, own) for own, calls, key in kernels[:KERNELS]]
        found += [
            ("all kernels", None, sum(own for own, _, _ in kernels)),
            ("a step by the clock, prefill left out", None, 1000 * total.step_seconds),
        ]
        rows += [
            {"method": name, "kernel": key, "calls a step": calls,
             "ms a step, prefill included": own}
            for key, calls, own in found
        ]  # fmt: skip
    return rows


def _prompts(target: Target) -> list[list[int]]:
    return [render_prompt(target.tokenizer, text) for text in PROMPTS]


def _decoder(target: Target, drafter, sampling: Sampling, limits: Limits) -> Decoder:
    if drafter is None:
        return PlainDecoder(target, sampling, limits)
    return Engine(target, drafter, sampling, limits, 12)


def _generate(target: Target, ids: list[int], most: int) -> list[int]:
    """The greedy answer of transformers' own `generate`."""
    given = torch.tensor([ids], device=target.device)
    mask, end = torch.ones_like(given), next(iter(target.end_ids))
    output = target.model.generate(
        given, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=end
    )
    return output[0, len(ids) :].tolist()


def _show(title: str, rows: Rows) -> None:
    """Print a table with the columns of the first row."""
    lines = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(map(str.ljust, line, widths)), flush=True)


def _shipped(device: str, dtype: str = "float32") -> Target:
    return load_target("slipstream/small-target", dtype, device, packed=False)


def _large(size: str, device: str, dtype: str) -> tuple[Target, StreamingSpeculator]:
    """The target at `size`, fused as a GPU's users get it, and its streams; 'small' for the shipped
    ones."""
    small = _shipped(device)
    streams = load_speculator("slipstream/small-streaming", small)
    if size == "small":
        large, streams = _shipped(device, dtype), streams.to(DTYPES[dtype])
    else:
        large = enlarged_target(small, SHAPES[size][0], DTYPES[dtype])
        streams = enlarged_speculator(streams, small, large)
    fuse_linears(large.family.layers, large.family.fused)
    return large, streams


def main(arguments: list[str] | None = None) -> dict[str, object]:
    """Run all parts for which there is time; what each found is printed and written at once."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = ("small", *SHAPES)
    parser.add_argument("--size", choices=sizes, default="llama3_8b" if on_gpu else "small")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8, help="after these no part begins")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.json"))
    given = parser.parse_args(arguments)
    device, modes = ("cuda", ["off", "auto"]) if on_gpu else ("cpu", ["off"])
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    found: dict[str, object] = {
        "device": name, "torch": torch.__version__, "size": given.size, "dtype": given.dtype
    }  # fmt: skip
    started, skipped, failed = time.perf_counter(), [], []
    size = COPIED if on_gpu else COPIED // 64
    lengths = (512, 2048) if on_gpu else (128,)
    large = cache(lambda: _large(given.size, device, given.dtype))

    def compiled() -> tuple[Target, StreamingSpeculator]:
        target, streams = large()
        return compile_target(target, "auto"), streams

    bandwidth = cache(lambda: measured_bandwidth(torch.device(device), size, 10))
    parts: dict[str, Callable[[], Rows]] = {
        "Exact answers, float32": lambda: list(exactness(device, modes)),
        "Memory": lambda: [{"bandwidth, GB/s": bandwidth() / 1e9}],
        "Decoding": lambda: decoding(*large(), modes, given.repeats, bandwidth()),
        "Cost of sampling": lambda: sampling_costs(*compiled(), given.repeats),
        "Cost of rows": lambda: rows_of(compiled()[0]),
        "Time of a step": lambda: time_line(*compiled()),
        "Training step": lambda: training_steps(large()[0], lengths, given.repeats),
    }
    for title, part in parts.items():
        if time.perf_counter() - started >= 60 * given.minutes:
            skipped.append({"part": title})
            continue
        try:
            found[title] = part()
        except Exception as error:  # the device may not come again: the other parts run
            traceback.print_exc()
            found[title] = [{"failed": f"{type(error).__name__}: {error}"[:200]}]
            failed.append(title)
        if any(row.get("exact") == "no" for row in found[title]):
            failed.append(title)
        _show(f"{title} ({time.perf_counter() - started:.0f} s since the start)", found[title])
        write_json(given.out, found)
    if skipped:
        found["Skipped for want of time"] = skipped
        _show("Skipped for want of time: give more --minutes", skipped)
        write_json(given.out, found)
    if failed:
        sys.exit(f"error: failed, as said above: {', '.join(failed)}")
    return found


if __name__ == "__main__":
    main()
