"""What was calibrated, on disk, and what `budget=auto` makes of it: found again by the device, the
model, the drafter and the sampling that it was measured with."""

import json
from contextlib import suppress
from pathlib import Path

import torch

from slipstream.assets import locate
from slipstream.core.device import device_name
from slipstream.core.errors import InputError, first_sentence
from slipstream.core.files import key_of, sum_of
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Settings
from slipstream.decoding.answer import Limits
from slipstream.decoding.calibration import Calibration, Point, undrafted
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.engine import Engine
from slipstream.drafters.base import Attached, Drafter
from slipstream.speculators.checkpoint import WEIGHTS
from slipstream.targets.packed import is_fused, is_packed
from slipstream.targets.target import Target


def kept_calibration(path: Path) -> Calibration:
    """What was calibrated and written to `path`; `InputError` where nothing was."""
    if not path.is_file():
        raise InputError(
            "budget: nothing was calibrated for this device, model, dtype, sampling and drafter; "
            "run the same command with calibrate=true first, or give a number"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["points"] = {
            way: [Point(**point) for point in points] for way, points in content["points"].items()
        }
        return Calibration(**content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"budget: {path} cannot be read ({first_sentence(error)}); remove it, and run the "
            "same command with calibrate=true, or give a number"
        ) from error


def calibration_path(
    folder: str | Path,
    target: Target,
    drafter: Drafter,
    sampling: Sampling,
    other_layout: bool = False,
) -> Path:
    """Where in `folder` it is kept what was calibrated for these; the name tells apart device,
    model, dtype, layout, sampling and drafter, as `described`. other_layout: as if the weights of
    the target were reordered where they are not, and the other way round."""
    device, compiled = target.device, target.compiled is not None
    threads = torch.get_num_threads() if device.type == "cpu" else None
    *model, laid_out = described(target)
    model = [*model, laid_out != other_layout]
    settings = [model, target.num_parallel, compiled, described(sampling)]
    # 1 and 1.0 are one setting.
    same = json.loads(json.dumps([settings, described(drafter)]), parse_int=float)
    return Path(folder) / f"{key_of(device_name(device), threads, *same)}.json"


def described(part: object, within: tuple[int, ...] = ()) -> object:
    """What a component was made with, as JSON: its class and all that it keeps; of the folder of a
    speculator also which weights it has now; of what is neither ours nor settings, and of what it
    is a part of itself, the class alone."""
    if isinstance(part, Target):
        laid_out = is_packed(part.model) or is_fused(part.model)
        return [part.fingerprint or part.name, str(part.dtype), laid_out]
    if isinstance(part, dict):
        return {str(name): described(each, within) for name, each in part.items()}
    if isinstance(part, list | tuple):
        return [described(each, within) for each in part]
    if isinstance(part, str | Path):
        with suppress(OSError):  # of a text that is too long for a path
            weights = Path(locate(part)) / WEIGHTS
            return sum_of(weights) if weights.is_file() else str(part)  # however it is spelled
        return str(part)
    if part is None or isinstance(part, int | float | bool):
        return part
    ours = type(part).__module__.partition(".")[0] == __name__.partition(".")[0]
    told = ours or isinstance(part, Settings)
    kept = vars(part) if told and id(part) not in within and hasattr(part, "__dict__") else {}
    within = (*within, id(part))
    own = {name: each for name, each in kept.items() if not name.startswith("_")}
    return {type(part).__name__: described(own, within)}


def calibrated_decoder(
    folder: str | Path,
    target: Target,
    drafter: Drafter,
    attached: Attached,
    sampling: Sampling,
    limits: Limits,
) -> tuple[Calibration, Decoder]:
    """What was calibrated for `drafter` and is kept in `folder`, and an engine with the size and
    the variant that were best; plain decoding where nothing beat that."""
    asked = folder, target, drafter, sampling
    path, other = calibration_path(*asked), calibration_path(*asked, other_layout=True)
    # Which layout is faster is measured at each start, and where they are close it may change.
    use_other = target.device.type == "cpu" and other.is_file() and not path.is_file()
    found = kept_calibration(other if use_other else path)
    if found.plain:
        return found, undrafted(target, attached, sampling, limits)
    if (chosen := drafter.variants(attached).get(found.way)) is None:
        raise InputError(f"budget: this drafter has no variant {found.way!r}; calibrate=true again")
    return found, Engine(target, chosen, sampling, limits, found.budget)
