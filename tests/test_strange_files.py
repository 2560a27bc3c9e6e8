"""Whatever bytes stand in a file: it opens, or is refused with one sentence that names it.

Each file of each kind is fuzzed alone, the others of its folder are whole.
"""

import gzip
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import save_tiny_target, tiny_speculator, tiny_tokenizer
from transformers import logging

from slipstream.core.errors import InputError
from slipstream.core.files import line_of, save_tensors, write_json
from slipstream.core.resuming import Part, journal
from slipstream.data.answers import Answered, Answerer, Question, kept_answers
from slipstream.data.regeneration import Conversation
from slipstream.data.rows import read_rows, text_of
from slipstream.decoding.calibrated import kept_calibration
from slipstream.decoding.calibration import Calibration, Point
from slipstream.drafters.suffixes import SuffixStore
from slipstream.speculators.checkpoint import load_speculator, save_speculator
from slipstream.targets.loading import load_target
from slipstream.targets.lora import LoraSettings, save_lora, with_lora
from slipstream.training.resuming import Finished, state_of
from slipstream.training.tracking import Metrics

ROW = json.dumps({"messages": [{"role": "user", "content": "w1"}], "system": "w2"})
FEW, MANY = 15, 800
"""Examples of each file in `make test`, and in `make test-all`."""


class All7(Answerer):
    """Answers everything with token 7."""

    vocab_size = 40

    def portions(self, questions):
        return [[number] for number in range(len(questions))]

    def answer(self, questions, portions, done):
        yield {number: Answered([7], True) for (number,) in portions}


def open_rows(folder: Path) -> None:
    for row in read_rows(folder / "rows.jsonl", "train", completion_required=False):
        assert isinstance(text_of(row.prompt), str) and isinstance(row.completion, str)


def open_packed_rows(folder: Path) -> None:
    read_rows(folder / "rows.jsonl.gz", "train", completion_required=False)


def open_store(folder: Path) -> None:
    store = SuffixStore.open(folder)
    low, high, size = store.longest([1, 2], 4)
    if low < high:
        store.after(store.order[low:high] * 0 + low, size, 3)


def open_calibration(folder: Path) -> None:
    found = kept_calibration(folder / "key.json")
    assert found.budget >= 1 and 0 < found.seconds < math.inf


def open_answers(folder: Path) -> None:
    questions = [Question([1], 0.0, 0), Question([2], 0.0, 1)]
    found = kept_answers(folder / "answers.jsonl", questions, All7(), "cache_dir")
    assert all(type(token) is int and 0 <= token < 40 for each in found for token in each.ids)


def open_checkpoint(folder: Path) -> None:
    assert state_of(str(folder / "last.ckpt"), folder) == folder / "last.ckpt"


def open_finished(folder: Path) -> None:
    """Whether it says so; where it is not ours, it does not."""
    assert Finished(folder.parent, {"seed": 0}, {}).says_so() in (True, False)


def open_findings(folder: Path) -> None:
    with journal(folder / "findings.jsonl", {"seed": 0}, resume=True):
        Part("x").kept((0,), lambda: 1)


def open_metrics(folder: Path) -> None:
    log = Metrics(str(folder.parent), folder.name, "", resume="auto")
    log.log_metrics({"loss": 1.0, "new": 2.0}, step=1)
    log.save()


STATE = {
    "global_step": 3, "pytorch-lightning_version": "2.5", "state_dict": {}, "loops": {},
    "callbacks": {}, "optimizer_states": [], "lr_schedulers": [],
}  # fmt: skip
"""What every checkpoint has."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder of each kind, as we write it."""
    logging.set_verbosity_error()
    root = tmp_path_factory.mktemp("whole")
    target = load_target(str(save_tiny_target(root / "target")), packed=False)
    save_speculator(root / "speculator", tiny_speculator(target).float(), target, 9, "# card")
    adapted, _ = with_lora(target, LoraSettings(rank=2))
    (root / "adapter").mkdir()
    save_lora(root / "adapter", adapted)
    SuffixStore.of_texts([[1, 2, 3], [1, 2, 4]]).save(root / "store")
    points = {"a": [Point(2, 0.1, 2.0)]}
    calibration = Calibration("a", 2, 0.1, 1.5, 0.1, points)
    write_json(root / "calibration" / "key.json", asdict(calibration))
    for name in ("rows", "packed", "answers"):
        (root / name).mkdir()
    (root / "rows" / "rows.jsonl").write_text(f"{ROW}\n{ROW}\n")
    (root / "packed" / "rows.jsonl.gz").write_bytes(gzip.compress(f"{ROW}\n".encode()))
    open_answers(root / "answers")
    save_tensors(root / "checkpoint" / "last.ckpt", STATE)
    for name in ("findings", "metrics"):
        (root / name).mkdir()
    Finished(root, {"seed": 0}, {}).note()
    open_findings(root / "findings")
    (root / "metrics" / "metrics.csv").write_text("loss,step\n0.5,0\n0.4,1\n")
    return root


def reader(kind: str, whole: Path):
    """What opens a folder of this kind."""
    if kind in ("speculator", "adapter"):
        target = load_target(str(whole / "target"), packed=False)
        if kind == "speculator":
            return lambda folder: load_speculator(folder, target)
        return lambda folder: load_target(str(whole / "target"), adapter=str(folder))
    return {
        "rows": open_rows,
        "packed": open_packed_rows,
        "store": open_store,
        "calibration": open_calibration,
        "answers": open_answers,
        "checkpoint": open_checkpoint,
        "checkpoints": open_finished,
        "findings": open_findings,
        "metrics": open_metrics,
        "target": lambda folder: load_target(str(folder), packed=False),
    }[kind]


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 10**12), st.floats(), st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def changed(draw, content: object):
    """JSON with one value replaced, left out or nested absurdly deep."""
    if isinstance(content, dict | list) and content and draw(st.integers(0, 9)):
        keys = sorted(content) if isinstance(content, dict) else range(len(content))
        key = draw(st.sampled_from(keys))
        copied = content.copy()
        if draw(st.integers(0, 7)):
            copied[key] = changed(draw, content[key])
        else:
            del copied[key]
        return copied
    return draw(VALUES)


