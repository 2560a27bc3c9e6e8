"""What strangers give us is data: each attempt to have its code run ends with a sentence, and the
code has not run.

Where there is no attempt's file nobody ran it: it is what every attempt would leave behind.
"""

import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.commands import config_of, refused
from tests.tiny import save_tiny_target, tiny_speculator

from slipstream import app
from slipstream.data.rendering import render_prompt
from slipstream.data.rows import read_rows
from slipstream.decoding.calibrated import kept_calibration
from slipstream.drafters.suffixes import SuffixStore
from slipstream.speculators.checkpoint import from_pretrained, load_speculator, save_speculator
from slipstream.targets.loading import load_target
from slipstream.targets.lora import LoraSettings, save_lora, with_lora


class Attempt:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """What an attempt makes if it runs; it must not."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists(), "the code ran"


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_tiny_target(tmp_path / "target")


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def pickled(mark: Path) -> bytes:
    content = io.BytesIO()
    torch.save({"model.norm.weight": Attempt(mark)}, content)
    return content.getvalue()


def test_the_attempts_are_real(tmp_path):
    """The control: with pickles allowed, they run."""
    torch.load(io.BytesIO(pickled(tmp_path / "torch")), weights_only=False)
    pickle.loads(pickle.dumps(Attempt(tmp_path / "plain")))
    assert (tmp_path / "torch").exists() and (tmp_path / "plain").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_as_the_weights_of_a_target(folder, mark, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickled(mark))
    assert "cannot be opened" in refused(lambda: load_target(str(folder)))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_a_pickle_as_an_adapter(folder, tmp_path, mark, name):
    adapted, _ = with_lora(load_target(str(folder), packed=False), LoraSettings(rank=2))
    (tmp_path / "adapter").mkdir()
    save_lora(tmp_path / "adapter", adapted)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / name).write_bytes(pickled(mark))
    given = dict(adapter=str(tmp_path / "adapter"))
    assert "cannot be merged" in refused(lambda: load_target(str(folder), **given))


def test_an_adapter_that_names_a_module_to_import(folder, tmp_path, mark, monkeypatch):
    adapted, _ = with_lora(load_target(str(folder), packed=False), LoraSettings(rank=2))
    (tmp_path / "adapter").mkdir()
    save_lora(tmp_path / "adapter", adapted)
    (tmp_path / "strange_module.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tmp_path / "adapter" / "adapter_config.json"
    change(config, megatron_config={"a": 1}, megatron_core="strange_module")
    given = dict(adapter=str(tmp_path / "adapter"))
    assert "cannot be merged" in refused(lambda: load_target(str(folder), **given))


@pytest.fixture
def speculator(folder, tmp_path) -> Path:
    target = load_target(str(folder), packed=False)
    return save_speculator(tmp_path / "mine", tiny_speculator(target).float(), target, 9, "# card")


def test_a_pickle_as_a_speculator(folder, speculator, mark):
    (speculator / "model.safetensors").write_bytes(pickled(mark))
    target = load_target(str(folder), packed=False)
    assert "missing or corrupt" in refused(lambda: load_speculator(speculator, target))


@pytest.mark.parametrize("kind", ["strange_module:Attempt", "os:mkdir", "../strange_module"])
def test_a_speculator_that_names_code(folder, speculator, tmp_path, mark, kind, monkeypatch):
    (tmp_path / "strange_module.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    change(speculator / "config.json", kind=kind)
    target = load_target(str(folder), packed=False)
    assert f"kind {kind!r}" in refused(lambda: load_speculator(speculator, target))
    assert f"kind {kind!r}" in refused(lambda: from_pretrained(speculator))


def test_the_file_that_transformers_runs_is_not_run_here(folder, speculator, mark):
    """`custom_generate/generate.py` is code, for those who ask transformers to trust it."""
    code = speculator / "custom_generate" / "generate.py"
    code.write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    target = load_target(str(folder), packed=False)
    assert load_speculator(speculator, target).config == tiny_speculator(target).config
    from_pretrained(speculator).attach(target)


@pytest.mark.parametrize("known", [True, False])
def test_remote_code_of_a_target(folder, mark, known):
    code = f"import os\nos.mkdir({str(mark)!r})\nclass Strange: pass\n"
    (folder / "strange.py").write_text(code)
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    named = {"auto_map": {name: "strange.Strange" for name in names}}
    change(folder / "config.json", **named, **({} if known else {"model_type": "strange"}))
    tokens = {"auto_map": {"AutoTokenizer": ["strange.Strange", None]}}
    change(folder / "tokenizer_config.json", **tokens)
    if known:  # transformers' own classes are taken
        assert load_target(str(folder)).num_layers == 4
    else:
        assert "cannot be opened" in refused(lambda: load_target(str(folder)))


def test_attention_that_is_code_of_the_hub(folder, mark):
    change(folder / "config.json", _attn_implementation="owner/kernel")
    assert "names code to attend with" in refused(lambda: load_target(str(folder)))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.mkdir(MARK) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.mkdir(MARK) }}",
        "{{ messages.append(1) }}",
        "{% for a in range(1000000000000) %}{% endfor %}",
        "{{ 'unclosed' ",
    ],
)
def test_a_template_that_would_run_code(folder, mark, template):
    target = load_target(str(folder), chat_template=template.replace("MARK", repr(str(mark))))
    message = refused(lambda: render_prompt(target.tokenizer, "w1"))
    assert message.startswith("messages: the target's chat template does not take them")


@pytest.mark.parametrize("name", ["tokens.npy", "order.npy"])
@pytest.mark.parametrize("archive", [False, True])
def test_a_store_that_is_a_pickle_or_an_archive(tmp_path, mark, name, archive):
    SuffixStore.of_texts([[1, 2, 3]]).save(tmp_path / "store")
    content = io.BytesIO()
    if archive:
        with zipfile.ZipFile(content, "w") as file:
            file.writestr("../executed", "outside")
    else:
        np.save(content, np.array([Attempt(mark)], dtype=object), allow_pickle=True)
    (tmp_path / "store" / name).write_bytes(content.getvalue())
    assert "holds no whole store" in refused(lambda: SuffixStore.open(tmp_path / "store"))


def test_pickles_as_rows_and_calibrations(tmp_path, mark):
    for name in ("rows.jsonl", "rows.jsonl.gz", "key.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Attempt(mark)))
    assert "line 1 is not" in refused(lambda: read_rows(tmp_path / "rows.jsonl", "train"))
    assert "not gzip" in refused(lambda: read_rows(tmp_path / "rows.jsonl.gz", "train"))
    assert "cannot be read" in refused(lambda: kept_calibration(tmp_path / "key.json"))


def test_a_pickle_to_resume_from(tmp_path, mark):
    (tmp_path / "last.ckpt").write_bytes(pickled(mark))
    given = f"resume={tmp_path}/last.ckpt", f"output_dir={tmp_path}/out", "debug=quick"
    assert "resume: " in refused(lambda: app.train(config_of("train", *given, "logger=csv")))


@pytest.mark.parametrize(
    "named", ["os.system", "slipstream.app.os.system", "builtins.exec", "strange_module.run"]
)
def test_a_configuration_that_names_a_function(tmp_path, mark, named, monkeypatch):
    (tmp_path / "strange_module.py").write_text(f"import os\ndef run(): os.mkdir({str(mark)!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = f"drafter._target_={named}", f"output_dir={tmp_path}/out"
    app_infer = lambda: app.infer(config_of("infer", "methods=drafter", *given))  # noqa: E731
    assert "drafter" in refused(app_infer)


@pytest.mark.parametrize(
    ("place", "named", "said"),
    [
        ("console_kwargs.file", "strategies.fsdp._lazy_load", "names no part of the project"),
        ("console_kwargs.file", "callbacks.ModelSummary", "no _target_ is built here"),
        ("console_kwargs", "loggers.CSVLogger", "callbacks.x.console_kwargs: "),
        ("theme", "strategies.fsdp._Sharded", "cannot be imported"),
        ("theme", "callbacks.timer.timedelta", "names no part of the project"),
    ],
)
def test_a_configuration_that_loads_a_pickle_by_a_part_of_lightning(
    tmp_path, mark, place, named, said
):
    (tmp_path / "evil.ckpt").write_bytes(pickled(mark))
    pytorch = "lightning.pytorch"
    given = [
        f"+callbacks.x._target_={pytorch}.callbacks.RichProgressBar",
        f"+callbacks.x.{place}._target_={pytorch}.{named}", "debug=quick",
        f"output_dir={tmp_path}/out",
    ]  # fmt: skip
    if "_lazy_load" in named:
        given.append(f"+callbacks.x.{place}.filename={tmp_path}/evil.ckpt")
    if "Logger" in named:
        given.append(f"+callbacks.x.{place}.save_dir={tmp_path}")
    assert said in refused(lambda: app.train(config_of("train", *given)))


@pytest.mark.parametrize("name", ["../../etc", "/etc", "~root", "a/../../b", "file:///etc/passwd"])
def test_paths_that_are_no_models_or_speculators(folder, name):
    target = load_target(str(folder), packed=False)
    assert name in refused(lambda: load_target(name))
    assert str(Path(name)) in refused(lambda: load_speculator(name, target))


def test_shards_outside_of_the_folder_are_not_weights(folder, tmp_path, mark):
    (tmp_path / "outside.bin").write_bytes(pickled(mark))
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../outside.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(folder / "model.safetensors.index.json", folder / "pytorch_model.bin.index.json")
    assert "cannot be opened" in refused(lambda: load_target(str(folder)))


def test_no_value_of_the_environment_in_a_record(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_SECRET", "s3cr3t")
    folder = tmp_path / "${oc.env:SLIPSTREAM_SECRET}"
    given = (
        "methods=drafter", "drafter=anpd", "num_prompts=1", "limits.max_new_tokens=4",
        f"output_dir='{folder}/out'", f"calibration.folder='{folder}'",
    )  # fmt: skip
    config = config_of("infer", *given)
    app.infer(config)
    assert config.calibration.folder == str(tmp_path / "s3cr3t")
    text = (tmp_path / "s3cr3t" / "out" / "results.json").read_text()
    assert "s3cr3t" not in text and "${oc.env:SLIPSTREAM_SECRET}" in text
