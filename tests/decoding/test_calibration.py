"""Calibration: the best size of known curves is found, kept, picked up; drift is noticed."""

import gc
import math
import weakref
from dataclasses import asdict, replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from tests.commands import refused
from tests.drafters import untrained
from tests.tiny import tiny_speculator, tiny_target

from slipstream.core.files import write_json
from slipstream.core.sampling import Sampling
from slipstream.data.datastore import TrainingTexts
from slipstream.decoding import calibrated, calibration
from slipstream.decoding.answer import Limits
from slipstream.decoding.calibrated import calibration_path, described, kept_calibration
from slipstream.decoding.calibration import (
    Calibration,
    Curve,
    Drift,
    Point,
    calibrate,
    candidates,
    chosen,
    fastest,
    measured,
)
from slipstream.decoding.engine import Engine
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.acceptance_length import AnyRejected
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.drafters.rest import Rest
from slipstream.drafters.streaming import Streaming
from slipstream.drafters.suffix_decoding import SuffixDecoding
from slipstream.drafters.suffixes import Retrieval
from slipstream.speculators.checkpoint import save_speculator

BUDGETS = [2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64]


def tau(budget: float) -> float:
    return 3.5 - 2.5 * budget**-0.5


def seconds(budget: float) -> float:
    """Flat as far as 16 rows, then steep."""
    return 0.010 + 0.0006 * max(0.0, budget - 16)


def points(noise: float = 0.0) -> list[Point]:
    chance = np.random.default_rng(0)
    return [
        Point(
            budget,
            seconds(budget) * (1 + noise * chance.standard_normal()),
            tau(budget) * (1 + noise * chance.standard_normal()),
        )
        for budget in BUDGETS
    ]


def once(points: dict[str, list[Point]], plain: Point) -> Calibration:
    """What is chosen where a second measurement says what the first one did."""
    again = {(way, each.budget): each for way, own in points.items() for each in own}
    return chosen(points, plain, again)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_size_found_is_within_five_percent_of_the_best(noise):
    best = max(tau(budget) / seconds(budget) for budget in range(2, 65))
    found = Curve(tuple(points(noise))).best().budget
    assert tau(found) / seconds(found) > 0.95 * best


def test_the_curves_go_through_the_points_where_they_can():
    curve = Curve(tuple(points()))
    for point in points():
        assert curve.seconds(np.array([point.budget]))[0] == pytest.approx(point.seconds, rel=0.05)
        assert curve.tau(np.array([point.budget]))[0] == pytest.approx(point.tau, rel=0.08)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_points_are_enough(count):
    assert Curve(tuple(points()[:count])).best().budget in range(2, BUDGETS[count - 1] + 1)


def test_plain_decoding_is_chosen_where_no_size_beats_it():
    plain = Point(1, 0.008, 1.0)
    slow = [Point(each.budget, 10 * each.seconds, each.tau) for each in points()]
    found = once({"slow": slow}, plain)
    assert found.plain and found.budget == 1 and found.speedup == 1.0
    found = once({"slow": slow, "fast": points()}, plain)
    assert found.way == "fast" and not found.plain and found.speedup > 2


def test_the_fitted_and_the_measured_best_are_measured_once_more():
    """Tokens jump at twelve nodes, as Lookahead's do: the fit promises what no size holds."""
    steps = [Point(each.budget, 0.01, 1.2 + 0.8 * (each.budget >= 12)) for each in points()]
    fitted, best = fastest({"steps": steps})[1].budget, 12
    assert {*candidates({"steps": steps})} == {("steps", fitted), ("steps", best)}
    assert fitted != best
    again = {("steps", fitted): Point(fitted, 0.02, 2.0), ("steps", best): Point(best, 0.011, 2.0)}
    found = chosen({"steps": steps}, Point(1, 0.01, 1.0), again)
    assert (found.budget, found.seconds, found.speedup) == (best, 0.011, pytest.approx(2 / 1.1))
    slow = {size: Point(size[1], 0.03, 2.0) for size in again}
    assert chosen({"steps": steps}, Point(1, 0.01, 1.0), slow).plain


