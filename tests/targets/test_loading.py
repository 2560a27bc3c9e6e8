"""Loading from a folder: the fingerprint, packing, and what cannot be opened."""

import json
from itertools import product
from math import isnan
from pathlib import Path
from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from tests.exhaustive import sparing
from tests.tiny import save_tiny_target, tiny_speculator, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.core.errors import InputError
from slipstream.core.files import replaced_folder
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.checkpoint import load_speculator, save_speculator
from slipstream.speculators.medusa import MedusaConfig, MedusaSpeculator
from slipstream.targets.fingerprints import fingerprint
from slipstream.targets.loading import load_target, target_of
from slipstream.targets.lora import LoraSettings, save_lora, with_lora
from slipstream.targets.packed import PackedLinear


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


def prints(path, **arguments) -> dict[str, str]:
    return load_target(str(path), **({"device": "cpu", "packed": False} | arguments)).fingerprint


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert set(one) == set(other) == {"config", "tokenizer", "weights"}
    return {part for part in one if one[part] != other[part]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_fingerprint_does_not_depend_on_the_dtype(folder, dtype):
    assert prints(folder) == prints(folder, dtype=dtype)


def test_the_fingerprint_does_not_depend_on_packing_or_place(folder, tmp_path):
    moved = save_tiny_target(tmp_path / "elsewhere")
    assert prints(moved) == prints(folder) == prints(folder, packed=True)


def test_the_fingerprint_does_not_depend_on_the_dtype_it_was_saved_in(folder, tmp_path):
    target = load_target(str(folder), dtype="bfloat16", device="cpu", packed=False)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    assert prints(tmp_path) == prints(folder)


def test_other_weights_give_another_fingerprint(folder, tmp_path):
    other = save_tiny_target(tmp_path, seed=1)
    assert differing(prints(folder), prints(other)) == {"weights"}


@pytest.mark.parametrize("name", ["model.layers.3.mlp.down_proj.weight", "model.norm.weight"])
def test_one_changed_tensor_gives_another_fingerprint(folder, tmp_path, name):
    target = load_target(str(folder), device="cpu", packed=False)
    with torch.no_grad():
        target.model.get_parameter(name).mul_(1.05)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    assert differing(prints(folder), prints(tmp_path)) == {"weights"}


def test_a_change_in_the_second_half_of_a_large_tensor_counts(tmp_path):
    """8,160 values: more than the 4,096 of which the fingerprint is made, evenly spaced."""
    tokenizer = tiny_tokenizer(340)
    first = save_tiny_target(tmp_path / "first", tokenizer=tokenizer, vocab_size=340)
    target = load_target(str(first), device="cpu", packed=False)
    with torch.no_grad():
        target.model.model.embed_tokens.weight[180:].neg_()
    target.model.save_pretrained(tmp_path / "second")
    tokenizer.save_pretrained(tmp_path / "second")
    assert differing(prints(first), prints(tmp_path / "second")) == {"weights"}


def test_another_tokenizer_gives_another_fingerprint(folder, tmp_path):
    words = save_tiny_target(tmp_path / "words", tokenizer=tiny_tokenizer(prefix="v"))
    assert differing(prints(folder), prints(words)) == {"tokenizer"}
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    template = save_tiny_target(tmp_path / "template", tokenizer=tokenizer)
    assert differing(prints(folder), prints(template)) == {"tokenizer"}


def test_a_template_is_told_its_arguments_for_good(tmp_path):
    """With training, decoding and the fingerprint, as with another template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ 'w9 ' if brief else 'w8 ' }}{{ messages[0]['content'] }}"
    folder = save_tiny_target(tmp_path, tokenizer=tokenizer)
    told = load_target(str(folder), device="cpu", chat_template_kwargs={"brief": True})
    plain = load_target(str(folder), device="cpu")
    rendered = [render_prompt(target.tokenizer, "w5") for target in (plain, told)]
    assert rendered == [[8, 5], [9, 5]]
    assert differing(plain.fingerprint, told.fingerprint) == {"tokenizer"}
    speculator = MedusaSpeculator(told, MedusaConfig(num_heads=1))
    saved = save_speculator(tmp_path / "heads", speculator, told, 8, "")
    assert load_speculator(saved, told)
    with pytest.raises(InputError, match="with another chat_template_kwargs than"):
        load_speculator(saved, plain)
    given = load_target(str(folder), device="cpu", chat_template="w7 {{ messages[0]['content'] }}")
    with pytest.raises(InputError, match="with another chat_template than"):
        load_speculator(saved, given)
    assert given.tokenizer.own_template and not getattr(told.tokenizer, "own_template", False)
    (tmp_path / "own.jinja").write_text("w7 {{ messages[0]['content'] }}")
    read = load_target(str(folder), device="cpu", chat_template=str(tmp_path / "own.jinja"))
    assert read.fingerprint == given.fingerprint
    for wrong in ("", "other.jinja", "w7"):
        said = refused(str(folder), chat_template=wrong)
        assert said.startswith(f"target.chat_template: '{wrong}' is no file of text")
    for wrong in ({"a b": True}, {1: 2}, {"brief": None}):
        said = refused(str(folder), chat_template_kwargs=wrong)
        assert said.startswith("target.chat_template_kwargs: ") and "must be a name" in said


def test_another_config_gives_another_fingerprint(folder, tmp_path):
    other = save_tiny_target(tmp_path, rms_norm_eps=1e-3)
    assert differing(prints(folder), prints(other)) == {"config"}


def test_what_scripts_set_in_a_config_makes_no_other_model(folder):
    """Nor does a field of a later version that says nothing."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = target_of(model).fingerprint
    model.config.pad_token_id, model.config.output_hidden_states = 2, True
    model.config.attention_dropout, model.config.initializer_range = 0.1, 0.5
    model.config.architectures, model.config.of_later_versions = ["Other"], None
    assert fingerprint(target_of(model)) == before
    model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 5.0}
    assert differing(fingerprint(target_of(model)), before) == {"config"}


