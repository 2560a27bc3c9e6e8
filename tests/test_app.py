"""The two commands end to end, on the shipped models: what they write, and that it opens again."""

import json
import subprocess
import sys

import pytest
from tests.commands import ROOT, config_of, refused
from tests.data.test_rendering import TEMPLATE
from tests.exhaustive import sparing
from tests.tiny import save_tiny_target, tiny_tokenizer

from slipstream import app
from slipstream.assets import SHIPPED, locate
from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.methods import Speculative
from slipstream.evaluation.prompts import PromptSets
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.loading import load_target

STABLE_KEYS = {
    "method", "drafter", "prompt_set", "exact", "dtype", "num_prompts", "identical",
    "tokens_per_second", "speedup_vs_transformers", "speedup_vs_plain", "tau",
    "mean_accepted_draft_tokens", "target_forwards", "seconds_draft", "seconds_verify",
    "seconds_overhead",
}  # fmt: skip

TRAINED = ("medusa",)  # no heads are shipped: see tests/training/test_every_drafting_kind.py
DRAFTERS = [
    (path.stem,)
    for path in sorted((ROOT / "conf" / "drafter").glob("*.yaml"))
    if path.stem not in TRAINED
]


def train(output, *overrides):
    return app.train(
        config_of(
            "train", "debug=quick", "logger=csv", "trainer.precision=32-true",
            f"data.cache_dir={output}/answers", f"output_dir={output}", *overrides,
        )
    )  # fmt: skip


FEW = "training.validation_prompts=2"
FEWER = FEW, "data.max_train_rows=8", "data.max_validation_rows=4", "data.batch_tokens=256"
SHORT = "limits.max_new_tokens=24"
CORPORA = {
    "rest": ["retrieval.corpus"],
    "spectra_retrieval": ["retrieval.corpus"],
    "combined_untrained": ["drafters.rest.retrieval.corpus"],
}
"""Where drafters have texts, for which the target may have to answer."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("train"), *FEWER)


def test_train_writes_a_folder_that_infer_opens(trained, tmp_path):
    config = json.loads((trained / "config.json").read_text())
    assert config["kind"] == "streaming" and config["target"] == "slipstream/small-target"
    assert "tau" in (trained / "README.md").read_text()
    app.infer(config_of("infer", f"speculator_path={trained}", "num_prompts=2", "repeats=1",
                        SHORT, f"output_dir={tmp_path}"))  # fmt: skip
    results = json.loads((tmp_path / "results.json").read_text())
    assert {"config", "environment", "results"} <= results.keys()
    assert all(record.keys() >= STABLE_KEYS for record in results["results"])
    drafted = [record for record in results["results"] if record["method"] == "drafter"]
    for record in drafted:
        assert sum(record["accepted_lengths"].values()) == record["target_forwards"]
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    for answer in answers:  # each step keeps so many, and one token more
        kept = sum(answer["accepted"]) + len(answer["accepted"])
        assert answer["method"] == "plain" or kept >= answer["tokens"] - 1
    assert all(record["identical"] == record["num_prompts"] for record in results["results"])
    assert (tmp_path / "table.md").read_text().count("| plain |") == 3
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.exhaustive
def test_shared_mode_trains_and_writes_what_its_own_model_writes(tmp_path):
    folder = train(tmp_path / "shared", "speculator=streaming_shared", *FEWER)
    common = [f"speculator_path={folder}", "num_prompts=2", SHORT, f"output_dir={tmp_path}"]
    records = app.infer(config_of("infer", "repeats=1", *common))
    assert all(record["identical"] == record["num_prompts"] for record in records)
    assert app.infer(config_of("infer", "verify=true", *common)) == []


@pytest.mark.exhaustive
def test_fine_tuning_writes_an_adapter_that_infer_opens(tmp_path):
    folder = train(tmp_path / "plain", "experiment=fine_tuning", "data.regenerate=true")
    assert (folder / "adapter_model.safetensors").exists()
    records = app.infer(
        config_of("infer", f"target.adapter={folder}", "methods.drafter=null", "num_prompts=2",
                  "repeats=1", SHORT, f"output_dir={tmp_path}")
    )  # fmt: skip
    assert {record["method"] for record in records} == {"plain"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_method_of_the_demo_gives_the_output_of_generate(tmp_path, batch_size):
    records = app.infer(
        config_of(
            "infer", "experiment=demo", "num_prompts=3", "repeats=1", SHORT,
            f"batch_size={batch_size}", f"output_dir={tmp_path}",
        )
    )  # fmt: skip
    methods = {record["method"] for record in records}
    assert {"transformers", "plain", "prompt_lookup", "draft_model", "streaming_fused",
            "streaming_deferred", "streaming_shipped"} <= methods  # fmt: skip
    for record in records:
        assert record["exact"] and record["identical"] == record["num_prompts"], record["method"]
    taus = {record["method"]: record["tau"] for record in records if record["prompt_set"] == "all"}
    assert taus["plain"] == 1.0 and taus["streaming_fused"] > 1.5


@pytest.mark.parametrize(("name",), sparing(DRAFTERS, lambda name: name == "streaming"))
def test_every_drafter_of_the_configs_gives_the_output_of_plain_decoding(tmp_path, name):
    more = ["length=gammatune"] if name == "adaptive" else []
    more += [f"drafter.{key}.max_rows=100" for key in CORPORA.get(name, ())]
    given = "verify=true", "num_prompts=2", SHORT, f"output_dir={tmp_path}"
    divergences = app.infer(config_of("infer", f"drafter={name}", *more, *given))
    assert divergences == []


FAULTY_IN_BATCHES = """
import runpy, sys
from slipstream.decoding.engine import Engine

