"""Bad input ends with one sentence that names the field and the remedy, and nothing overwritten."""

import gzip
import json
import shutil
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from tests.commands import config_of, refused, script
from tests.exhaustive import sparing

from slipstream import app, entry
from slipstream.assets import locate
from slipstream.core.errors import InputError

GOOD_ROW = json.dumps({"prompt": "name[The Mill]", "completion": "The Mill is a pub."})


SPRINTER = ("methods=sprinter", "sampling.temperature=1")
MINE = (
    "methods=drafter",
    "methods.drafter=null",
    "+methods.mine._target_=slipstream.evaluation.methods.Speculative",
    "+methods.mine.drafter=${drafter}",
    "+methods.mine.budget=4",
)


def train(tmp_path, *overrides):
    app.train(config_of("train", "debug=quick", "logger=csv", f"output_dir={tmp_path}", *overrides))


def infer(tmp_path, *overrides):
    app.infer(config_of("infer", "num_prompts=2", f"output_dir={tmp_path}", *overrides))


def sentence(call, tmp_path, *overrides) -> str:
    return refused(lambda: call(tmp_path, *overrides))


@pytest.mark.parametrize(
    "call, overrides, expected",
    [
        (train, ["+colour=red"], "colour: unknown config key"),
        (train, ["+speculator.colour=red"], "speculator.colour: unknown config key"),
        (infer, ["+drafter.colour=red"], "drafter.colour: unknown config key"),
        (infer, ["+sampling.colour=red"], "sampling.colour: unknown config key"),
        (train, ["data.batch_tokens=0"], "data.batch_tokens: must be a whole number, at least 1"),
        (train, ["+trainer.min_epochs=-4"], "trainer.min_epochs: must be"),
        (train, ["trainer.max_time='1:2'"], "trainer: `Timer(duration='1:2')` is not a valid"),
        (train, ["trainer.max_time={days:x}"], "trainer: unsupported type for timedelta days"),
        (train, ["trainer.accelerator=tpu"], "trainer: Requirement 'torch_xla"),
        (train, ["trainer.max_steps=0"], "trainer.max_steps: must be"),
        (train, ["data.regenerate=maybe"], "data.regenerate: must be true or false"),
        (infer, ["verify=maybe"], "verify: must be true or false"),
        (train, ["speculator.num_msa_layers=9"], "speculator.num_msa_layers: 9 is more than"),
        (train, ["speculator.mlp=none"], "speculator.mlp: must be one of"),
        (train, ["data.synthetic_kinds=[poems]"], "poems"),
        (train, ["data.synthetic_kinds=null"], "data.path: no data given"),
        (train, ["data=jsonl", "data.path=missing.jsonl"], "data.path: missing.jsonl does not"),
        (train, ["data=jsonl"], "data.path: no data given"),
        (train, ["resume=missing.ckpt"], "resume: missing.ckpt is no file"),
        (train, ["target.name=missing/model"], "target.name: 'missing/model' cannot be opened"),
        (infer, ["sampling.temperature=-1"], "sampling.temperature: must be"),
        (infer, ["sampling.top_p=2"], "sampling.top_p: must be"),
        (infer, ["target.device=meta"], "target.device: a target on 'meta' has neither"),
        (train, ["target.device=meta"], "target.device: a target on 'meta' has neither"),
        (infer, ["engine.compile=always"], "engine.compile: must be one of auto, off"),
        (infer, ["engine.compile=reduce-overhead"], "engine.compile: weights reordered for"),
        (infer, ["batch_size=0"], "batch_size: must be"),
        (infer, ["budget=0"], "budget: must be a whole number, at least 1"),
        (infer, ["methods.drafter.budget=some"], "methods.drafter.budget: must be a whole number"),
        (infer, ["prompt=Hi", "methods.drafter.budget=0"], "methods.drafter.budget: must be"),
        (infer, [*MINE, "methods.mine.budget=0"], "methods.mine.budget: must be a whole number"),
        (infer, [*MINE, "methods.mine.budget=some"], "methods.mine.budget: must be a whole number"),
        (infer, [*MINE, "drafter.schedule=some"], "drafter.schedule: must be one of"),
        (
            infer,
            ["drafter=auto", "drafter.drafters={streaming:null,unispec:null,anpd:null}"],
            "drafter.drafters: name at least one",
        ),
        (infer, ["drafter._target_=a.B"], "drafter._target_: 'a.B' cannot be imported"),
        (infer, ["drafter.schedule=later"], "drafter.schedule: must be one of"),
        (infer, ["methods=sprinter"], "sampling.temperature: SPRINTER samples"),
        (
            infer,
            [*SPRINTER, "methods.sprinter.ratio=0"],
            "methods.sprinter.ratio: must be a finite number, above 0",
        ),
        (infer, [*SPRINTER, "methods.sprinter.ratio=3"], "ratio: the verifier knows lambda"),
        (
            infer,
            [*SPRINTER, "methods.sprinter.threshold=1"],
            "methods.sprinter.threshold: must be a finite number, above 0 and below 1",
        ),
        (
            infer,
            [*SPRINTER, "methods.sprinter.cap=0"],
            "methods.sprinter.cap: must be a whole number, at least 1",
        ),
        (
            infer,
            [*SPRINTER, "methods.sprinter.verifier=slipstream/small-acceptance"],
            "verifier: a speculator of kind 'acceptance' is no SPRINTER verifier",
        ),
        (train, ["training=verifier"], "speculator: this training needs"),
        (infer, ["num_prompts=0"], "num_prompts: must be a whole number, at least 1"),
        (infer, ["speculator_path=missing"], "speculator: missing"),
        (infer, ["target.dtype=int3"], "target.dtype: must be one of"),
        (infer, ["prompt=''"], "prompt: "),
        (infer, ["verify=true", "sampling.temperature=1"], "verify: compares greedy outputs"),
        (infer, ["verify=true", "prompt=Hi"], "verify: cannot be combined with prompt"),
        (infer, ["verify=true", "batch_size=0"], "batch_size: must be a whole number, at least 1"),
        (infer, ["limits.stop=['']"], "limits.stop: must be a non-empty text"),
    ],
)
def test_config_errors(tmp_path, call, overrides, expected):
    assert expected in sentence(call, tmp_path, *overrides)


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "holds no rows"),
        (GOOD_ROW.encode() + b'\n{"prompt": "x", "compl', "line 2 is not valid JSON"),
        (GOOD_ROW.encode() + b"\n\xff\xfe", "is not UTF-8"),
        (b'{"prompt": "x"}', "line 1 has no text field 'completion'"),
        (b'{"completion": "x"}', "line 1 has no text field 'prompt'"),
        (b"[1, 2]", "line 1 is no JSON object; every line needs one"),
        (
            b"[\n{}\n]",
            "line 1 is not valid JSON (Expecting value)",
        ),
        (b'{"prompt": "x", "completion": ""}', "nothing is supervised"),
    ],
)
def test_bad_data_files(tmp_path, content, expected):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    (tmp_path / "validation.jsonl").write_bytes(content)
    overrides = ["data=jsonl", f"data.path={tmp_path}", "data.regenerate=false"]
    assert expected in sentence(train, tmp_path, *overrides)
    assert path.read_bytes() == content


