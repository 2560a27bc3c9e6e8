"""LoRA on a target: shares its weights, saves as PEFT's own folder, merges to the same function."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tests.exhaustive import sparing
from tests.tiny import ARCHITECTURES, BUILT_AS_LLAMA, save_tiny_target, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM

from slipstream.core.errors import InputError
from slipstream.custom_generation import custom_generate
from slipstream.drafters.prompt_lookup import PromptLookup
from slipstream.targets.loading import load_target, target_of
from slipstream.targets.lora import LoraSettings, merge, merged_bytes, save_lora, with_lora
from slipstream.targets.target import Target

IDS = torch.tensor([[3, 17, 5, 29, 11, 8]])
each_architecture = pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))


def logits(target: Target) -> torch.Tensor:
    positions = torch.arange(IDS.shape[1])[None]
    return target.logits(target.forward(IDS, positions, None, None).hidden)


def adapted(target: Target, settings: LoraSettings) -> Target:
    """With LoRA layers far from zero."""
    found, trained = with_lora(target, settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in trained.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.1)
    return found


@each_architecture
def test_new_lora_layers_change_nothing_and_share_the_weights(architecture):
    target = tiny_target(architecture)
    found, trained = with_lora(target, LoraSettings(rank=2))
    assert torch.equal(logits(found), logits(target))
    theirs = {tensor.data_ptr() for tensor in target.model.parameters()}
    new = [p for p in found.model.parameters() if p.data_ptr() not in theirs]
    assert len(new) == len(trained) == 2 * target.num_layers * len(linears(target))
    assert [p for p in found.model.parameters() if p.requires_grad] == new


def linears(target: Target) -> tuple[str, ...]:
    return target.family.attention_linears + target.family.mlp_linears


@each_architecture
def test_merged_layers_compute_the_same_and_leave_the_target_alone(architecture):
    target = tiny_target(architecture)
    before = logits(target)
    found = adapted(target, LoraSettings(rank=2, alpha=6.0))
    expected = logits(found)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(logits(merge(found, packed=False)), expected, rtol=0, atol=1e-10)
    assert torch.equal(logits(target), before)


def test_only_the_modules_and_layers_asked_for_are_adapted():
    target = tiny_target()
    settings = LoraSettings(rank=2, modules=["self_attn.q_proj"], layers=[1, 3])
    names = with_lora(target, settings)[1]
    assert len(names) == 4
    assert all(".q_proj." in name for name in names)
    assert {name.split(".")[2] for name in names} == {"1", "3"}
    with pytest.raises(InputError, match=r"lora\.modules: 'w' is no linear"):
        with_lora(target, LoraSettings(modules=["w"]))
    with pytest.raises(InputError, match=r"lora\.layers: must be within 0\.\.3"):
        with_lora(target, LoraSettings(layers=[4]))


def saved(architecture: str, folder: Path) -> Target:
    target = tiny_target(architecture)
    target.model.float().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return load_target(str(folder), device="cpu", packed=False)


@pytest.mark.parametrize(
    ("architecture",),
    sparing(zip(sorted(ARCHITECTURES)), lambda each: each not in BUILT_AS_LLAMA),
)
def test_a_saved_adapter_opens_in_load_target(architecture, tmp_path):
    target = saved(architecture, tmp_path / "model")
    found = adapted(target, LoraSettings(rank=2))
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_lora(folder, found)
    opened = load_target(str(tmp_path / "model"), device="cpu", packed=False, adapter=str(folder))
    torch.testing.assert_close(logits(opened), logits(found), rtol=0, atol=1e-5)
    assert opened.fingerprint["weights"] != target.fingerprint["weights"]
    assert not any(parameter.requires_grad for parameter in opened.model.parameters())


def test_an_adapter_that_does_not_fit_is_refused(tmp_path):
    saved("llama", tmp_path / "model")
    folder = tmp_path / "adapter"
    with pytest.raises(InputError, match=r"target\.adapter: .* cannot be merged"):
        load_target(str(tmp_path / "model"), device="cpu", adapter=str(folder))
    other = saved("gpt2", tmp_path / "other")
    folder.mkdir()
    save_lora(folder, adapted(other, LoraSettings(rank=2)))
    with pytest.raises(InputError, match=r"target\.adapter: .* cannot be merged"):
        load_target(str(tmp_path / "model"), device="cpu", adapter=str(folder))


ALORA = dict(alora_invocation_tokens=[5, 9])
REPEATED = dict(layer_replication=[[0, 3], [2, 4]])


BEYOND = [
    (PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "adds a prompt"),
    (PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "adds a prompt"),
    (LoraConfig(target_modules=["q_proj"], **ALORA), "waits for invocation tokens"),
    (LoraConfig(target_modules=["q_proj"], **REPEATED), "repeats layers"),
]


@pytest.mark.parametrize(
    ("settings", "does", "quantization"),
    sparing(
        [(*each, quantization) for each in BEYOND for quantization in (None, "int8")],
        lambda settings, does, quantization: not quantization or does.startswith("waits"),
    ),
)
def test_adapters_that_do_more_than_change_weights_are_refused(
    tmp_path, settings, does, quantization
):
    """They would be left out of the answer."""
    base = save_tiny_target(tmp_path / "base", tokenizer=tiny_tokenizer())
    model = AutoModelForCausalLM.from_pretrained(base)
    target_of(model)  # which is kept with the model
    adapted = get_peft_model(model, deepcopy(settings))  # PEFT notes the folder in them
    adapted.save_pretrained(tmp_path / "adapter")
    own = dict(adapter=str(tmp_path / "adapter"), quantization=quantization)
    for call in (
        lambda: load_target(str(base), **own),
        lambda: target_of(adapted),
        lambda: adapted.generate(
            IDS, custom_generate=custom_generate, drafter=PromptLookup(2, 3), pad_token_id=0
        ),
    ):
        with pytest.raises(InputError, match=does):
            call()


@pytest.mark.parametrize(
    "more", [{"trainable_token_indices": [3, 5]}, {"modules_to_save": ["lm_head"]}, {}]
)
def test_adapters_of_embeddings_and_heads_decode_as_in_peft(more):
    modules = ["q_proj"] if more else ["q_proj", "embed_tokens"]
    adapted = get_peft_model(tiny_target().model, LoraConfig(target_modules=modules, **more))
    for parameter in filter(lambda each: each.requires_grad, adapted.parameters()):
        parameter.data.normal_(std=0.3)
    options = dict(max_new_tokens=10, do_sample=False, pad_token_id=0)
    expected = adapted.eval().generate(IDS, **options)
    options |= dict(custom_generate=custom_generate, drafter=PromptLookup(2, 3))
    assert torch.equal(adapted.generate(IDS, **options), expected)


def test_merging_copies_no_more_than_it_changes():
    target = tiny_target()
    found = adapted(target, LoraSettings(rank=2, layers=[1]))
    merged = merge(found, packed=False)
    own = {tensor.data_ptr() for tensor in target.model.parameters()}
    new = [each for each in merged.model.parameters() if each.data_ptr() not in own]
    assert len(new) == len(target.family.attention_linears + target.family.mlp_linears)
    assert merged_bytes(found) >= sum(tensor.nbytes for tensor in new)