def test_weights_saved_in_bfloat16_are_the_same_opened_in_float16(folder, tmp_path):
    target = load_target(str(folder), dtype="bfloat16", device="cpu", packed=False)
    with torch.no_grad():
        target.model.lm_head.weight[:4] *= 1e-4  # float16 has no such numbers exactly
    target.model.save_pretrained(tmp_path)
    one, other = (
        target_of(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()).fingerprint
        for dtype in (torch.bfloat16, torch.float16)
    )
    assert one == other


def test_a_loaded_target_is_frozen_named_and_computes_what_was_saved(folder):
    target = load_target(str(folder), device="cpu", packed=False)
    assert target.name == str(folder) and target.dtype == torch.float32
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.tokenizer.get_vocab() == {f"w{number}": number for number in range(40)}
    ids = torch.tensor([[1, 2, 3]])
    expected = tiny_target().model.float()(ids).logits
    assert torch.equal(target.model(ids).logits, expected)


def test_packing_is_on_by_default_and_changes_no_greedy_token(folder):
    fast = load_target(str(folder), device="cpu")
    plain = load_target(str(folder), device="cpu", packed=False)
    assert sum(isinstance(module, PackedLinear) for module in fast.model.modules()) == 29
    answers = [
        PlainDecoder(target, Sampling(), Limits(20)).generate([4, 5, 6]) for target in (fast, plain)
    ]
    assert answers[0].ids == answers[1].ids and answers[0].text == answers[1].text
    assert answers[0].text.split() == [f"w{token}" for token in answers[0].ids]


def refused(name: str, **arguments) -> str:
    """The one sentence with which loading is refused."""
    with pytest.raises(InputError) as caught:
        load_target(name, **({"device": "cpu"} | arguments))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "nothing/there"}, "target.name: 'nothing/there'"),
        ({"dtype": "int3"}, "dtype: must be one of float32, bfloat16"),
        ({"device": "warp"}, "target.device: 'warp'"),
    ],
)
def test_what_there_is_not_is_named(folder, given, said):
    assert refused(**({"name": str(folder)} | given)).startswith(said)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda old: old[:2000]),
        ("config.json", lambda old: old[:40]),
        ("config.json", lambda old: old.replace(b'_attention_heads": 4', b'_attention_heads": 5')),
        ("config.json", lambda old: old.replace(b'hidden_size": 24', b'hidden_size": "wide"')),
        ("config.json", lambda old: old.replace(b'_type": "llama"', b'_type": ["llama"]')),
    ],
)
def test_a_broken_file_is_refused(tmp_path, name, change):
    path = save_tiny_target(tmp_path) / name
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    assert refused(str(tmp_path)).startswith("target.name: ")


