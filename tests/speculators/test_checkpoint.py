"""The speculator folder: it opens by its path alone, and refuses what does not fit or is broken."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.tiny import save_tiny_target, tiny_tokenizer

from slipstream.core.errors import InputError
from slipstream.core.files import SUMS
from slipstream.speculators.checkpoint import (
    load_speculator,
    read_config,
    save_speculator,
    start_from_speculator,
)
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.speculator import StreamingSpeculator
from slipstream.targets.loading import load_target
from slipstream.targets.target import Target

CONFIG = StreamingConfig(
    num_streams=2,
    num_msa_layers=2,
    adapter_rank=3,
    mlp="adapter",
    initialisation_rank=2,
    stream_positions="same",
    pruning_rank=5,
)
BROKEN = [
    ("num_streams", "two"), ("num_streams", 2.5), ("num_msa_layers", None), ("unknown", 1),
    ("mlp", "none"), ("num_msa_layers", 9),
]  # fmt: skip
"""Arguments that no speculator of this target has."""
FRESH_PROCESS = """
import sys
import torch
from slipstream.speculators.checkpoint import load_speculator
from slipstream.targets.loading import load_target
from tests.speculators.test_checkpoint import digest_of_streams
torch.set_num_threads(1)
target = load_target(sys.argv[1], device="cpu", packed=False)
print(digest_of_streams(target, load_speculator(sys.argv[2], target)))
"""


def open_target(folder: Path) -> Target:
    return load_target(str(folder), device="cpu", packed=False)


@torch.no_grad()
def digest_of_streams(target: Target, speculator: StreamingSpeculator) -> str:
    """SHA-256 of streams and early-exit logits over fixed states."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 3, target.hidden_size, generator=generator)
    sees = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    cache = target.new_cache(9)
    ids = torch.tensor([[1, 2, 3]])
    target.forward(ids, torch.arange(3)[None], None, cache)
    cache.commit_first([3])
    streams = speculator.run_streams(target, hidden, ids, torch.arange(3)[None], sees, cache)
    early = target.logits(speculator.early_exit(hidden))
    return hashlib.sha256(streams.numpy().tobytes() + early.numpy().tobytes()).hexdigest()


def random_speculator(target: Target, seed: int = 0) -> StreamingSpeculator:
    torch.manual_seed(seed)
    speculator = StreamingSpeculator(target, CONFIG)
    with torch.no_grad():
        for parameter in speculator.parameters():
            parameter.normal_(std=0.3)
    return speculator


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def target(target_folder) -> Target:
    return open_target(target_folder)


@pytest.fixture
def folder(tmp_path, target) -> Path:
    return save_speculator(tmp_path / "speculator", random_speculator(target), target, 77, "# A")


def refused(folder: Path, target: Target) -> str:
    """The one sentence with which the folder is refused."""
    with pytest.raises(InputError) as caught:
        load_speculator(folder, target)
    message = str(caught.value)
    assert message.startswith("speculator: ") and "\n" not in message
    return message


def change_tensors(folder: Path, change) -> None:
    (folder / SUMS).unlink(missing_ok=True)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_with_another_checksum_is_refused(folder, target, name):
    path = folder / name
    if name == "config.json":
        change_config(folder, trained_length=9)
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert f"{path} is not what was written" in refused(folder, target)


@pytest.mark.exhaustive
def test_a_folder_opens_by_its_path_alone_in_a_fresh_process(target_folder, target, folder):
    expected = digest_of_streams(target, random_speculator(target))
    assert expected != digest_of_streams(target, random_speculator(target, seed=1))
    result = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(target_folder), str(folder)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == expected


