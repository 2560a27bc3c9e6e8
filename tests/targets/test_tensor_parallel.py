"""Two processes that share every layer decode what one decodes."""

import json
import os
import subprocess
import sys

import pytest
from tests.commands import ROOT
from tests.tiny import save_tiny_target, tiny_speculator, tiny_target, tiny_tokenizer

from slipstream.core.errors import InputError
from slipstream.drafters.streaming import Streaming
from slipstream.targets.loading import load_target


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_a_tensor_parallel_target_decodes_the_same(tmp_path, architecture):
    """Of Phi-3 every process has all heads."""
    folder = tmp_path / "target"
    tiny_target(architecture).model.float().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "tests/targets/tensor_parallel.py", str(folder), str(tmp_path / "found.json"),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["split"].pop("processes"), found["whole"].pop("processes")) == (2, 1)
    assert found["split"] == found["whole"]
    assert found["split"]["plain"] == found["split"]["drafted"]


def test_what_does_not_go_together_is_one_sentence(tmp_path, monkeypatch):
    folder = str(save_tiny_target(tmp_path))
    with pytest.raises(InputError, match="needs several processes; start with torchrun"):
        load_target(folder, tensor_parallel=True)
    with pytest.raises(InputError, match=r"neither target\.device_map nor target\.quantization"):
        load_target(folder, tensor_parallel=True, quantization="nf4")
    target = load_target(folder)
    speculator = tiny_speculator(target).float()
    monkeypatch.setattr(target.model, "_tp_size", 2)
    with pytest.raises(InputError, match=r"streams need whole layers; use target\.device_map"):
        Streaming(speculator, "auto", 2).attach(target)
