"""Methods with `budget=auto`: what was calibrated is what decodes, and a device that drifts is told
of. Time is made up: every look at the clock finds it a little later."""

import time
from dataclasses import asdict, replace

import pytest
from tests.tiny import tiny_target

from slipstream.core.files import write_json
from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.calibrated import calibration_path
from slipstream.decoding.calibration import Calibration, Point, calibrate, chosen
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.evaluation.methods import Speculative

LIMITS = Limits(40)
PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5], [9, 7, 9, 7]]


class Ticking:
    """A clock that goes on by `pace` seconds each time that it is looked at."""

    def __init__(self):
        self.now, self.pace = 0.0, 0.001

    def __call__(self) -> float:
        self.now += self.pace
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Ticking:
    ticking = Ticking()
    monkeypatch.setattr(time, "perf_counter", ticking)
    return ticking


def method_of(target, folder, found: Calibration) -> Speculative:
    path = calibration_path(folder, target, PromptLookup(2, 3), Sampling())
    write_json(path, asdict(found))
    method = Speculative(PromptLookup(2, 3), "auto", calibrations=str(folder))
    method.prepare(target, Sampling(), LIMITS)
    method.generate([PROMPTS[0] * 10], [0])  # a warm-up, which is not measured
    method.forget()
    return method


def test_a_device_that_slows_down_while_it_decodes_is_noticed_once(clock, tmp_path, capsys):
    target = tiny_target()
    drafters = {"PromptLookup": PromptLookup(2, 3).attach(target)}
    found = calibrate(target, drafters, PROMPTS, Sampling(), LIMITS, [2, 4], 1)
    seconds = found.points["PromptLookup"][-1].seconds
    method = method_of(
        target, tmp_path, replace(found, way="PromptLookup", budget=4, seconds=seconds)
    )
    assert "PromptLookup drafts 4 nodes, as calibrated" in capsys.readouterr().out
    for _ in range(8):
        method.generate(PROMPTS[:1], [0])
    assert capsys.readouterr().out == ""
    assert method.details == "calibrated: 4 nodes, PromptLookup"
    clock.pace *= 1.5
    for _ in range(8):
        method.generate(PROMPTS[:1], [0])
    said = capsys.readouterr().out
    assert said.count("calibrate=true again") == 1 and "more than when it was calibrated" in said
    assert method.details.endswith("steps are not as calibrated")


def test_where_no_draft_pays_decoding_is_plain_and_says_so(tmp_path, capsys):
    target = tiny_target()
    slow = {("PromptLookup", 2): Point(2, 0.05, 1.2)}
    method = method_of(target, tmp_path, chosen({}, Point(1, 0.01, 1.0), slow))
    assert "no draft of PromptLookup beats plain decoding" in capsys.readouterr().out
    plain = PlainDecoder(target, Sampling(), LIMITS)
    for prompt in PROMPTS:
        (answer,) = method.generate([prompt], [0])
        assert answer.ids == plain.generate(prompt).ids
        assert answer.statistics.target_forwards == len(answer.ids) - 1
    assert method.details.startswith("calibrated: plain")