def test_a_round_trip_gives_back_every_tensor_and_argument(target, folder):
    loaded, saved = load_speculator(folder, target), random_speculator(target)
    assert loaded.config == CONFIG and not loaded.training
    assert loaded.state_dict().keys() == saved.state_dict().keys()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_folder_holds_its_own_description_and_trained_tensors_only(target, folder):
    expected = {
        "config.json", "model.safetensors", "README.md", "custom_generate/generate.py", SUMS,
    }  # fmt: skip
    assert set(content(folder)) == expected
    assert (folder / "README.md").read_text() == "# A"
    config = read_config(folder)
    assert config["trained_length"] == 77 and config["target"] == target.name
    assert config["target_fingerprint"] == target.fingerprint
    assert StreamingConfig(**config["arguments"]) == CONFIG
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    trained = sum(parameter.numel() for parameter in random_speculator(target).parameters())
    assert sum(tensor.numel() for tensor in tensors.values()) == trained


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("pruning.up"), ["'pruning.up'", "none"]),
        (lambda t: t.update(extra=torch.zeros(2)), ["'extra'", "none"]),
        (lambda t: t.update(embeddings=torch.zeros(3, 24)), ["'embeddings'", "(2, 24)", "(3, 24)"]),
        (lambda t: t["pruning.up"].view(-1)[3].fill_(torch.nan), ["NaN", "'pruning.up'"]),
        (lambda t: t["pruning.up"].view(-1)[3].fill_(-torch.inf), ["infinity", "'pruning.up'"]),
        (lambda t: t.update({"pruning.up": t["pruning.up"].to(torch.int8)}), ["int8 numbers in"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(folder, target, change, said):
    change_tensors(folder, change)
    message = refused(folder, target)
    assert all(word in message for word in said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({"arguments": wrong}, "cannot be read") for wrong in (None, [1])),
        ({"target_fingerprint": None}, "cannot be read"),
        ({"target_fingerprint": {}}, "was trained for"),
        ({"target": 7}, "cannot be read"),
        *(({"trained_length": wrong}, "cannot be read") for wrong in (None, "281", [1])),
        *(({"format_version": wrong}, f"format {wrong!r}") for wrong in (2, 0, None, "1")),
        *(({"kind": wrong}, f"kind {wrong!r}") for wrong in ("unheard-of", None, ["streaming"])),
        ({"kind": "owl"}, "of others install the package"),
        *(({"arguments": {name: wrong}}, name) for name, wrong in BROKEN),
        ({"arguments": {"adapter_rank": 10**9}}, "1000000000 is more than any size"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(folder, target, changes, said):
    if isinstance(own := changes.get("arguments"), dict):
        changes = {"arguments": read_config(folder)["arguments"] | own}
    change_config(folder, **changes)
    assert said in refused(folder, target)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"text"', "\x00\xff", "[" * 100_000, "{}"])
def test_a_config_that_is_no_config_is_refused(folder, target, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json cannot be read" in refused(folder, target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_missing_is_named(tmp_path, folder, target, name):
    (folder / name).unlink()
    assert name in refused(folder, target)
    assert "nothing" in refused(tmp_path / "nothing", target)


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_a_truncated_weight_file_is_refused(folder, target, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "model.safetensors" in refused(folder, target)


def test_another_target_is_refused(folder, tmp_path):
    other = open_target(save_tiny_target(tmp_path / "other", seed=1))
    message = refused(folder, other)
    assert "weights" in message and str(other.name) in message


def test_another_tokenizer_is_refused(folder, tmp_path):
    other = save_tiny_target(tmp_path / "other", tokenizer=tiny_tokenizer(prefix="v"))
    assert "tokenizer" in refused(folder, open_target(other))


def test_another_config_is_refused(folder, tmp_path):
    other = save_tiny_target(tmp_path / "other", rms_norm_eps=1e-3)
    assert "config" in refused(folder, open_target(other))


def test_overwriting_replaces_the_whole_folder(folder, target):
    (folder / "left-over").write_text("of an earlier format")
    save_speculator(folder, random_speculator(target, seed=1), target, 5, "# B")
    expected = {
        "config.json", "model.safetensors", "README.md", "custom_generate/generate.py", SUMS,
    }  # fmt: skip
    assert set(content(folder)) == expected
    loaded = load_speculator(folder, target)
    assert torch.equal(loaded.embeddings, random_speculator(target, seed=1).embeddings)
    assert [path.name for path in folder.parent.iterdir()] == ["speculator"]


@pytest.mark.parametrize(
    "broken", ["safetensors.torch.save_file", "os.replace", "os.rename", "pathlib.Path.write_text"]
)
def test_a_failing_save_leaves_the_old_folder_intact(folder, target, monkeypatch, broken):
    before = content(folder)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        try:
            save_speculator(folder, random_speculator(target, seed=1), target, 5, "# B")
        except OSError:
            assert content(folder) == before
        else:
            load_speculator(folder, target)
    assert [path.name for path in folder.parent.iterdir()] == ["speculator"]


def test_a_place_that_cannot_be_written_is_named(tmp_path, target):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InputError, match="file"):
        save_speculator(tmp_path / "file" / "inner", random_speculator(target), target, 5, "# A")


def test_a_file_in_the_way_is_refused_and_left_alone(tmp_path, target):
    place = tmp_path / "speculator"
    place.write_text("mine")
    with pytest.raises(InputError, match="speculator"):
        save_speculator(place, random_speculator(target), target, 5, "# A")
    assert place.read_text() == "mine"


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path, target):
    place = tmp_path / "thesis"
    place.mkdir()
    (place / "chapter.txt").write_text("mine")
    with pytest.raises(InputError, match="thesis"):
        save_speculator(place, random_speculator(target), target, 5, "# A")
    assert content(place) == {"chapter.txt": b"mine"}


def test_a_speculator_with_more_parts_takes_over_what_it_has_in_common(target, folder):
    more = StreamingSpeculator(target, replace(CONFIG, transition_rank=2, root_rank=3))
    before = {name: tensor.clone() for name, tensor in more.state_dict().items()}
    start_from_speculator(more, folder)
    known = random_speculator(target).state_dict()
    assert len(before) > len(known)
    for name, tensor in more.state_dict().items():
        assert torch.equal(tensor, known.get(name, before[name])), name


def test_a_folder_with_nothing_in_common_is_no_start(target, folder):
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[1:]])
    change_tensors(folder, lambda tensors: tensors.update(other=tensors.pop(next(iter(tensors)))))
    with pytest.raises(InputError, match=r"training\.start_from: .* shares no tensor"):
        start_from_speculator(random_speculator(target), folder)
    with pytest.raises(InputError, match="cannot be read"):
        start_from_speculator(random_speculator(target), folder / "absent")
