"""A comparison that is killed goes on where it was, with the answers and times that it kept."""

import json

import pytest
from tests.commands import config_of, refused
from tests.training.worlds import make_world

from slipstream import app
from slipstream.core.files import lines_of, locked
from slipstream.evaluation.methods import Speculative

COUNTED = "method", "identical", "tokens", "tau", "target_forwards", "accepted_lengths", "ended"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), num_rows=4)


def infer(world, output, *overrides):
    own = (
        f"target.name={world}/target", f"data.path={world}/rows/validation.jsonl",
        "num_prompts=4", "repeats=2",
        "limits.max_new_tokens=12", "drafter=unispec", "drafter.keep=true",
        f"output_dir={output}",
    )  # fmt: skip
    return app.infer(config_of("infer", *own, *overrides))


def counted(output) -> list[dict]:
    rows = json.loads((output / "results.json").read_text())["results"]
    return [{name: row[name] for name in COUNTED} for row in rows]


def killed(world, output, after, monkeypatch, *overrides):
    """Ends at the answer number `after`; also counts what is asked."""
    generate, asked = Speculative.generate, []

    def counting(method, *given):
        asked.append(given)
        if len(asked) == after:
            raise KeyboardInterrupt
        return generate(method, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Speculative, "generate", counting)
        try:
            infer(world, output, *overrides)
        except SystemExit as ended:
            assert ended.code == 130
    return len(asked)


def times(output) -> dict[str, float]:
    """Seconds of each answer that is kept, by its place."""
    return {
        json.dumps(each["place"]): each["found"][0][0]["statistics"]["seconds"]
        for each in lines_of(output / "findings.jsonl")[1:]
    }


def test_a_killed_comparison_goes_on_with_its_answers_and_times(
    world, tmp_path, monkeypatch, capsys
):
    """Killed twice; what a drafter had learned of the pass it learns again."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert killed(world, whole, None, monkeypatch) == 10  # 2 to warm up, 2 passes of 4 prompts
    assert killed(world, run, 5, monkeypatch) == 5
    kept = times(run)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith(f"go on with the same command, output_dir={run} and resume=auto")
    assert not (run / "results.json").exists() and kept
    killed(world, run, 9, monkeypatch, "resume=auto")
    killed(world, run, None, monkeypatch, "resume=auto")
    assert counted(run) == counted(whole)
    both = [place for place in kept if times(run)[place] == kept[place]]
    assert len(both) >= len(kept) - 1  # all but that of a prompt which one method alone answered
    before = (run / "findings.jsonl").read_bytes()
    assert killed(world, run, None, monkeypatch, "resume=auto") == 2  # nothing but the warm-up
    assert (run / "findings.jsonl").read_bytes() == before


def test_another_command_is_refused_by_what_differs(world, tmp_path, monkeypatch):
    killed(world, tmp_path, 5, monkeypatch)
    before = (tmp_path / "findings.jsonl").read_bytes()
    text = refused(lambda: infer(world, tmp_path, "limits.max_new_tokens=9", "resume=auto"))
    assert text.startswith("resume: that run had limits.max_new_tokens=12, and this one has 9")
    refused(lambda: infer(world, tmp_path, "num_prompts=0"))
    assert (tmp_path / "findings.jsonl").read_bytes() == before


def test_two_processes_do_not_share_a_folder(world, tmp_path):
    with locked(tmp_path / ".lock", "x"):
        text = refused(lambda: infer(world, tmp_path))
    assert text.startswith("output_dir: another process is writing to ")
