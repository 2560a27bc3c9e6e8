"""Studies of the papers' tables and figures: each is a function of a target, prompts and settings
that returns a result."""

from slipstream.evaluation.prompts import Prompt
from slipstream.results.record import Plot, Result, Rows
from slipstream.targets.target import Target

__all__ = ["Plot", "Prompt", "Result", "Rows", "Target"]
