"""What `infer.py` does: answer one prompt, converse, compare methods, verify exactness, run a
study."""

from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from slipstream.configuration import build, recorded
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.data.rows import Messages
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.statistics import LOW_TAU
from slipstream.drafters.streaming import OWN_MODEL
from slipstream.evaluation.comparison import Run, compare, summarise
from slipstream.evaluation.exactness import Divergence, PlainReference, first_divergence
from slipstream.evaluation.methods import Method, Plain, Speculative, Sprinter, prepared
from slipstream.evaluation.prompts import Prompt
from slipstream.evaluation.report import comparison_result
from slipstream.evaluation.row_cost import row_costs
from slipstream.results.record import environment
from slipstream.results.writer import show, write
from slipstream.targets.target import Target

STUDY_KEYS = ("target", "data", "study", "engine", "num_prompts", "threads")


def showing(method: Method) -> Method:
    """A method that can show an answer while it is decided; `InputError` for another one."""
    if not isinstance(method, Plain | Speculative | Sprinter):
        raise InputError(
            f"{type(method).__name__} cannot show an answer while it is decided; let "
            "another method be the last one"
        )
    return method


def tell(decoder: Decoder, prompt: str | Messages, seed: int) -> Generation:
    """Answer a prompt on the terminal as it is decided, drafted tokens green, others yellow; then
    the numbers of the answer."""
    console = Console()

    def show(_: int, drafted: bool, piece: str) -> None:
        style = "green" if drafted else "bold yellow"
        console.print(Text(piece, style=style), end="", soft_wrap=True)

    generation = decoder.generate(render_prompt(decoder.target.tokenizer, prompt), seed, show)
    numbers, attached = generation.statistics, getattr(decoder, "attached", None)
    console.print(
        f"\n\n{numbers.tokens} tokens in {1000 * numbers.seconds:.0f} ms "
        f"({numbers.tokens_per_second:.0f} tokens/s), {numbers.drafted} of them drafted, "
        f"tau {numbers.tau:.2f}, finished by {generation.finished}; "
        "[green]accepted drafts[/green], [bold yellow]the target's own tokens[/bold yellow]"
        + ("" if decoder.exact else "; approximate: not the target's exact output")
        + (f"; {OWN_MODEL}" if OWN_MODEL in getattr(attached, "details", "") else ""),
        highlight=False,
        soft_wrap=True,
    )
    return generation


def converse(decoder: Decoder, seed: int) -> None:
    """A conversation on the terminal, up to an empty line, "exit" or Ctrl-D; one that outgrows the
    target's context starts anew."""
    console, messages = Console(), []
    while True:
        try:
            text = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text in ("", "exit"):
            return
        messages.append({"role": "user", "content": text})
        try:
            answer = tell(decoder, messages, seed)
        except InputError as error:
            if len(messages) == 1:
                raise
            console.print(f"{error}; the conversation starts anew", markup=False)
            messages = []
            continue
        messages.append({"role": "assistant", "content": answer.text})
        seed += 1


