"""Speculator folders to the hub and back: what was pushed decodes as the folder does.

The hub is a stand-in: uploads go into a cache as huggingface_hub lays it out, from where it opens
them by itself without a network.
"""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tests.commands import refused
from tests.tiny import save_tiny_target, tiny_speculator
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.speculators.checkpoint import load_speculator, save_speculator
from slipstream.targets.loading import load_target

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A cache that uploads land in, and all that is opened comes from."""
    cache, created = tmp_path / "hub", {}

    class Api:
        def create_repo(self, repo_id, private, exist_ok):
            if repo_id.startswith("others/"):
                raise PermissionError(f"403 Forbidden: you may not write to {repo_id}.\nReally.")
            created[repo_id] = private
            return f"https://huggingface.co/{repo_id}"

        def upload_folder(self, repo_id, folder_path, commit_message):
            assert repo_id in created
            own = cache / f"models--{repo_id.replace('/', '--')}"
            shutil.copytree(folder_path, own / "snapshots" / REVISION)
            (own / "refs").mkdir()
            (own / "refs" / "main").write_text(REVISION)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "own"))
    return cache


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny target's folder, and that of its speculator."""
    place = tmp_path_factory.mktemp("world")
    target = load_target(str(save_tiny_target(place / "target")), device="cpu", packed=False)
    speculator = tiny_speculator(target).float()
    return target, save_speculator(place / "model", speculator, target, 8, "# Card\n")


def test_what_was_pushed_opens_and_decodes_as_the_folder(hub, world):
    target, folder = world
    address = slipstream.push_to_hub(folder, "me/streams", private=True)
    assert address == "https://huggingface.co/me/streams"
    loaded, own = load_speculator("me/streams", target), load_speculator(folder, target)
    for name, tensor in own.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    ask = lambda drafter: slipstream.generate("w1 w2 w3", target, drafter, max_new_tokens=30)  # noqa: E731
    found = [ask(each) for each in (folder, "me/streams", slipstream.from_pretrained("me/streams"))]
    assert len({tuple(each.accepted) for each in found}) == 1
    assert [each.ids for each in found] == [ask(None).ids] * 3


def test_transformers_decodes_with_what_was_pushed(hub, world):
    target, folder = world
    slipstream.push_to_hub(folder, "me/streams")
    model = AutoModelForCausalLM.from_pretrained(target.name)
    ids, options = torch.tensor([[1, 2, 3]]), dict(max_new_tokens=20, pad_token_id=0)
    found = model.generate(ids, custom_generate="me/streams", trust_remote_code=True, **options)
    assert found.tolist() == model.generate(ids, do_sample=False, **options).tolist()
    with pytest.raises(ValueError, match="trust_remote_code"):  # nothing is executed unasked
        model.generate(ids, custom_generate="me/streams", trust_remote_code=False, **options)


def test_nothing_but_a_speculator_is_pushed(hub, world, tmp_path):
    assert "cannot be read" in refused(lambda: slipstream.push_to_hub(tmp_path, "me/streams"))
    assert not hub.exists()


def test_what_the_hub_refuses_is_one_sentence(hub, world):
    said = refused(lambda: slipstream.push_to_hub(world[1], "others/streams"))
    assert said.startswith("repo_id: ") and "403 Forbidden" in said


def test_what_is_neither_here_nor_there_is_one_sentence(hub, world):
    for call in (slipstream.from_pretrained, lambda name: load_speculator(name, world[0])):
        said = refused(lambda call=call: call("me/nothing"))
        assert said.startswith("speculator: me/nothing is no folder here")