answer = Engine.generate_batch

def faulty(engine, prompts, seeds=None):
    answers = answer(engine, prompts, seeds)
    if len(prompts) > 1:
        answers[1].ids[2] += 1
    return answers

Engine.generate_batch = faulty
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("batch_size", "differ"), sparing([(1, 0), (2, 2)], lambda size, differ: differ)
)
def test_verify_answers_in_batches_and_ends_with_1_where_something_differs(
    tmp_path, batch_size, differ
):
    """A fault that comes in batches alone."""
    done = subprocess.run(
        [
            sys.executable, "-c", FAULTY_IN_BATCHES, str(ROOT / "infer.py"), "verify=true",
            "num_prompts=4", SHORT, f"batch_size={batch_size}", f"output_dir={tmp_path}",
        ],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == bool(differ), done.stderr
    assert f"verify: {8 - differ} of 8 answers are identical" in done.stdout
    assert done.stdout.count("token 2 is") == differ


@pytest.fixture
def other_target(tmp_path, monkeypatch):
    """A target of another vocabulary than the shipped models have, and rows for it."""
    monkeypatch.chdir(tmp_path)  # what is cached lies below runs/
    folder = save_tiny_target(tmp_path / "target")
    (tmp_path / "rows").mkdir()
    rows = [{"prompt": f"w{n} w5 w6 w{n}", "completion": "w7 w8 w9"} for n in range(10, 26)]
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return (
        f"target.name={folder}", "target.device=cpu", "data.path=rows", "num_prompts=2",
        "repeats=1", "limits.max_new_tokens=6", f"output_dir={tmp_path / 'out'}",
    )  # fmt: skip


def test_all_drafters_leave_out_and_name_what_cannot_fit_another_target(other_target, capsys):
    records = app.infer(config_of("infer", "experiment=all_drafters", *other_target))
    of_draft_model = [
        "draft_model", "assistant_threshold", "heuristic", "gammatune", "gammatune_plus", "adaedl",
        "specdec_plus_plus", "disco",
    ]  # fmt: skip
    of_speculator = [
        "streaming_fused", "streaming_deferred", "streaming_paper", "combined", "auto",
    ]  # fmt: skip
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: left")]
    told = dict(line.removeprefix("note: left out methods.").split(": ", 1) for line in notes)
    assert told.keys() == {*of_draft_model, *of_speculator}
    for name in of_draft_model:
        assert "slipstream/small-draft has another vocabulary than the target" in told[name]
    for name in of_speculator:
        assert "was trained for" in told[name]
    assert {record["method"] for record in records} == {
        "plain", "prompt_lookup", "anpd", "token_recycling", "unispec", "combined_untrained",
        "combined_text", "suffix_decoding", "rest", "lookahead", "spectra", "spectra_retrieval",
    }  # fmt: skip


def test_a_method_that_is_asked_for_and_does_not_fit_is_named(other_target):
    config = config_of("infer", "drafter=draft_model", *other_target)
    found = refused(lambda: app.infer(config))
    assert found.startswith("methods.drafter: drafter.model: slipstream/small-draft has another")


@pytest.mark.exhaustive
def test_methods_are_prepared_once(tmp_path, monkeypatch):
    called, prepare = [], Speculative.prepare
    monkeypatch.setattr(
        Speculative, "prepare", lambda *given: called.append(given[0]) or prepare(*given)
    )
    config = config_of("infer", "experiment=all_drafters", "num_prompts=2", "repeats=1",
                       SHORT, f"output_dir={tmp_path}")  # fmt: skip
    for name in list(config.methods):
        if name not in ("plain", "streaming_deferred", "auto"):
            config.methods[name] = None
    records = app.infer(config)
    assert {record["method"] for record in records} == {"plain", "streaming_deferred", "auto"}
    assert len(called) == 2  # streaming_deferred and auto


@pytest.mark.parametrize(
    ("overrides",),
    sparing(
        [
            (["data.regenerate=false", "training.num_segments=3"],),
            (["data.regenerate=false", "speculator=streaming_shared", "training.num_segments=3"],),
            ([],),
        ],
        lambda overrides: not overrides,
    ),
)
def test_conversations_are_trained_on_and_answered(tmp_path, overrides):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    target = save_tiny_target(tmp_path / "target", tokenizer=tokenizer)
    (tmp_path / "rows").mkdir()
    roles = ["system", "user", "assistant", "user", "assistant"]
    for split in ("train", "validation", "test"):
        rows = [
            {"messages": [{"role": role, "content": f"w{n} w{n + 1}"} for role in roles]}
            for n in range(10, 26)
        ]
        (tmp_path / "rows" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = (f"target.name={target}", "target.device=cpu", f"data.path={tmp_path / 'rows'}")
    folder = train(
        tmp_path, *common, "data=jsonl", "data.max_new_tokens=6", "speculator.num_msa_layers=2",
        "speculator.num_streams=2", "trainer.accelerator=cpu", "trainer.max_steps=1",
        "trainer.val_check_interval=1", FEW, *overrides,
    )  # fmt: skip
    records = app.infer(
        config_of(
            "infer", f"speculator_path={folder}", *common, "num_prompts=3", "repeats=1",
            "limits.max_new_tokens=6", f"output_dir={tmp_path}",
        )
    )  # fmt: skip
    assert all(record["identical"] == record["num_prompts"] for record in records)
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert [each["role"] for each in json.loads(answers[0])["prompt"]] == roles[:-1]


def test_fused_and_deferred_draft_the_same_trees():
    """Where deferred streams are not told the root, both schedules need the same forwards."""
    target = load_target("slipstream/small-target", device="cpu")
    prompts = PromptSets(None, None, ["data_to_text", "text_to_sql"], "test", seed=0).take(2)
    found = []
    for schedule in ("fused", "deferred"):
        speculator = load_speculator("slipstream/small-streaming", target)
        speculator.root = None
        engine = Engine(target, Streaming(speculator, schedule, 4), Sampling(), Limits(48), 10)
        numbers = [
            engine.generate(render_prompt(target.tokenizer, prompt.text)).statistics
            for prompt in prompts
        ]
        found.append([each.target_forwards for each in numbers])
    assert found[0] == found[1]
    assert sum(each.tau for each in numbers) / len(numbers) > 1.5


@pytest.mark.exhaustive
def test_the_same_training_command_gives_the_same_speculator(trained, tmp_path):
    again = train(tmp_path, *FEWER)
    assert (again / "model.safetensors").read_bytes() == (
        trained / "model.safetensors"
    ).read_bytes()


@pytest.mark.exhaustive
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    """Going on from a checkpoint in the middle of an epoch gives bit for bit the same weights."""
    common = [
        FEW,
        f"data.cache_dir={tmp_path}/answers",
        "callbacks.best.monitor=null",
        "callbacks.best.filename='state-{step}'",
        "+callbacks.best.auto_insert_metric_name=false",
        "+callbacks.best.every_n_train_steps=2",
        "+callbacks.best.save_top_k=-1",
    ]
    whole = train(tmp_path / "whole", *common)
    middle = tmp_path / "whole" / "checkpoints" / "state-2.ckpt"
    resumed = train(tmp_path / "resumed", *common, f"resume={middle}")
    assert (resumed / "model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()


@pytest.mark.exhaustive
def test_sprinter_is_compared_with_exact_ways_in_one_command(tmp_path):
    rows = app.infer(
        config_of(
            "infer", "experiment=sprinter_small", "num_prompts=2", "study.calibration_prompts=8",
            f"output_dir={tmp_path}",
        )
    )  # fmt: skip
    overall = {row["method"]: row for row in rows if row["task"] == "all"}
    exact = {name for name, row in overall.items() if row["exact"] == "yes"}
    assert exact == {"plain", "speculative", "specdec_plus_plus", "adaedl", "disco"}
    points = {"sprinter_1_0.5", "sprinter_1.2_0.5"} | {
        f"sprinter_1.5_{threshold}" for threshold in (0.4, 0.45, 0.5)
    }
    controls = {"control_draft", "control_cap"}
    controls |= {point.replace("sprinter", "random") for point in points}
    assert overall.keys() - exact == points | controls
    assert {path.name for path in tmp_path.iterdir()} >= {
        "results.json", "table.md", "plot.png", "fastchat",
    }  # fmt: skip


def test_sprinter_answers_as_it_goes_and_says_that_it_is_approximate(capsys):
    prompt = "prompt='name[The Mill], eatType[pub], food[English]'"
    app.infer(config_of("infer", "methods=sprinter", "sampling.temperature=1", prompt))
    printed = capsys.readouterr().out
    assert "tau" in printed and "approximate: not the target's exact output" in printed


@pytest.mark.exhaustive
def test_a_prompt_is_answered_by_the_choice_at_every_step(capsys):
    prompt, shown = "prompt='name[The Mill], eatType[pub], food[English]'", []
    for drafter in ("auto", "prompt_lookup"):
        app.infer(config_of("infer", f"drafter={drafter}", "limits.max_new_tokens=20", prompt))
        shown.append(capsys.readouterr().out.splitlines())
    assert shown[0][0] == shown[1][0] and "tau" in shown[0][-1]


def test_a_method_that_shows_nothing_while_it_decides_is_refused():
    others = config_of("infer", "methods=all").methods.keys() - {"transformers"}
    given = [f"methods.{name}=null" for name in others]
    with pytest.raises(
        InputError, match=r"^methods\.transformers: Transformers cannot show an answer"
    ):
        app.infer(config_of("infer", "methods=all", "prompt=Hi", *given))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_model_has_a_card(name):
    card = (locate(name) / "README.md").read_text()
    for word in ("licence", "python train.py", "E2E-NLG", "WikiSQL"):
        assert word in card, word


def test_the_assets_are_small():
    sizes = [
        path.stat().st_size
        for path in locate("slipstream/small-target").parent.rglob("*")
        if path.is_file()
    ]
    assert sum(sizes) < 44 * 2**20


def test_an_answer_and_a_server_need_no_lightning(tmp_path):
    """Its import takes longer than the answer."""
    code = (
        "import runpy, sys; sys.modules['lightning'] = None; import slipstream.serving.server; "
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "infer.py"), "prompt='name[The Mill]'", SHORT],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tau" in done.stdout
