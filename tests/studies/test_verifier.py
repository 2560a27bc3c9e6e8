"""The study of a verifier on unseen prompts: areas under curves that are known."""

import pytest
import torch
from studies.verifier import verifier
from tests.tiny import tiny_target, tiny_tokenizer

from slipstream.core.errors import InputError
from slipstream.data import labelled_drafts
from slipstream.evaluation.prompts import Prompt
from slipstream.results.record import Result, environment
from slipstream.results.writer import write
from slipstream.speculators.checkpoint import save_speculator
from slipstream.speculators.classifiers import SprinterConfig, SprinterVerifier
from slipstream.targets.packed import is_packed, pack_linears

PROMPTS = [
    Prompt(f"w{n} w{n + 1}", source, (f"w{n + 2} w3 w4 w5 w6 w7",))
    for n in range(12)
    for source in ("first", "second")
]


def models():
    pair = tiny_target(), tiny_target(seed=8, hidden_size=16)
    for model in pair:
        model.tokenizer = tiny_tokenizer()
        model.tokenizer.eos_token = "w0"
    return pair


def found_by(tmp_path, target, draft, weight: float) -> Result:
    """The study of a verifier that looks at the token's log-probability alone."""
    made = SprinterVerifier(draft, SprinterConfig(("distribution",), (1.0, 1.5)))
    with torch.no_grad():
        made.linear.weight.zero_()
        made.linear.weight[:, -1] = weight
    save_speculator(tmp_path / str(weight), made, draft, 8, "card")
    folders = str(tmp_path / str(weight)), 8, str(tmp_path / "labels")
    return verifier(target, PROMPTS, draft, *folders, 0)


def test_a_row_for_every_task_and_lambda_with_its_area(tmp_path):
    target, draft = models()
    rows = found_by(tmp_path, target, draft, -1.0).rows
    outputs = "lambda_1", "lambda_1.5"
    names = [(task, name) for task in ("first", "second", "all") for name in outputs]
    assert [(row["task"], row["label"]) for row in rows] == names
    assert [row["prompts"] for row in rows] == [12, 12, 12, 12, 24, 24]
    drafted = [row["drafted tokens"] for row in rows]
    assert drafted[0] > 100 and drafted[4] == drafted[0] + drafted[2]
    # Tokens that the draft model finds likely are those it overrates.
    assert all(0.55 < row["AUROC"] < 1 for row in rows)
    other = found_by(tmp_path, target, draft, 1.0)
    for row, turned in zip(rows, other.rows, strict=True):
        assert turned["AUROC"] == pytest.approx(1 - row["AUROC"], abs=1e-6)
    write(tmp_path, other, {}, environment(target))
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_weights_reordered_for_small_batches_are_no_hindrance(tmp_path):
    target, draft = models()
    target.model.float()
    draft.model.float()
    for each in (target, draft):
        pack_linears(each.model)
        assert is_packed(each.model)
    assert len(found_by(tmp_path, target, draft, -1.0).rows) == 6


def test_labels_are_made_once(tmp_path, monkeypatch):
    target, draft = models()
    rows = found_by(tmp_path, target, draft, -1.0).rows
    monkeypatch.setattr(labelled_drafts, "_labelled", None)
    assert found_by(tmp_path, target, draft, -1.0).rows == rows


def test_prompts_without_references_are_refused(tmp_path):
    target, draft = models()
    with pytest.raises(InputError, match="reads the prompts' references"):
        verifier(target, [Prompt("w1", "first")], draft, "anywhere", 8, str(tmp_path), 0)