def measure(config: DictConfig, target: Target, sampling: Sampling, limits: Limits) -> list:
    """Compare methods, verify, calibrate or run a study; returns the result records."""
    if config.calibrate:
        return build(config.calibration).run(config, target, sampling, limits)
    output, content = Path(config.output_dir), recorded(config)
    prompts = build(config.data).take_for(target, limits, config.num_prompts)
    if config.study is not None:
        if not sampling.greedy:
            raise InputError(
                "study: a study chooses its own sampling; leave sampling.temperature at 0"
            )
        content = {name: content[name] for name in STUDY_KEYS}
        result = build(config.study, target=target, prompts=prompts)
        show(result)
        write(output, result, content, environment(target, content["study"]))
        return result.rows
    made = {name: partial(build, node) for name, node in config.methods.items() if node is not None}
    methods = prepared("methods", made, target, sampling, limits, config.leave_out_unfit)
    given, ways = (target, sampling, limits), (config.seed, config.batch_size)
    if config.verify:
        return verify_methods(methods, prompts, *given, *ways)
    runs = compare(methods, prompts, *given, config.repeats, *ways)
    records = summarise(runs, prompts, str(target.dtype).removeprefix("torch."))
    result, costs = comparison_result(records, runs, prompts), row_costs(target)
    show(result)
    ratios = ", ".join(f"{n} rows {cost / costs[1]:.2f}x" for n, cost in costs.items() if n > 1)
    print(f"a forward of 1 row takes {1000 * costs[1]:.2f} ms; {ratios}")
    tell_long_answers(runs, methods, prompts, target)
    for record in records:
        said = f"{record['method']} on {record['prompt_set']}"
        ours = isinstance(methods[record["method"]], Speculative | Sprinter)
        drafted = record["drafter"] and record["target_rows"] > record["target_forwards"]
        if drafted and record["tau"] < LOW_TAU:
            print(f"warning: {said} has tau {record['tau']:.2f}: hardly any draft is accepted")
        if ours and record["speedup_vs_plain"] is not None and record["speedup_vs_plain"] < 1:
            speedup = f"{record['speedup_vs_plain']:.2f}x"
            print(f"note: {said} is slower than our plain decoding ({speedup})")
    facts = environment(target, content.get("methods")) | {"seconds_by_rows": costs}
    write(output, result, content, facts)
    return records


def tell_long_answers(
    runs: list[Run], methods: dict[str, Method], prompts: list[Prompt], target: Target
) -> None:
    """Say of each run how many answers end beyond what its speculator was trained on."""
    sizes = [len(render_prompt(target.tokenizer, prompt.text)) for prompt in prompts]
    for run in runs:
        decoder = getattr(methods[run.method], "decoder", None)
        most = getattr(getattr(decoder, "attached", None), "trained_length", None)
        pairs = zip(sizes, run.generations, strict=True)
        beyond = sum(size + len(answer.ids) > most for size, answer in pairs) if most else 0
        if beyond:
            print(
                f"note: {beyond} of {len(sizes)} answers of {run.method} end beyond the {most} "
                "tokens of the longest text that its speculator was trained on; where it drafts "
                "badly there, train it on longer ones (data.max_length)"
            )


def verify_methods(
    methods: dict[str, Method],
    prompts: list[Prompt],
    target: Target,
    sampling: Sampling,
    limits: Limits,
    seed: int,
    batch_size: int,
) -> list[Divergence]:
    """Compare every exact method, which answers `batch_size` prompts at a time, with plain decoding
    of one at a time, and say what differs."""
    if not sampling.greedy:
        raise InputError("verify: compares greedy outputs; set sampling.temperature=0")
    for name, method in methods.items():
        if not method.exact:
            raise InputError(
                f"methods.{name}: it is approximate, so there is nothing to verify; leave it out "
                f"with methods.{name}=null"
            )
    runs = compare(methods, prompts, target, sampling, limits, 1, seed, batch_size)
    found, count = [], len(methods) * len(prompts)
    for run in runs:
        reference = methods[run.method].reference or PlainReference(target, limits)
        for number, answer in enumerate(run.generations):
            ids = render_prompt(target.tokenizer, prompts[number].text)
            divergence = first_divergence(run.method, number, reference, ids, answer.ids)
            if divergence is not None:
                found.append(divergence)
                print(divergence.sentence())
    own = [name for name, method in methods.items() if method.reference]
    ties = sum(each.numeric_tie for each in found)
    print(
        f"verify: {count - len(found)} of {count} answers are identical to plain decoding "
        f"({str(target.dtype).removeprefix('torch.')})"
        + (f", {ties} leave it at a numeric tie, {len(found) - ties} by a bug" * bool(found))
        + (f"; of {', '.join(own)} to that of its own model, which is not the target" * bool(own))
    )
    return found
