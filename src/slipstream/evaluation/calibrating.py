"""What `calibrate=true` does: measure a drafter at several sizes, keep the best, show curves."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from omegaconf import DictConfig, OmegaConf

from slipstream.configuration import build, recorded
from slipstream.core.files import check_writable, write_json
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Budget, Count, Len, Settings, Text
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.calibrated import calibration_path
from slipstream.decoding.calibration import Calibration, Curve, Point, calibrate
from slipstream.results.record import Plot, Result, Rows, environment
from slipstream.results.writer import show, write
from slipstream.targets.target import Target

FITTED = ", fitted"
MEASURES = "ms/step", "tau", "tokens/s"


@dataclass
class Calibrating(Settings):
    """budgets: sizes that are measured, ascending; num_prompts: warm-up prompts; repeats: how often
    each is decoded; folder: where what was found is kept."""

    section = "calibration"
    budgets: Annotated[Sequence[Budget], Len(1)]
    num_prompts: Count
    repeats: Count
    folder: Text

    def run(self, config: DictConfig, target: Target, sampling: Sampling, limits: Limits) -> Rows:
        """Calibrate the drafter of an `Infer` on validation prompts, keep the choice, print and
        write what was measured."""
        drafter, content = build(config.drafter), recorded(config)
        data = build(OmegaConf.merge(config.data, {"split": "validation"}))
        prompts = data.take_for(target, limits, self.num_prompts)
        check_writable(Path(self.folder), "calibration.folder")
        kept = calibration_path(self.folder, target, drafter, sampling)
        variants = drafter.variants(drafter.attach(target))
        ids = [render_prompt(target.tokenizer, prompt.text) for prompt in prompts]
        found = calibrate(target, variants, ids, sampling, limits, self.budgets, self.repeats)
        result = calibration_result(found)
        show(result)
        speedup = f"{found.speedup:.2f}x plain decoding, measured once more"
        best = f"best: {found.way} with {found.budget} nodes, {speedup}"
        none = "no size beats plain decoding: budget=auto decodes plainly"
        print(none if found.plain else best)
        write_json(kept, asdict(found))
        print(f"kept in {kept}, for budget=auto")
        facts = environment(target, content.get("drafter"))
        write(Path(config.output_dir), result, content, facts)
        return result.rows


def calibration_result(found: Calibration) -> Result:
    """A row for plain decoding, and one for each way and size, with the fitted curves."""
    plain = Point(1, found.plain_seconds, 1.0)
    rows = [_row("plain", plain, plain) | {name + FITTED: None for name in MEASURES}]
    for way, points in found.points.items():
        curve = Curve(tuple(points))
        for point in points:
            fitted = _row(way, curve.at(point.budget), plain)
            rows.append(_row(way, point, plain) | {n + FITTED: fitted[n] for n in MEASURES})
    panels = tuple((name, name + FITTED) for name in MEASURES)
    return Result("Sizes of drafts", rows, (Plot("nodes", panels, hue="way"),))


def _row(way: str, point: Point, plain: Point) -> dict[str, object]:
    return {
        "way": way,
        "nodes": point.budget,
        "ms/step": 1000 * point.seconds,
        "tau": point.tau,
        "tokens/s": point.rate,
        "vs plain": point.rate / plain.rate,
    }