def test_truncated_gzip(tmp_path):
    whole = gzip.compress("\n".join([GOOD_ROW] * 100).encode())
    (tmp_path / "train.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert "truncated" in sentence(train, tmp_path, "data=jsonl", f"data.path={tmp_path}")


def test_a_prompt_beyond_the_context(tmp_path):
    text = sentence(infer, tmp_path, "prompt='" + "word " * 1100 + "'")
    assert text.startswith("prompt: ") and "context of 1024" in text


def test_another_vocabulary(tmp_path):
    """A draft model whose tokenizer has the same size and other tokens is refused."""
    folder = tmp_path / "draft"
    shutil.copytree(locate("slipstream/small-draft"), folder)
    tokenizer = folder / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["added_tokens"][3]["content"] = "<|helper|>"
    vocabulary = content["model"]["vocab"]
    vocabulary["<|helper|>"] = vocabulary.pop("<|assistant|>")
    tokenizer.write_text(json.dumps(content))
    text = sentence(infer, tmp_path / "out", "drafter=draft_model", f"drafter.model.name={folder}")
    assert "has another vocabulary" in text


def test_an_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    text = sentence(infer, tmp_path / "file" / "below")
    assert text.startswith("output_dir: cannot write")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_of_calibrations_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("kept")
    folder = f"calibration.folder={tmp_path / 'file' / 'below'}"
    few = ("calibration.budgets=[2,4]", "calibration.num_prompts=2", "limits.max_new_tokens=4")
    found = sentence(infer, tmp_path, "calibrate=true", "drafter=anpd", folder, *few)
    assert found.startswith("calibration.folder: cannot write to")


SCRIPTS = [
    ("train.py", ["colour=red"], "colour"),
    ("train.py", ["experiment=streming_small"], "the nearest is experiment=streaming_small"),
    ("train.py", ["experiment=phi3_mini"], "now experiment=real_target target=phi3_mini"),
    ("infer.py", ["drafter=gammatune"], "it is now drafter=adaptive length=gammatune"),
    ("train.py", ["debug=quik"], "the nearest is debug=quick"),
    ("train.py", ["output_dir=FILE/below"], "output_dir: cannot write to"),
    ("infer.py", ["drafter=magic"], "the nearest is drafter="),
    ("infer.py", ["target=owner/name"], "give target=hub target.name=owner/name"),
    ("infer.py", ["experiment=evidence/trees"], "it is now study=trees"),
    ("infer.py", ["prompt=name[The Mill], food[Thai]"], "is quoted for the shell and for Hydra"),
    ("infer.py", ["prompt=a,b"], "is quoted for the shell and for Hydra"),
    ("infer.py", ["data.path=~/rows"], "is quoted for the shell and for Hydra"),
    ("infer.py", ["study=trees", "batch_size=2"], "batch_size: study= does not use it"),
    ("infer.py", ["calibrate=true", "batch_size=8"], "batch_size: calibrate= does not use it"),
    ("infer.py", ["prompt=name", "repeats=2"], "repeats: prompt= does not use it"),
    ("infer.py", ["chat=true", "num_prompts=4"], "num_prompts: chat= does not use it"),
    ("infer.py", ["calibrate=true", "num_prompts=8"], "give calibration.num_prompts"),
    (
        "infer.py",
        ["methods=drafters", "methods.auto.candidates.rest=null"],
        "in its place is methods.auto.drafter",
    ),
    ("infer.py", ["+colour=red"], "colour: unknown config key"),
    ("infer.py", ["budget=[1"], "config: "),
    ("infer.py", ["hydra.verbose=5"], "config: hydra: a key below it has a value"),
    ("infer.py", ["output_dir=FILE/below"], "output_dir: cannot write to"),
]
ONCE = "streming", "unknown config", "budget=[1", "train.py', ['output_dir"


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    sparing(SCRIPTS, lambda *each: any(word in str(each) for word in ONCE)),
)
def test_the_scripts_print_one_sentence_and_exit_with_2(tmp_path, name, overrides, expected):
    """Also for a folder that Hydra would make before anything of ours runs."""
    (tmp_path / "file").write_text("kept")
    overrides = [each.replace("FILE", str(tmp_path / "file")) for each in overrides]
    done = script(name, f"output_dir={tmp_path}", *overrides, cwd=tmp_path)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert expected in lines[0]
    assert "Traceback" not in done.stdout
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(("call", "own"), [(train, ["data=jsonl"]), (infer, [])])
def test_a_path_that_is_not_there_is_said_before_a_model_is_loaded(
    tmp_path, monkeypatch, call, own
):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    said = sentence(call, tmp_path, *own, "data.path=missing.jsonl")
    assert said.startswith("data.path: missing.jsonl does not exist")


