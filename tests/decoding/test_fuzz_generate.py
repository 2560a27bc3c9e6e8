"""A sample of what `make fuzz` runs: random cases, answered as transformers' `generate` does."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from tests.decoding.fuzz_generate import CASES, check, main

from slipstream.decoding import engine


@settings(max_examples=25)
@given(CASES)
def test_random_cases_are_answered_as_generate_does(case):
    check(case)


@pytest.mark.exhaustive
def test_many_random_cases_are_answered_as_generate_does():
    main(400)


def test_a_step_that_accepts_too_much_is_found(monkeypatch):
    """The control: the fuzz is able to fail."""
    monkeypatch.setattr(engine, "follow", lambda trees, choices: trees.depths.argmax(-1))

    @settings(max_examples=50, phases=[Phase.generate])
    @given(
        CASES.map(lambda case: replace(case, drafter="random trees", budget=6, max_new_tokens=12))
    )
    def run(case):
        check(case)

    with pytest.raises(AssertionError):
        run()
