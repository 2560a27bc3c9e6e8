"""GammaTune's cost model (section 3, Eqs. 1 to 6) beside what drafts of fixed lengths took."""

from slipstream.data.rows import grouped
from studies import Rows

TITLE = "Cost model (GammaTune, Eqs. 1 to 6)"


def cost(gamma: int, alpha: float, c: float) -> float:
    """Eq. 6 for a token, in forwards of the draft model: (c + gamma) / (alpha gamma + 1).

    gamma: drafted tokens a step; alpha: share of them that is accepted; c: cost of a target's call
    in forwards of the draft model (Eq. 1).

    >>> cost(gamma=4, alpha=0.5, c=6), cost(gamma=0, alpha=0.5, c=6)
    (3.3333333333333335, 6.0)
    """
    return (c + gamma) / (alpha * gamma + 1)


def cost_model(runs: list[tuple[dict, list[dict]]]) -> dict[str, Rows]:
    """A row for each prompt set and length of the method `fixed`: alpha and c as measured, the
    speed over plain decoding that Eq. 6 foresees, and the measured one, prefills left out.

    The paper takes verification for as dear as a call for one token; "c" is that, from plain
    decoding, "c, verifying" is of the calls that verified. runs: each one's settings, of which the
    first is the length, and records.
    """
    rows = []
    for settings, records in runs:
        gamma = next(iter(settings.values()))
        for name, of_set in grouped(records, lambda record: record["prompt_set"]).items():
            methods = {record["method"]: record for record in of_set}
            plain, own = methods["plain"], methods["fixed"]
            drafted = own["target_rows"] - own["target_forwards"]
            accepted = sum(int(n) * count for n, count in own["accepted_lengths"].items())
            # an answer's first drafted token belongs to the prefill
            draft = own["seconds_draft"] / max(1, drafted - own["num_prompts"])
            alpha = accepted / drafted
            calls = [each["seconds_verify"] / each["target_forwards"] for each in (plain, own)]
            c, verifying = (call / draft for call in calls)
            rows.append(
                {
                    "prompts": name,
                    "gamma": gamma,
                    "alpha": alpha,
                    "c": c,
                    "c, verifying": verifying,
                    "Eq. 6": c / cost(gamma, alpha, c),
                    "Eq. 6, verifying": c / cost(gamma, alpha, verifying),
                    "measured": _decoding(plain) / _decoding(own),
                }
            )
    return {TITLE: rows}


def _decoding(record: dict) -> float:
    """Seconds of a token after the prefill."""
    tokens = record["tokens"] - record["num_prompts"]
    return (record["seconds"] - record["seconds_prefill"]) / tokens