@pytest.mark.parametrize("kept", [0, 1000])
def test_a_drafter_that_learns_is_measured_as_it_is_in_use(kept):
    """What one size taught it the next one does not find; what a prompt did, the next prompt."""
    target, asked = tiny_target(), []
    attached = SuffixDecoding(4, 2.0, 0.05, kept).attach(target)

    class Seen(Engine):
        def generate(self, prompt_ids, seed=0, callback=None):
            asked.append((self.budget, prompt_ids[0], len(attached.kept[-1]) > 0))
            return super().generate(prompt_ids, seed, callback)

    engines = {("", g): Seen(target, attached, Sampling(), Limits(6), g) for g in (2, 4)}
    measured(engines, [[7, 8], [1, 2]], 1)
    turns = [(2, 7), (2, 1), (4, 7), (4, 1)] if kept else [(2, 7), (4, 7), (2, 1), (4, 1)]
    assert [each[:2] for each in asked[2:]] == turns  # after a warm-up
    assert [each[2] for each in asked[2:]] == [bool(kept) and first == 1 for _, first in turns]


def test_what_was_calibrated_is_found_again(tmp_path):
    path, found = tmp_path / "kept" / "key.json", once({"a": points()}, Point(1, 0.01, 1.0))
    write_json(path, asdict(found))
    assert kept_calibration(path) == found
    assert "calibrate=true" in refused(lambda: kept_calibration(path.with_name("other.json")))
    path.write_text("{")
    assert "calibrate=true" in refused(lambda: kept_calibration(path))


def corpus_of(path: str) -> Retrieval:
    return Retrieval(TrainingTexts(path, None, None, None, 1.0, "kept", 0), 4, 8, 4)


@pytest.mark.parametrize(
    "wrong",
    [{"budget": 0}, {"budget": None}, {"seconds": math.nan}, {"points": None}, {"another": 1}],
)
def test_a_calibration_of_other_values_is_refused(tmp_path, wrong):
    path, found = tmp_path / "key.json", once({"a": points()}, Point(1, 0.01, 1.0))
    write_json(path, asdict(found) | wrong)
    assert "cannot be read" in refused(lambda: kept_calibration(path))


def test_keys_tell_apart_models_drafters_and_sampling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "other"):
        (tmp_path / f"{name}.jsonl").touch()
    one, other = tiny_target(), tiny_target("opt")
    keys = [
        calibration_path("", target, drafter, sampling)
        for target, drafter, sampling in (
            (one, PromptLookup(2, 3), Sampling()),
            (one, PromptLookup(2, 4), Sampling()),
            (one, PromptLookup(2, 3, untrained.gammatune()), Sampling()),
            (one, PromptLookup(2, 3), Sampling(1.0)),
            (other, PromptLookup(2, 3), Sampling()),
            (one, untrained.unispec(), Sampling()),
            (one, untrained.unispec(keep=True), Sampling()),
            (one, untrained.lookahead(), Sampling()),
            (one, untrained.lookahead(window=3), Sampling()),
            (one, untrained.spectra(), Sampling()),
            (one, untrained.spectra(candidates=3), Sampling()),
            (one, Rest(corpus_of("one.jsonl")), Sampling()),
            (one, Rest(corpus_of("other.jsonl")), Sampling()),
            (one, DraftModel(one, 3, AnyRejected("one", 0.5)), Sampling()),
            (one, DraftModel(one, 3, AnyRejected("other", 0.5)), Sampling()),
            (one, untrained.combined(tiny_speculator(one)), Sampling()),
            (one, PromptLookup(2, 3), Sampling()),
        )
    ]
    assert len(set(keys)) == len(keys) - 1 and keys[0] == keys[-1]


