"""Ratios between methods of one comparison, answer by answer, with 95 % over prompts:

python -m studies.pairs FOLDER METHOD/OTHER ...

prints how much faster each METHOD was than the OTHER and how many more tokens a step it had, and
writes pairs.md beside the answers that a run of `infer.py` left in FOLDER. Prompts that were
answered in one batch shared its time, so intervals of batches would be too narrow.
"""

import argparse
import json
from pathlib import Path

from slipstream.core.errors import InputError
from slipstream.core.files import write_text
from slipstream.data.rows import grouped
from slipstream.evaluation.comparison import ALL_SETS
from slipstream.evaluation.metrics import ratio_interval
from slipstream.results.writer import markdown, show
from studies import Result, Rows

RATES = {
    "speed": lambda answer: (answer["tokens"], answer["seconds"]),
    "tau": lambda answer: (answer["tokens"] - 1, len(answer["accepted"])),
}
"""What is compared: tokens by second, and tokens after the first by forward of the target."""


def answers_of(folder: Path) -> dict[str, list[dict]]:
    """What a run of `infer.py` left there, by method."""
    lines = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return grouped(map(json.loads, lines), lambda answer: answer["method"])


def pairs(folder: Path, asked: list[str]) -> Result:
    """A row for each pair and prompt set. Raises `InputError` for a folder without answers, for
    batches, and for methods that it has none of."""
    rows: Rows = []
    if not (folder / "answers.jsonl").is_file():
        raise InputError(f"folder: {folder} has no answers.jsonl; give the output_dir of a run")
    config = json.loads((folder / "results.json").read_text(encoding="utf-8"))["config"]
    if config["batch_size"] > 1:
        raise InputError("batch_size: the answers of a batch share its time; run with batch_size=1")
    answers = answers_of(folder)
    for pair in asked:
        names = pair.split("/")
        if len(names) != 2 or not answers.keys() >= set(names):
            raise InputError(f"{pair}: give METHOD/OTHER, two of {', '.join(answers)}")
        sets = dict.fromkeys(answer["prompt_set"] for answer in answers[names[0]])
        for name in [*sets, ALL_SETS] if len(sets) > 1 else sets:
            row: dict[str, object] = {"pair": pair, "prompts": name}
            own = [[a for a in answers[n] if name in (ALL_SETS, a["prompt_set"])] for n in names]
            for what, rate in RATES.items():
                sides = [tuple(zip(*map(rate, each), strict=True)) for each in own]
                row |= {what: None, f"{what}, 95 %": None}
                if all(sum(spent) for _, spent in sides):  # `generate` tells no forwards
                    ratio, low, high = ratio_interval(*sides)
                    row |= {what: ratio, f"{what}, 95 %": f"{low:.2f} to {high:.2f}"}
            rows.append(row)
    return Result("Pairs, answer by answer", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ratios between methods, answer by answer.")
    parser.add_argument("folder", type=Path, help="the output_dir of a comparison")
    parser.add_argument("pairs", nargs="+", metavar="METHOD/OTHER")
    given = parser.parse_args()
    try:
        found = pairs(given.folder, given.pairs)
    except InputError as error:
        parser.error(str(error))
    show(found)
    write_text(given.folder / "pairs.md", markdown(found))
