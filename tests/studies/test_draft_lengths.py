"""GammaTune's cost model against decoding whose costs are made up."""

import pytest
from studies.draft_lengths import TITLE, cost, cost_model

DRAFT, TARGET = 2.0, 12.0


def record(method: str, steps: int, gamma: int, accepted: int, verifying: float) -> dict:
    """One answer: the prefill's token, then so many steps, each of which drafts `gamma` tokens, the
    first of all within the prefill."""
    tokens, later = 1 + steps + accepted, max(0, gamma * steps - 1)
    parts = {"prefill": 5.0, "draft": DRAFT * later, "verify": verifying * steps}
    return {
        "method": method,
        "prompt_set": "all",
        "num_prompts": 1,
        "tokens": tokens,
        "target_forwards": steps,
        "target_rows": steps * (1 + gamma),
        "accepted_lengths": {0: steps - 1, accepted: 1},
        "seconds": sum(parts.values()),
    } | {f"seconds_{name}": seconds for name, seconds in parts.items()}


def test_what_the_model_foresees_is_what_such_costs_give():
    """10 steps, 4 tokens drafted in each, 20 of 40 accepted; verifying takes a quarter longer."""
    plain, fixed = record("plain", 30, 0, 0, TARGET), record("fixed", 10, 4, 20, 1.25 * TARGET)
    (row,) = cost_model([({"drafter.num_tokens": 4}, [plain, fixed])])[TITLE]
    assert (row["alpha"], row["c"], row["c, verifying"]) == (0.5, 6.0, 7.5)
    assert row["Eq. 6"] == pytest.approx(6 / (10 / 3))
    # of the equation's 10 verifications and 40 drafts one draft is not measured
    measured = row["measured"] * (150 + 39 * DRAFT) / (150 + 40 * DRAFT)
    assert row["Eq. 6, verifying"] == pytest.approx(measured) != row["Eq. 6"]


def test_the_dearer_the_target_the_longer_the_best_draft():
    """Tokens are accepted independently, each with 0.8; alpha falls with gamma."""

    def alpha(gamma: int) -> float:
        return sum(0.8**n for n in range(1, gamma + 1)) / gamma

    best = [min(range(1, 25), key=lambda g: cost(g, alpha(g), c)) for c in (1, 4, 10, 40)]
    assert best == sorted(set(best)) and best[0] == 1 < best[-1]