def test_each_run_of_a_multirun_is_one_of_its_own_for_wandb(monkeypatch, capsys):
    """Also after one that could not begin."""
    ended = []
    wandb = SimpleNamespace(finish=lambda exit_code: ended.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for within in (False, True):
        monkeypatch.setattr(entry, "_in_multirun", lambda within=within: within)
        with entry.one_sentence():
            pass
        with suppress(InputError, SystemExit), entry.one_sentence():
            raise InputError("x: no")
        assert ended == [0, 1] * within


def test_a_folder_that_takes_no_log_file_is_one_sentence(tmp_path):
    """Hydra writes its log there, before anything of ours runs."""
    (tmp_path / "train.log").mkdir()
    done = script("train.py", f"output_dir={tmp_path}", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: output_dir: cannot write to ")


@pytest.mark.parametrize(
    "call, name, is_file",
    [
        (train, ".lock", False),
        (train, "checkpoints/best.ckpt", False),
        (train, "metrics", True),
        (train, "checkpoints", True),
        (infer, "results.json", False),
    ],
)
def test_what_stands_where_something_else_is_written(tmp_path, call, name, is_file):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch() if is_file else path.mkdir()
    assert sentence(call, tmp_path).startswith(f"output_dir: {path} stands where a f")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("results.json", '{"results": [1]}'),
        ("results.json", "mine"),
        ("findings.jsonl", '{"place": 1}\n'),
    ],
)
def test_results_of_others_are_not_replaced(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    assert sentence(infer, tmp_path).startswith(f"output_dir: {path} ")
    assert path.read_text() == content
