"""A comparison as a result: rows of the record, tables and a panel for each prompt set, answers."""

import json
from collections.abc import Iterator

from slipstream.data.rows import grouped
from slipstream.evaluation.comparison import Run, expected_answers, scores
from slipstream.evaluation.prompts import Prompt
from slipstream.results.record import Plot, Result, Rows, bounded


def comparison_result(records: Rows, runs: list[Run], prompts: list[Prompt]) -> Result:
    """What a comparison found; speeds are drawn against transformers, else against plain decoding,
    else as they are."""
    bases = (f"speedup_vs_{name}" for name in ("transformers", "plain"))
    base = next((name for name in bases if records[0][name] is not None), None)
    plot = Plot(
        "method",
        (base or "tokens_per_second",),
        panel="prompt_set",
        kind="bar",
        interval={base: (f"{base}_low", f"{base}_high")} if base else {},
        label="tau",
        reference=1.0 if base else None,
        order=True,
    )
    lines = [line for run in runs for line in _answer_lines(run, runs, prompts)]
    files = {"answers.jsonl": "".join(json.dumps(line) + "\n" for line in lines)}
    return Result("Comparison", records, (plot,), shown=tables_of(records), files=files)


def tables_of(records: Rows) -> dict[str, Rows]:
    """A table for each prompt set, without the columns that have nothing to say."""
    sets = grouped(records, lambda record: record["prompt_set"])
    return {name: telling(list(map(columns, own))) for name, own in sets.items()}


def telling(rows: Rows) -> Rows:
    """Rows without the columns that have nothing to say."""
    told = [column for column in rows[0] if any(row.get(column) not in (None, "") for row in rows)]
    return [{column: row.get(column) for column in told} for row in rows]


def columns(record: dict) -> dict[str, object]:
    """A record as tables show it."""
    steps, measured = max(1, record["target_forwards"]), record["seconds_verify"] > 0
    shares = (record["seconds_draft"], record["seconds_verify"], record["seconds_overhead"])
    split = "/".join(f"{100 * share / record['seconds']:.0f}" for share in shares) + " %"
    return {
        "method": record["method"],
        "prompts": record["num_prompts"],
        "tokens/s": record["tokens_per_second"],
        "vs transformers": _bounded(record, "speedup_vs_transformers"),
        "vs plain": _bounded(record, "speedup_vs_plain"),
        "tau": _bounded(record, "tau"),
        "accepted": record["mean_accepted_draft_tokens"],
        "forwards": record["target_forwards"],
        "rows": record["target_rows"] / steps if record["target_rows"] else None,
        "draft/verify/overhead": split if measured else None,
        "draft ms": 1000 * record["seconds_draft"] / steps if measured else None,
        "store MB": record["store_bytes"] / 1e6 if record["store_bytes"] else None,
        "ROUGE-Lsum": record["rouge_lsum"],
        "exact match": record["exact_match"],
        "identical": f"{record['identical']}/{record['num_prompts']}",
        "exact": "yes" if record["exact"] else "no",
        "details": record["details"],
    }


def _bounded(record: dict, name: str) -> str | None:
    return bounded(*(record[name + end] for end in ("", "_low", "_high")))


def _answer_lines(run: Run, runs: list[Run], prompts: list[Prompt]) -> Iterator[dict[str, object]]:
    """One record per prompt: the answer, its scores and what it took."""
    measured, expected = scores(run.generations, prompts), expected_answers(run, runs)
    for place, (prompt, answer) in enumerate(zip(prompts, run.generations, strict=True)):
        yield {
            "method": run.method,
            "prompt_set": prompt.source,
            "prompt": prompt.text,
            "answer": answer.text,
            "finished": answer.finished,
            "identical": answer.ids == expected[place],
            "tokens": answer.statistics.tokens,
            "seconds": answer.statistics.seconds,
            "tau": answer.statistics.tau,
            "accepted": answer.accepted,
            **{name: each and each[place] for name, each in measured.items()},
        }
