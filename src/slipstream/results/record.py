"""What a run found: rows, how they are shown, and where they come from. One schema for comparisons,
calibrations and studies."""

import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from slipstream.assets import locate
from slipstream.core.device import device_name
from slipstream.core.errors import InputError
from slipstream.speculators.base import speculator_class
from slipstream.speculators.checkpoint import read_config
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.targets.quantized import weight_bytes
from slipstream.targets.target import Target

PACKAGES = ("slipstream", "torch", "transformers", "tokenizers", "lightning", "peft")

Rows = list[dict[str, object]]
"""Lines of a table, all with the same keys."""


@dataclass(frozen=True)
class Plot:
    """Panels that show columns of a table.

    x: column across (of bars: their names); y: the column of each panel, or several that share one;
    hue: column whose values have colours; panel: column each of whose values has a panel; kind:
    'line', 'bar' (bars lie) or 'point'; interval: the columns that bound one of y, by its name;
    label: column that is written beside the bars; log: 'x', 'y' or 'xy'; reference: where a grey
    line is drawn, for the first of y; order: whether bars are sorted, the longest first; table:
    title of the rows, None for the main.
    """

    x: str
    y: tuple[str | tuple[str, ...], ...]
    hue: str | None = None
    panel: str | None = None
    kind: str = "line"
    interval: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    label: str | None = None
    log: str = ""
    reference: float | None = None
    order: bool = False
    table: str | None = None


@dataclass(frozen=True)
class Result:
    """rows: what was found; more: further rows, by title; shown: tables to be read, by title, None
    for `rows` and `more` themselves; files: further texts, by name."""

    title: str
    rows: Rows
    plots: tuple[Plot, ...] = ()
    more: dict[str, Rows] = field(default_factory=dict)
    shown: dict[str, Rows] | None = None
    files: dict[str, str] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, Rows]:
        """What is printed and written as Markdown, by title."""
        return {self.title: self.rows} | self.more if self.shown is None else self.shown


def environment(target: Target | None = None, config: object = None) -> dict[str, object]:
    """Device, dtype and bytes of the weights (of a target), threads, package versions and commit of
    this run; which additions the streams have that its `config` names."""
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    found = {}
    if target is not None:
        found["device"] = device_name(target.device)
        found["dtype"] = str(target.dtype).removeprefix("torch.")
        found["weight_bytes"] = weight_bytes(target.model)
    return found | {
        "streams": additions_named(config),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "commit": commit(),
    }


def additions_named(config: object) -> dict[str, list[str]]:
    """The streaming speculators whose folders a config names, and which additions to the paper they
    were trained with."""
    if isinstance(config, dict | list | tuple):
        parts = config.values() if isinstance(config, dict) else config
        return {name: own for part in parts for name, own in additions_named(part).items()}
    if not isinstance(config, str):
        return {}
    try:
        found = read_config(locate(config))
        own = speculator_class(found["kind"]).Config.from_arguments(found["arguments"])
    except InputError:  # it names something else
        return {}
    return {config: own.additions("deferred")} if isinstance(own, StreamingConfig) else {}


def commit() -> str | None:
    """The commit of the source tree, with '+changes' if it is not clean; None outside of git."""
    here = Path(__file__)
    git = partial(subprocess.run, cwd=here.parent, capture_output=True, text=True, check=True)
    named = "git describe --always --exclude=* --abbrev=12 --dirty=+changes"
    try:
        git(["git", "ls-files", "--error-unmatch", here.name])  # not that of a project around it
        return git(named.split()).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def cell(value: object) -> str:
    """A value as tables show it: three digits, none after the point from 1,000 on.

    >>> [cell(each) for each in (0.123456, 1.0, 12345.6, 1234567, None, "x")]
    ['0.123', '1.00', '12,346', '1,234,567', '-', 'x']
    """
    if isinstance(value, float):
        return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:,.0f}"
    if type(value) is int:
        return f"{value:,}"
    return "-" if value is None else str(value)


def bounded(value: float | None, low: float | None, high: float | None) -> str | None:
    """A ratio, or tau, with half of its 95 % interval, as tables show it; that of a single row is
    none.

    >>> bounded(1.5, 1.25, 1.75), bounded(1.5, 1.5, 1.5)
    ('1.50 ±0.25', '1.50')
    """
    half = "" if low == high else f" ±{(high - low) / 2:.2f}"
    return None if value is None else cell(value) + half
