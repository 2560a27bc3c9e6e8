"""SPRINTER's experiments on hub models, both commands on tiny random ones, text from `datasets`."""

import json

import pytest
import torch
from tests.commands import config_of
from tests.test_real_targets import sizes_of, toy_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import app

PAIRS = {"gpt2": "gpt2_xl", "gpt_neo": "gpt_neo_1b3"}
FEATURES = {"sprinter": ["hidden"], "acceptance": ["hidden", "token", "distribution"]}


def saved(folder, sizes: dict, seed: int):
    torch.manual_seed(seed)
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes, **ids))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # so that the two disagree
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def common(pair, tmp_path) -> list[str]:
    """Overrides that put tiny models and local text in the place of the hub's."""
    sizes = sizes_of(PAIRS[pair])
    target, draft = saved(tmp_path / "target", sizes, 0), saved(tmp_path / "draft", sizes, 1)
    lines = [json.dumps({"text": f"ab cd {n} the cat sat on a mat {n}"}) for n in range(40)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    text = [
        "name=json", "text=text", f"+data_files={tmp_path / 'texts.jsonl'}", "prompt_words=3",
        "completion_words=4", "texts.train=[0,20]", "texts.validation=[20,10]", "texts.test=[30,4]",
    ]  # fmt: skip
    text = [f"{'+' * each.startswith('+')}data.hub.wikipedia.{each.lstrip('+')}" for each in text]
    return [
        f"target.name={target}", "target.architecture=null", "target.dtype=float32",
        "target.device=cpu", f"draft={draft}", *text,
    ]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", PAIRS)
def test_train_and_infer(pair, common, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folders = {}
    for kind, features in FEATURES.items():
        folders[kind] = app.train(
            config_of(
                "train", "experiment=sprinter_real", f"target={PAIRS[pair]}",
                f"speculator={kind}", "data=jsonl", "data.regenerate=false", "hub=wikipedia",
                "data.max_new_tokens=20", *common, "logger=csv", "trainer.max_epochs=2",
                f"training.cache_dir={tmp_path / 'labels'}",
                f"output_dir={tmp_path / kind}",
            )
        )  # fmt: skip
        config = json.loads((folders[kind] / "config.json").read_text())
        assert config["kind"] == kind and config["arguments"]["features"] == features
        assert "jordiclive" not in (folders[kind] / "README.md").read_text()
    heads = [
        f"study.lengths.{rule}.head={folders['acceptance']}"
        for rule in ("specdec_plus_plus", "disco")
    ]
    rows = app.infer(
        config_of(
            "infer", "experiment=sprinter_real", f"target={PAIRS[pair]}", "hub=wikipedia",
            *common, *heads, f"speculator_path={folders['sprinter']}", "num_prompts=3",
            "engine.compile=off",
            f"output_dir={tmp_path / 'infer'}",
        )
    )  # fmt: skip
    assert {row["method"] for row in rows} >= {"plain", "speculative", "adaedl", "sprinter_1.5_0.4"}
    assert {row["task"] for row in rows} == {"wikipedia"}
