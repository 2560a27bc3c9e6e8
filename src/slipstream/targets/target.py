"""Target: the causal language model whose output is sped up, as a few calls on rows.

A forward is: embed the rows, run layers with visitors between them, norm, head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from slipstream.core.cache import StepCache
from slipstream.core.errors import InputError
from slipstream.core.trees import Trees
from slipstream.targets.attention import added, our_attention
from slipstream.targets.families import Family, context_of, device_of, family_of
from slipstream.targets.rows import LayerVisitor, Rows

Outcome = TypeVar("Outcome")


def token_ids(ids: int | list[int] | torch.Tensor | None) -> frozenset[int]:
    """One token id, several or none, as a generation config has them; `InputError` for others."""
    ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    one = [] if ids is None else [ids]
    several = ids if isinstance(ids, list | tuple | set | frozenset) else one
    if not all(isinstance(each, int) for each in several):
        raise InputError(f"eos_token_id: {ids!r} is neither a token's number nor a list of numbers")
    return frozenset(several)


def beyond_weights(model: nn.Module) -> str:
    """What adapters of a PEFT model do besides changing what its linears compute, as that would be
    left out here; "" for nothing."""
    # within PEFT's own `generate` the model is the one inside
    whole = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", model)
    for config in (getattr(whole, "peft_config", None) or {}).values():
        does = {
            "adds a prompt": config.is_prompt_learning,
            "weighs adapters by a forward of its own": config.peft_type.value == "XLORA",
            "waits for invocation tokens": getattr(config, "alora_invocation_tokens", None),
            "repeats layers": getattr(config, "layer_replication", None),
        }
        for what, whether in does.items():
            if whether:
                return f"{config.peft_type.value} that {what}"
    return ""


class Target:
    """A Hugging Face decoder behind calls on rows. L layers, width D, vocabulary V."""

    def __init__(self, model: nn.Module, tokenizer=None, name: str = ""):
        if unkept := beyond_weights(model):
            raise InputError(
                f"target: it has an adapter, {unkept}, which decoding would leave out; take one "
                "that changes weights alone, such as LoRA"
            )
        if not hasattr(model, "generation_config") or model.get_output_embeddings() is None:
            raise InputError(
                f"target: {type(model).__name__} has no head for tokens; load it with "
                "AutoModelForCausalLM"
            )
        self.family: Family = family_of(model)
        attention, needed = model.config._attn_implementation, self.family.attention
        if attention != needed:
            raise InputError(
                f"target: attention {attention!r} cannot take boolean masks; load the model with "
                f"attn_implementation={needed!r}"
            )
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.num_layers = len(self.family.layers)
        self.hidden_size = model.config.hidden_size
        self.embedding_size = model.get_input_embeddings().weight.shape[-1]
        self.vocab_size = model.config.vocab_size
        self.max_positions = context_of(model.config)
        self.fingerprint: dict[str, str] = {}
        self.loading: dict[str, object] = {}  # with which arguments the same model is loaded again
        self.checkpointing = False  # in training, layers run again in the backward pass
        self.compiled = None  # or `CompiledLayers`, which run the layers of decoding steps
        self.compile_mode: str | None = None  # that of `compile_target`, once somebody chose

    def of_vocabulary(self, size: int) -> "Target":
        """The same model with `size` logits, of which the last are cut or are never drawn."""
        if size == self.vocab_size:
            return self
        other = copy(self)
        other.vocab_size = size
        return other

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def num_parallel(self) -> int:
        """Processes that every layer is split over."""
        return getattr(self.model, "tp_size", None) or 1

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an answer, as `generate` has them."""
        return token_ids(self.model.generation_config.eos_token_id)

    def new_cache(
        self, capacity: int, batch_size: int = 1, instead_of: StepCache | None = None
    ) -> StepCache:
        """An empty cache with at least `capacity` slots for every layer; instead_of: another one,
        whose sequences go on in it."""
        if self.compiled is None:
            return self.allocate(capacity, batch_size)
        return self.compiled.new_cache(capacity, batch_size, instead_of)

    def allocate(
        self, capacity: int, batch_size: int, granularity: int = 1, spare: int = 0
    ) -> StepCache:
        """A cache over buffers of its own."""
        heads, size = self.family.cache_shape
        heads //= self.num_parallel if self.family.splits_heads else 1
        devices = [device_of(layer) for layer in self.family.layers]
        sizes = capacity, batch_size, self.dtype, granularity, spare
        return StepCache(devices, heads, size, *sizes)

    def token_embeddings(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) ids -> (..., `embedding_size`), without positions."""
        return self.model.get_input_embeddings()(self._known(ids))

    @property
    def embedding_table(self) -> torch.Tensor | None:
        """(V, `embedding_size`), where token embeddings are a frozen table in one place; else None:
        they must be asked for."""
        module = self.model.get_input_embeddings()
        if type(module) is not nn.Embedding or hasattr(module, "_hf_hook"):
            return None
        table, known = module.weight, min(len(module.weight), self.model.config.vocab_size)
        sharded = hasattr(table, "full_tensor")
        if table.requires_grad or sharded or known < self.vocab_size:
            return None
        return table[: self.vocab_size]

    def _known(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids that the model has embeddings for; those beyond are padding."""
        known = self.model.config.vocab_size
        return ids if known >= self.vocab_size else ids.clamp(max=known - 1)

    def embed(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> Rows:
        """(B, R) ids and positions, (B, 1, R, K) mask -> rows before layer 0."""
        return Rows(self.family.embed(self._known(ids), positions), positions, mask)

    def run_layers(self, layers: range, rows: Rows, cache: StepCache | None) -> Rows:
        """Run a span of the target's own layers; replaces `rows.hidden`."""
        return self.run_modules(list(self.family.layers)[layers.start : layers.stop], rows, cache)

    def run_modules(
        self, modules: Sequence[nn.Module], rows: Rows, cache: StepCache | None
    ) -> Rows:
        """Run decoder layers of the target's architecture, and `rows.readout`; replaces
        `rows.hidden` and `rows.outcome`."""
        device, compiled = rows.hidden.device, isinstance(cache, StepCache) and self.compiled
        if len(modules):
            with our_attention(self.model.config):
                if compiled and rows.mask is not None:
                    return compiled(modules, rows, cache)
                self.run_each(modules, rows, cache, self.family.run_layer)
        # With a device map the layers may have left them elsewhere.
        rows.hidden = rows.hidden.to(device)
        rows.read_out()
        return rows

    def run_each(
        self, modules: Sequence[nn.Module], rows: Rows, cache: StepCache | None, run_layer: Callable
    ) -> None:
        """The layers one by one, within `our_attention`, each by `run_layer` (as a family's)."""
        family, groups, seen = self.family, self.family.groups, (rows.positions, rows.mask)
        if rows.prepared[0] is not seen[0] or rows.prepared[1] is not seen[1]:
            rows.prepared = *seen, family.rotary(rows.hidden, rows.positions), {}
        rotary, masks = rows.prepared[2:]
        if rows.mask is not None:
            committed = rows.mask.shape[-1] - rows.hidden.shape[1]
        else:
            committed = 0 if cache is None else cache.slots
        for module in modules:
            window = family.window(module)
            if window not in masks:
                mask = rows.mask_within(window, committed)
                masks[window] = None if mask is None else added(mask, groups, rows.hidden.dtype)
            given = module, rows.hidden, masks[window], rows.positions, rotary, cache
            if self.checkpointing and torch.is_grad_enabled():
                around = partial(self._around_again, rows)
                rows.hidden = checkpoint(run_layer, *given, use_reentrant=False, context_fn=around)
            else:
                rows.hidden = run_layer(*given)

    def _around_again(self, rows: Rows) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Contexts for `checkpoint`: of a layer's first run (which needs no further one), and of
        its recomputation in the backward pass."""

        @contextmanager
        def again() -> Iterator[None]:
            acting = rows.acting.acting_on(self, rows) if rows.acting else nullcontext()
            with acting, our_attention(self.model.config):
                yield

        return nullcontext(), again()

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: StepCache | None,
        visitors: Sequence[LayerVisitor] = (),
        trees: Trees | None = None,
        last: torch.Tensor | None = None,
        repeats: bool = False,
        readout: Callable[[Rows], object] | None = None,
    ) -> Rows:
        """All layers over the rows; the result's hidden states are before the final norm.

        Visitors of one layer come in the order given. trees, last, repeats: as in `Rows`; readout:
        after the last layer.
        """
        rows, done = self.embed(ids, positions, mask), 0
        rows.trees, rows.last, rows.repeats = trees, last, repeats
        with ExitStack() as visits:
            visits.enter_context(our_attention(self.model.config))  # once, for all spans of layers
            for visitor in sorted(visitors, key=lambda visitor: visitor.layer):
                rows = self.run_layers(range(done, visitor.layer), rows, cache)
                rows, done = visits.enter_context(visitor.visit(rows)), visitor.layer
            rows.readout = readout
            return self.run_layers(range(done, self.num_layers), rows, cache)

    def replayed(
        self,
        run: Callable[..., Outcome],
        settings: tuple,
        *inputs: torch.Tensor,
        often: bool = True,
        cache: StepCache | None = None,
    ) -> Outcome:
        """`run(*settings, *inputs)`, a call that every decoding step makes; inputs: tensors whose
        first dimension is B. Where graphs are captured, it is one graph, with all that it calls.
        often: whether these shapes recur; cache: passed before the other arguments, for the layers
        that `run` runs."""
        whole = partial(run, *(() if cache is None else (cache,)), *settings)
        if self.compiled is not None and often:
            return self.compiled.replayed(whole, (run, settings), inputs, cache)
        return whole(*inputs)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands between the layers and the LM head: (..., D) -> (..., width that the head
        takes), on the device of `hidden`."""
        return self.family.norm(hidden).to(hidden.device)

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head: (..., D) -> (..., V)."""
        return self.logits_of_normed(self.norm(hidden))

    def node_logits(self, rows: Rows) -> torch.Tensor:
        """(B, N, V) after the N node rows: a `readout`."""
        return self.logits(rows.hidden[:, : rows.num_nodes])

    def logits_of_normed(self, normed: torch.Tensor) -> torch.Tensor:
        """LM head alone, of what `norm` returned -> (..., V)."""
        logits = self.head(normed).to(normed.device)
        missing, least = self.vocab_size - logits.shape[-1], torch.finfo(logits.dtype).min
        return F.pad(logits, (0, missing), value=least) if missing else logits