def test_auto_is_the_current_device_or_that_of_the_process(folder, monkeypatch):
    """A worker of a server loads its draft model after its target."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert "'cuda:1' is not available" in refused(str(folder), device="auto")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert "'cuda:3' is not available" in refused(str(folder), device="auto")


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    tiny_target().model.float().save_pretrained(tmp_path)
    assert refused(str(tmp_path)).startswith("target.name: ")


@pytest.mark.parametrize("part", ["model.layers.3.", "model.norm.weight", "lm_head.weight"])
def test_a_folder_that_lacks_weights_is_refused(tmp_path, part):
    save_tiny_target(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(part)}
    assert len(kept) < len(tensors)
    safetensors.torch.save_file(kept, path, {"format": "pt"})
    text = refused(str(tmp_path))
    assert f"lacks {len(tensors) - len(kept)} tensor" in text and part in text


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "gpt_neox"])
def test_tied_weights_are_not_missing(tmp_path, architecture):
    target = tiny_target(architecture, tie_word_embeddings=True)
    target.model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_target(str(tmp_path), device="cpu").fingerprint


@pytest.mark.parametrize(
    ("name", "wrong"),
    sparing(
        product(
            ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"],
            [torch.nan, torch.inf, -torch.inf],
        ),
        lambda name, wrong: isnan(wrong) == ("embed" in name) and wrong != torch.inf,
    ),
)
def test_weights_that_are_not_finite_are_refused(tmp_path, name, wrong):
    """One number, also one that the fingerprint leaves out."""
    save_tiny_target(tmp_path, tokenizer=tiny_tokenizer(340), vocab_size=340)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors[name].view(-1)[1] = wrong
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    text = refused(str(tmp_path))
    assert "NaN or infinity" in text and name in text


def test_empty_and_eight_bit_tensors_have_a_fingerprint():
    target = tiny_target()
    target.model.register_buffer("nothing", torch.zeros(0))
    target.model.register_buffer("eight_bits", torch.ones(3).to(torch.float8_e4m3fn))
    assert fingerprint(target)["weights"]


def spread_over(layers: int) -> dict[str, str]:
    """A device map with the upper layers on the disk."""
    places = {f"model.layers.{layer}": "cpu" if layer < 2 else "disk" for layer in range(layers)}
    others = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    return places | dict.fromkeys(others, "cpu")


@pytest.mark.parametrize("schedule", ["fused", "deferred"])
def test_a_device_mapped_target_decodes_the_same(tmp_path, schedule):
    folder = str(save_tiny_target(tmp_path / "target"))
    whole = load_target(folder, packed=False)
    mapped = load_target(folder, device_map=spread_over(whole.num_layers))
    assert mapped.fingerprint == whole.fingerprint
    assert {parameter.device.type for parameter in mapped.model.parameters()} == {"cpu", "meta"}
    speculator = tiny_speculator(whole).float()
    expected = PlainDecoder(whole, Sampling(), Limits(20)).generate([3, 17, 5]).ids
    assert PlainDecoder(mapped, Sampling(), Limits(20)).generate([3, 17, 5]).ids == expected
    for target in (whole, mapped):
        engine = Engine(target, Streaming(speculator, schedule, 3), Sampling(), Limits(20), 8)
        assert engine.generate([3, 17, 5]).ids == expected


def test_a_flipped_bit_of_a_target_or_an_adapter_is_noticed(folder, tmp_path):
    """Where the folder has checksums; its card may be edited."""
    adapted, _ = with_lora(load_target(str(folder), packed=False), LoraSettings(rank=2))
    for name, save in (("target", save_tiny_target), ("adapter", lambda x: save_lora(x, adapted))):
        with replaced_folder(tmp_path / name) as made:
            save(made)
            (made / "README.md").write_text("# card")
        (tmp_path / name / "README.md").write_text("# edited")
    given = {"name": str(tmp_path / "target"), "adapter": str(tmp_path / "adapter")}
    load_target(**given)
    for field, path in (
        ("adapter", tmp_path / "adapter" / "adapter_model.safetensors"),
        ("name", tmp_path / "target" / "model.safetensors"),
        ("name", tmp_path / "target" / "config.json"),
    ):
        whole = path.read_bytes()
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        with pytest.raises(InputError, match=f"^target.{field}: .*{path.name}.* SHA256SUMS"):
            load_target(**given)
        path.write_bytes(whole)


@pytest.mark.parametrize("mapped", [True, False])
def test_an_adapter_is_merged_in_float32_and_the_target_keeps_its_dtype(folder, tmp_path, mapped):
    """Layer by layer: the whole in float32 would take twice the memory."""
    base = load_target(str(folder), "bfloat16", "cpu", packed=False)
    base.model.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    adapted, trained = with_lora(base, LoraSettings(2))
    for parameter in trained.values():
        parameter.data.normal_(std=0.3)
    save_lora(tmp_path / "adapter", adapted)
    place = dict(device_map={"": "cpu"}) if mapped else dict(device="cpu")
    given = dict(packed=False, adapter=str(tmp_path / "adapter"), **place)
    wide = load_target(str(tmp_path / "base"), "float32", **given)
    with patch.object(PreTrainedModel, "float", side_effect=AssertionError):
        found = load_target(str(tmp_path / "base"), "bfloat16", **given)
    assert found.fingerprint == wide.fingerprint
    expected = dict(wide.model.named_parameters())
    for name, parameter in found.model.named_parameters():
        assert torch.equal(parameter, expected[name].bfloat16()), name


def test_gemmas_scale_of_embeddings_is_that_of_the_dtype(tmp_path):
    """And not of the one that the folder was saved in."""
    target = tiny_target("gemma", hidden_size=20)
    target.model.bfloat16().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    ours = load_target(str(tmp_path), "float32", "cpu", packed=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(ours.model(ids).logits, theirs(ids).logits)


def test_a_medusa_with_heads_of_its_own_opens_for_reordered_weights(folder, tmp_path):
    target = load_target(str(folder), device="cpu", packed=False)
    speculator = MedusaSpeculator(target, MedusaConfig(own_heads=True, num_heads=2))
    save_speculator(tmp_path / "model", speculator, target, 8, "card")
    packed = load_target(str(folder), device="cpu")
    opened = load_speculator(str(tmp_path / "model"), packed)
    for name, tensor in speculator.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor)


def test_what_a_model_asks_for_besides_is_said(tmp_path, caplog):
    """Many chat models come with a penalty, which `generate` of transformers applies."""
    save_tiny_target(tmp_path)
    asked = dict(repetition_penalty=1.05, no_repeat_ngram_size=0, temperature=0.7, do_sample=True)
    asked |= dict(forced_bos_token_id=2, epsilon_cutoff=0.01, eta_cutoff=0.0)
    (tmp_path / "generation_config.json").write_text(json.dumps(asked))
    load_target(str(tmp_path))
    said = [record.message for record in caplog.records if "left out" in record.message]
    left_out = "repetition_penalty=1.05", "epsilon_cutoff=0.01", "forced_bos_token_id=2"
    assert said == [f"{tmp_path} asks for {each}, which is left out" for each in left_out]


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_weights_quantised_by_others_are_refused(folder, tmp_path, method):
    """transformers would keep float8 weights and their scales, and a cast would lose the scales."""
    config = json.loads((Path(folder) / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config | quantised))
    assert f"quantised by {method}, which is not supported" in refused(str(tmp_path))


def test_an_architecture_without_a_family_is_refused_before_its_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    assert refused(str(tmp_path)).startswith("target: architecture 'mixtral' is not supported")


def test_gpt_neo_over_several_devices_decodes_the_same(tmp_path):
    """Its layers are called part by part, and their own hooks never run."""
    tiny_target("gpt_neo").model.float().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    whole = load_target(str(tmp_path), packed=False)
    places = {f"transformer.h.{layer}": "cpu" for layer in range(whole.num_layers)}
    places |= {"transformer.h.1": "disk", "transformer.h.2": "disk"}
    others = "transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"
    mapped = load_target(str(tmp_path), device_map=places | dict.fromkeys(others, "cpu"))
    found = [
        PlainDecoder(own, Sampling(), Limits(20)).generate([3, 17, 5]).ids
        for own in (whole, mapped)
    ]
    assert found[0] == found[1]