def test_keys_tell_apart_what_was_trained_into_the_same_folder(tmp_path):
    """A speculator that is trained anew has to be calibrated anew."""
    target, keys = tiny_target(), []
    for number in (1.0, 2.0, 1.0):
        speculator = tiny_speculator(target)
        with torch.no_grad():
            next(speculator.parameters()).fill_(number)
        save_speculator(tmp_path / "model", speculator, target, 8, "")
        for folder in (tmp_path / "model", str(tmp_path / "model")):
            keys.append(calibration_path("", target, Streaming(folder, "fused", 2), Sampling()))
    assert len(set(keys)) == 2 and keys[:2] == keys[4:]


@pytest.mark.parametrize(("best", "tried"), [(2, []), (17, [6, 9, 14, 21]), (10**6, [6, 512])])
def test_larger_sizes_are_tried_as_long_as_they_pay(best, tried, monkeypatch):
    """A step takes 1 s up to `best` nodes, and ever longer beyond; every node is a token more."""

    def measured(decoders, prompts, repeats):
        return {
            (way, budget): [Statistics(1, budget + 1, 1, max(1.0, (budget / best) ** 2))]
            for way, budget in decoders
        }

    monkeypatch.setattr(calibration, "measured", measured)
    target = tiny_target()
    lookup = {"lookup": PromptLookup(2, 8).attach(target)}
    found = calibrate(target, lookup, [[1, 2]], Sampling(), Limits(4), [2, 4], 1)
    sizes = [point.budget for point in found.points["lookup"]]
    assert sizes[:2] == [2, 4] and sizes == sorted(sizes)
    if tried[-1:] == [512]:
        assert sizes[2] == 6 and sizes[-1] == 512
    else:
        assert sizes[2:] == tried


def test_calibrating_measures_every_size():
    target, prompts = tiny_target(), [[1, 2, 3], [4, 5, 6, 4, 5]]
    drafters = {"unispec": untrained.unispec(), "lookup": PromptLookup(2, 8)}
    drafters = {name: each.attach(target) for name, each in drafters.items()}
    limits = Limits(12)
    found = calibrate(target, drafters, prompts, Sampling(), limits, [2, 4, 8], 1)
    assert found.points.keys() == drafters.keys()
    assert [point.budget for point in found.points["unispec"]][:3] == [2, 4, 8]
    assert all(p.seconds > 0 and p.tau >= 1 for own in found.points.values() for p in own)
    for budgets in ([], [1, 2], [4, 2], [2, 2]):
        message = refused(
            lambda budgets=budgets: calibrate(
                target, drafters, prompts, Sampling(), limits, budgets, 1
            )
        )
        assert message.startswith("calibration.budgets: ")


def test_drafts_are_compared_with_what_decodes_where_none_pay(monkeypatch):
    """In shared mode without drafts: the target itself would give other answers."""
    compared = []

    def measured(decoders, prompts, repeats):
        compared.append(decoders["plain", 1])
        return {each: [Statistics(1, 2, 1, 1.0)] for each in decoders}

    monkeypatch.setattr(calibration, "measured", measured)
    target = tiny_target()
    for mode in ("lossless", "shared"):
        drafter = Streaming(tiny_speculator(target, mode=mode), "fused", 2)
        attached = drafter.attach(target)
        ways, compared = drafter.variants(attached), []
        calibrate(target, ways, [[1, 2]], Sampling(), Limits(4), [2, 4], 1)
        assert {each.target for each in compared} == {attached.target}
    assert attached.target is not target


def test_keys_tell_apart_processors_and_layouts(monkeypatch):
    target, drafter = tiny_target(), PromptLookup(2, 3)
    monkeypatch.setattr(calibrated, "device_name", lambda device: "one")
    keys = {calibration_path("", target, drafter, Sampling(zero)) for zero in (0, 0.0)}
    monkeypatch.setattr(calibrated, "device_name", lambda device: "other")
    keys.add(calibration_path("", target, drafter, Sampling()))
    monkeypatch.setattr(calibrated, "is_packed", lambda model: True)
    keys.add(calibration_path("", target, drafter, Sampling()))
    assert len(keys) == 3


