"""Targets with 8-bit or NF4 weights, through bitsandbytes: the linears of the layers are quantised
and frozen, embeddings, norms and LM head stay as they are.

Adapters, LoRA and streams alike, run beside quantised linears in full precision and are never
merged into them, which would round them away.
"""

import logging

import torch
from torch import nn

from slipstream.core.errors import InputError
from slipstream.targets.packed import PackedLinear

QUANTIZATIONS = ("int8", "nf4")


def settings(kind: str, dtype: torch.dtype):
    """What `from_pretrained` takes as quantization_config; NF4 computes in `dtype`.

    int8 without outlier columns (`llm_int8_threshold=0`): they are picked over all rows of a
    forward, so a token's logits would depend on what else is verified with it. Raises `InputError`
    where bitsandbytes is missing.
    """
    from transformers import BitsAndBytesConfig
    from transformers.utils import is_bitsandbytes_available

    if not is_bitsandbytes_available():
        raise InputError(
            f"target.quantization: {kind} needs bitsandbytes; pip install bitsandbytes, or set it "
            "to null"
        )
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )


def kind_in(config: dict) -> str | None:
    """How the weights that a config.json belongs to are quantised already, as `kind_of` has it;
    ValueError for another way than bitsandbytes'."""
    said = config.get("quantization_config")
    if not said:
        return None
    if said.get("quant_method") != "bitsandbytes":
        raise ValueError(
            f"its weights are quantised by {said.get('quant_method')}, which is not supported: "
            "take the model it was made of, and target.quantization"
        )
    return "int8" if said.get("load_in_8bit") else said.get("bnb_4bit_quant_type", "fp4")


def kind_of(model: nn.Module) -> str | None:
    """'int8', 'nf4' (or bitsandbytes' other 4-bit type, 'fp4'), or None."""
    if getattr(model, "is_loaded_in_8bit", False):
        return "int8"
    if getattr(model, "is_loaded_in_4bit", False):
        return model.config.quantization_config.bnb_4bit_quant_type
    return None


def is_quantized(module: nn.Module) -> bool:
    """Whether any linear at or below `module` has quantised weights."""
    return any(type(child).__module__.startswith("bitsandbytes") for child in module.modules())


def settle(model: nn.Module, dtype: torch.dtype, reorder: bool) -> None:
    """Let 8-bit linears be ready before their first forward, so that copies share their weights,
    and without outlier columns; 4-bit ones compute in `dtype`, however they were saved.

    reorder: let 4-bit linears on a CPU reorder their weights for bfloat16 arithmetic, which is for
    decoding only.
    """
    # It says at every call of a linear that activations are quantised, too.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for module in model.modules():
        if hasattr(module, "init_8bit_state"):
            module.state.threshold = 0.0
            if module.weight.CB is not None:
                module.init_8bit_state()
        if hasattr(module, "compute_type_is_set"):
            module.compute_dtype, module.compute_type_is_set = dtype, True
        if not reorder and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def reordered_back(model: nn.Module) -> None:
    """Let 4-bit weights that a forward on a CPU has reordered lie as they were loaded, with scales
    as that forward has rounded them, to bfloat16. bitsandbytes does so when it saves them, but not
    with their scales. `InputError` for scales that are quantised, too."""
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if not getattr(state, "packing_format_for_cpu", False):
            continue
        if state.original_nested:
            raise InputError(
                "target: its 4-bit weights have been reordered by a forward on this processor; "
                "load it anew, or give its name"
            )
        module.state_dict()
        state.absmax = state.absmax.T.reshape(-1).float()


def check_exact(model: nn.Module) -> None:
    """`InputError` for 8-bit linears that treat outliers of a batch apart: what is computed of a
    row would depend on those beside it."""
    for module in model.modules():
        if hasattr(module, "init_8bit_state") and module.state.threshold > 0:
            raise InputError(
                "target: its 8-bit linears have a threshold for outliers, with which rows depend "
                "on one another; load it with BitsAndBytesConfig(llm_int8_threshold=0.0), or by "
                "name"
            )


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, and what 8-bit linears keep beside them."""
    tensors: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        if hasattr(module, "init_8bit_state"):
            tensors += [module.state.CB, module.state.SCB]
    return tensors


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, scales of quantised ones included; reordered ones count as before."""
    size = model.get_memory_footprint()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            size += module.packed.numel() * module.packed.element_size()
        if hasattr(module, "init_8bit_state"):
            size += module.state.SCB.nbytes
        scales = getattr(getattr(module, "weight", None), "quant_state", None)
        if scales is not None:
            size += scales.absmax.nbytes + scales.code.nbytes
    return size
