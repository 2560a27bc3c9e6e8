"""What studies decode with: greedily, 96 tokens; and a drafter that is looked at."""

from collections.abc import Callable, Sequence

from rich.progress import track

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.core.trees import Trees
from slipstream.data.rendering import Sample, render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.base import Attached, Request, Session, Verified
from slipstream.evaluation.metrics import ratio_interval
from slipstream.targets.rows import LayerVisitor
from studies import Prompt, Target

GREEDY, LIMITS = Sampling(), Limits(96)


def divided(prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """The first `count` prompts, to calibrate with, and the others, to be measured.

    Raises `InputError` if none is left to be measured.
    """
    if len(prompts) <= count:
        raise InputError(
            f"num_prompts: study.calibration_prompts takes {count}, which leaves none of "
            f"{len(prompts)} to be measured; give more prompts"
        )
    return prompts[:count], prompts[count:]


def token_ids(target: Target, prompts: list[Prompt]) -> list[list[int]]:
    return [render_prompt(target.tokenizer, prompt.text) for prompt in prompts]


def decode(
    target: Target,
    drafter: Attached,
    budget: int,
    prompts: list[list[int]],
    limits: Limits = LIMITS,
) -> Statistics:
    """Answer token-id `prompts` greedily, one after the other, with drafts of `budget` nodes; the
    sum of their statistics."""
    engine = Engine(target, drafter, GREEDY, limits, budget)
    answers = track(prompts, description="decoding")
    return sum((engine.generate(ids).statistics for ids in answers), Statistics())


class Watched(Attached):
    """`attached` as it is, with further visitors; `watch` is called after each draft."""

    def __init__(
        self,
        attached: Attached,
        watch: Callable[[Session, Verified], None],
        visitors: Sequence[LayerVisitor] = (),
    ):
        super().__init__(attached.target)
        self.attached, self.watch, self.visitors = attached, watch, visitors

    def start(self, requests: Sequence[Request], budget: int) -> Session:
        session = self.attached.start(requests, budget)
        session.visitors = [*self.visitors, *session.visitors]
        draft = session.draft

        def watched(verified: Verified, budget: int) -> Trees:
            trees = draft(verified, budget)
            self.watch(session, verified)
            return trees

        session.draft = watched
        return session


def answered(target: Target, prompts: list[Prompt]) -> list[Sample]:
    """The prompts with the target's own answers."""
    decoder = PlainDecoder(target, GREEDY, LIMITS)
    given = track(token_ids(target, prompts), description="answers")
    return [Sample(ids + decoder.generate(ids).ids, len(ids)) for ids in given]


def speed_ratio(
    ours: list[Statistics], theirs: list[Statistics], prefill: bool
) -> tuple[float, float, float]:
    """Ratio of two rates with its 95 % bounds, answers resampled in pairs; `prefill`: whether the
    prefill and the token that it decides count."""

    def side(numbers: list[Statistics]) -> tuple[list[int], list[float]]:
        if prefill:
            return [each.tokens for each in numbers], [each.seconds for each in numbers]
        seconds = [each.seconds - each.shares.get("prefill", 0.0) for each in numbers]
        return [each.tokens - each.answers for each in numbers], seconds

    return ratio_interval(side(ours), side(theirs))