@st.composite
def broken(draw, content: bytes):
    """Other bytes, the bytes with some replaced, or as JSON with another value."""
    way = draw(st.sampled_from(("random", "spliced", "spliced", "json", "json", "deep")))
    if way == "random":
        return draw(st.binary(max_size=300))
    if way == "deep":
        return b"[" * 100_000
    if way == "json":
        try:
            return json.dumps(changed(draw, json.loads(content))).encode()
        except ValueError:
            pass
    place = draw(st.integers(0, len(content)))
    left_out = draw(st.integers(0, 40) | st.just(len(content)))
    return content[:place] + draw(st.binary(max_size=40)) + content[place + left_out :]


def one_sentence(error: InputError) -> bool:
    return "\n" not in str(error) and len(str(error)) < 1500


FILES = [
    ("rows", "rows.jsonl"),
    ("packed", "rows.jsonl.gz"),
    ("store", "tokens.npy"),
    ("store", "order.npy"),
    ("calibration", "key.json"),
    ("answers", "answers.jsonl"),
    ("checkpoint", "last.ckpt"),
    ("checkpoints", "finished.json"),
    ("findings", "findings.jsonl"),
    ("metrics", "metrics.csv"),
    ("speculator", "config.json"),
    ("speculator", "model.safetensors"),
    ("target", "config.json"),
    ("target", "generation_config.json"),
    ("target", "model.safetensors"),
    ("target", "tokenizer.json"),
    ("target", "tokenizer_config.json"),
    ("adapter", "adapter_config.json"),
    ("adapter", "adapter_model.safetensors"),
]
SLOW = ("target", "adapter")


def fuzz(kind: str, name: str, whole: Path, folder: Path, count: int) -> None:
    shutil.copytree(whole / kind, folder)
    opens, content = reader(kind, whole), (whole / kind / name).read_bytes()
    opens(folder)  # as it is, it does

    @settings(max_examples=count, database=None)
    @given(broken(content))
    def check(bytes_: bytes) -> None:
        (folder / name).write_bytes(bytes_)
        try:
            opens(folder)
        except InputError as error:
            assert one_sentence(error)

    check()


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_any_bytes_open_or_are_refused(kind, name, whole, tmp_path):
    fuzz(kind, name, whole, tmp_path / "x", FEW // 5 if kind in SLOW else FEW)


@pytest.mark.parametrize("ids", [[1000000], [40], [-5], [1.5], ["7"], [True], 7, "7", None])
def test_kept_answers_that_are_no_tokens_are_answered_anew(tmp_path, ids):
    line = line_of({"prompt": 1, "ids": ids, "ended": True})
    (tmp_path / "answers.jsonl").write_text(f"{line}\n")
    questions = [Question([1], 0.0, 0), Question([2], 0.0, 1)]
    found = kept_answers(tmp_path / "answers.jsonl", questions, All7(), "cache_dir")
    assert found == [Answered([7], True)] * 2 and type(found[1].ids[0]) is int


@pytest.mark.parametrize("text", ["{}", "[]", "7", '{"run": 3}', "[" * 100_000, "\xff"])
def test_a_note_that_is_not_ours_says_nothing(tmp_path, text):
    path = tmp_path / "checkpoints" / "finished.json"
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    assert not Finished(tmp_path, {"seed": 0}, {}).says_so()


def test_findings_that_are_not_ours(tmp_path):
    path = tmp_path / "findings.jsonl"
    for first in ("{}", '{"run": 3}', '{"place": [1], "found": 2}'):
        path.write_text(f"{first}\n")
        with pytest.raises(InputError, match="does not say what it is a run of"):
            open_findings(tmp_path)
    path.write_text('{"run": {"seed": 0}}\n{"found": 3}\n{"place": [1]}\n')
    open_findings(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a,b\n1,2,3\n", b"a,a\n1,2\n", b"\n1\n"])
def test_metrics_that_are_no_table(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(InputError, match="is no table of metrics"):
        open_metrics(tmp_path)
    assert (tmp_path / "metrics.csv").read_bytes() == content


def test_an_empty_answer_is_no_sample():
    asked = Conversation("w1", 99)
    assert asked.ask(tiny_tokenizer())
    asked.take(Answered([], True), None)
    assert asked.samples() == []


@pytest.mark.parametrize(
    "state",
    [7, [], {"global_step": 3}]
    + [STATE | {"global_step": steps} for steps in ("3", None, [3], 2.5, -1, True)]
    + [{key: STATE[key] for key in STATE if key != left_out} for left_out in STATE],
)
def test_tensors_that_are_no_checkpoint(tmp_path, state, capsys):
    path = tmp_path / "checkpoints" / "last.ckpt"
    save_tensors(path, state)
    with pytest.raises(InputError, match="is no whole checkpoint"):
        state_of(str(path), tmp_path)
    assert state_of("auto", tmp_path) is None
    assert "is no whole checkpoint" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "name"), FILES)
def test_many_bytes_open_or_are_refused(kind, name, whole, tmp_path):
    fuzz(kind, name, whole, tmp_path / "x", MANY // 10 if kind in SLOW else MANY)
