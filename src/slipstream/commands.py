"""What the keys of infer.py may be; those of train.py and serve.py stand beside what they run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from slipstream.configuration import Command
from slipstream.core.sampling import Sampling
from slipstream.core.settings import Budget, Count, Ge, Le, Seed, Size, Text
from slipstream.decoding.answer import Limits
from slipstream.drafters.base import Drafter
from slipstream.evaluation.calibrating import Calibrating
from slipstream.evaluation.methods import Method
from slipstream.evaluation.prompts import PromptSets
from slipstream.results.record import Result
from slipstream.targets.compiled import MODES
from slipstream.targets.target import Target


@dataclass
class Engine(Command):
    """compile: as `compile_target` has it."""

    compile: Literal[MODES]


@dataclass(kw_only=True)
class Decoding(Command):
    """Of what decodes."""

    draft: Text = ""
    speculator_path: Text
    seed: Seed
    threads: Annotated[int, Ge(1), Le(1024)] | None
    output_dir: Text
    target: Target
    engine: Engine
    sampling: Sampling
    limits: Limits
    data: PromptSets


@dataclass(kw_only=True)
class Infer(Decoding):
    """Of conf/infer.yaml."""

    given: ClassVar[Mapping] = {"study": ("target", "prompts")}
    budget: Budget | Literal["auto"]
    batch_size: Size
    num_prompts: Count
    repeats: Count
    resume: Literal["auto"] | None
    prompt: str | None
    chat: bool
    verify: bool
    calibrate: bool
    leave_out_unfit: bool
    calibration: Calibrating
    drafter: Drafter | None
    methods: dict[str, Method | None]
    study: Result | None
