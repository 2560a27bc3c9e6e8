"""Two processes of one run: they fill a cold cache together, end together when one is lost, and
another number of them goes on."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import safetensors.torch
import torch
from tests.commands import ROOT
from tests.training.worlds import make_world

WAYS = "trainer.strategy=ddp", "trainer=sharded"
TWO = WAYS[0], "trainer.devices=2", "data.batch_tokens=64"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"), num_rows=40)


def started(world, output, *overrides):
    """`python train.py`, on answers of the target; what it says goes into a file."""
    command = [
        sys.executable, str(ROOT / "train.py"), f"target.name={world}/target",
        "target.device=cpu", f"data.path={world}/rows", "data.max_new_tokens=8",
        "data.regeneration.memory_gib=0.00002", f"data.cache_dir={output}/answers",
        "training.learning_rate=0.01", "training.validation_prompts=1", "training.warmup_steps=0",
        "speculator=medusa", "speculator.num_heads=2", "logger=csv", "callbacks.summary=null",
        "callbacks.best=null", "trainer.precision=32-true", "trainer.accelerator=cpu",
        "trainer.val_check_interval=4", "trainer.max_epochs=10", f"output_dir={output}", *overrides,
    ]  # fmt: skip
    output.mkdir(exist_ok=True)
    with (output / "said.txt").open("a") as said:
        return subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)


def said(output) -> str:
    return (output / "said.txt").read_text()


def tensors(output) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(output / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def one(world, tmp_path_factory):
    """What one process learns of the batches that two share."""
    output = tmp_path_factory.mktemp("one")
    assert started(world, output, "data.batch_tokens=128").wait(300) == 0, said(output)[-3000:]
    return output


@pytest.mark.exhaustive
@pytest.mark.parametrize(("lost", "way"), list(enumerate(WAYS)))
def test_a_lost_process_ends_the_other_and_one_alone_goes_on(world, one, tmp_path, way, lost):
    output, parts = tmp_path / "two", set()
    two = started(world, output, way, "trainer.devices=2", "data.batch_tokens=64")
    try:
        while two.poll() is None and not (output / "checkpoints" / "last.ckpt").exists():
            parts |= {path.name.split(".")[1] for path in output.glob("answers/*.part-*.jsonl")}
            time.sleep(0.005)
        processes = [psutil.Process(two.pid), *psutil.Process(two.pid).children()]
        assert len(processes) == 2, said(output)[-3000:]
        os.kill(processes[lost].pid, signal.SIGKILL)
        ended = time.monotonic()
        assert two.wait(20) == (1 if lost else -signal.SIGKILL)
        psutil.wait_procs(processes, timeout=20 - (time.monotonic() - ended))
    finally:
        two.kill()
    assert parts == {"part-0", "part-1"}  # both answered
    assert not any(each.is_running() and each.status() != "zombie" for each in processes)
    sentence = said(output).strip().splitlines()[-1]
    assert sentence.startswith("error: another process of this run was lost")
    assert f"output_dir={output} and resume=auto" in sentence
    alone = started(world, output, "trainer.devices=1", "data.batch_tokens=64", "resume=auto")
    assert alone.wait(300) == 0, said(output)[-3000:]
    assert f"resume: from {output}/checkpoints/" in said(output)
    for name, tensor in tensors(one).items():
        torch.testing.assert_close(tensors(output)[name], tensor, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """What two processes learn that nobody ends."""
    output = tmp_path_factory.mktemp("whole")
    assert started(world, output, *TWO).wait(300) == 0, said(output)[-3000:]
    return output


@pytest.mark.exhaustive
def test_a_process_that_is_lost_while_both_answer_loses_no_answer(world, whole, tmp_path):
    output, parts = tmp_path / "two", []
    two = started(world, output, *TWO)
    try:
        while two.poll() is None and len(parts) < 2:
            parts = sorted(output.glob("answers/*.part-*.jsonl"))
            time.sleep(0.001)
        processes = [psutil.Process(two.pid), *psutil.Process(two.pid).children()]
        assert len(processes) == 2, said(output)[-3000:]
        os.kill(processes[1].pid, signal.SIGKILL)
        assert two.wait(20) == 1
        psutil.wait_procs(processes, timeout=20)
    finally:
        two.kill()
    assert not (output / "checkpoints").exists()
    assert said(output).strip().splitlines()[-1].startswith("error: another process of this run")
    answered = [line for part in parts for line in part.read_text().splitlines()]
    assert started(world, output, *TWO, "resume=auto").wait(300) == 0, said(output)[-3000:]
    kept = [path.read_text().splitlines() for path in output.glob("answers/*.jsonl")]
    assert answered and set(answered) <= set().union(*kept)
    for name, tensor in tensors(whole).items():
        assert tensors(output)[name].equal(tensor)


@pytest.mark.exhaustive
def test_two_processes_go_on_from_what_one_has_saved(world, one, tmp_path):
    """Each batch that was made for one is shared by both."""
    output, batches = tmp_path / "two", "data.batch_tokens=128"
    alone = started(world, output, batches)
    while alone.poll() is None and not (output / "checkpoints" / "last.ckpt").exists():
        time.sleep(0.005)
    alone.kill()
    assert alone.wait(20) == -signal.SIGKILL, said(output)[-3000:]
    two = started(world, output, batches, WAYS[1], "trainer.devices=2", "resume=auto")
    assert two.wait(300) == 0, said(output)[-3000:]
    assert f"resume: from {output}/checkpoints/" in said(output)
    for name, tensor in tensors(one).items():
        torch.testing.assert_close(tensors(output)[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("told", ["the other", "all"])
def test_sigterm_makes_all_save_and_end(world, whole, tmp_path, told):
    output = tmp_path / "two"
    two = started(world, output, *TWO)
    try:
        while two.poll() is None and not (output / "checkpoints" / "last.ckpt").exists():
            time.sleep(0.005)
        processes = [psutil.Process(two.pid), *psutil.Process(two.pid).children()]
        assert len(processes) == 2, said(output)[-3000:]
        for process in processes if told == "all" else processes[1:]:
            process.terminate()
        assert two.wait(30) == 143, said(output)[-3000:]
        psutil.wait_procs(processes, timeout=10)
    finally:
        two.kill()
    assert not any(each.is_running() and each.status() != "zombie" for each in processes)
    assert "lost" not in said(output) and f"output_dir={output} and resume=auto" in said(output)
    assert (output / "checkpoints" / "interrupted.ckpt").exists()
    assert started(world, output, *TWO, "resume=auto").wait(300) == 0, said(output)[-3000:]
    for name, tensor in tensors(whole).items():
        assert tensors(output)[name].equal(tensor)