def test_what_was_calibrated_is_found_where_another_layout_is_now_the_faster(tmp_path, monkeypatch):
    """That is measured at each start, so two runs may differ."""
    target, drafter = tiny_target(), PromptLookup(2, 3)
    given = tmp_path, target, drafter, Sampling()
    attached = drafter.attached(target)
    found = Calibration("PromptLookup", 4, 0.1, 1.5, 0.1, {})
    write_json(calibration_path(*given), asdict(found))
    monkeypatch.setattr(calibrated, "is_packed", lambda model: True)
    ask = partial(calibrated.calibrated_decoder, *given[:3], attached, Sampling(), Limits(4))
    assert ask()[0] == found
    own = replace(found, budget=2)
    write_json(calibration_path(*given), asdict(own))
    assert ask()[0] == own


def test_a_drafter_that_was_used_can_be_described():
    """As it was before: what is made for a target is no part of the settings."""
    target = tiny_target()
    drafter = Streaming(tiny_speculator(target), "fused", 2)
    before = described(drafter)
    Engine(target, drafter.attached(target), Sampling(), Limits(2), 4).generate([1, 2])
    assert described(drafter) == before and before.keys() == {"Streaming"}
    drafter = Rest(untrained.retrieval([[3, 5, 8]]))
    before = described(drafter)
    drafter.attached(target)
    assert described(drafter) == before


def test_a_calibrated_way_is_made_once():
    """What was captured for it serves later calls."""
    target = tiny_target()
    drafter = Streaming(tiny_speculator(target), "auto", 2)
    attached = drafter.attached(target)
    assert drafter.variants(attached)["fused"] is drafter.variants(attached)["fused"]


def test_what_was_made_for_a_drafter_goes_with_it():
    drafter = PromptLookup(2, 3)
    drafter.attached(tiny_target())
    known = weakref.ref(drafter)
    del drafter
    gc.collect()
    assert known() is None


@pytest.mark.parametrize(("factor", "noticed"), [(1.0, 0), (1.2, 0), (1.3, 1), (0.7, 1)])
def test_a_step_that_takes_another_time_than_calibrated_is_noticed_once(factor, noticed, capsys):
    drift = Drift(0.010)
    for _ in range(20):
        drift.watch([Statistics(1, 30, 10, 0.10 * factor + 0.5, {"prefill": 0.5})])
    said = capsys.readouterr().out
    assert len(said.splitlines()) == noticed
    if said:
        assert f"{abs(factor - 1):.0%}" in said and "calibrate=true" in said


def test_sizes_of_later_rounds_are_held_against_plain_decoding_of_their_own(monkeypatch):
    """The machine is twice as slow from the second round on: nothing changes."""
    found = []
    for slower in (1.0, 2.0):
        rounds = count()

        def measured(decoders, prompts, repeats, rounds=rounds, slower=slower):
            factor = slower if next(rounds) else 1.0
            found = {}
            for way, budget in decoders:
                steps = 1000 // min(budget, 20)
                seconds = factor * steps * (1 + budget / 100)
                found[way, budget] = [Statistics(0, 1000, steps, seconds)]
            return found

        monkeypatch.setattr(calibration, "measured", measured)
        target = tiny_target()
        drafter = PromptLookup(2, 3)
        ways = drafter.variants(drafter.attach(target))
        found.append(calibrate(target, ways, [[1, 2]], Sampling(), Limits(4), [2, 4], 1))
        assert next(rounds) > 2
    first, second = found
    assert (second.way, second.budget) == (first.way, first.budget) and first.budget > 4
    assert second.speedup == pytest.approx(first.speedup)
