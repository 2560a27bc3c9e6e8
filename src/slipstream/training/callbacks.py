"""What watches a training run: its summary, its progress, and how it ends when it is stopped or
no longer finite."""

import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.text import Text

from slipstream.core.errors import InputError
from slipstream.core.processes import ALONE
from slipstream.core.resuming import how_to_go_on
from slipstream.core.settings import Amount, set_to
from slipstream.data.rendering import Sample
from slipstream.training.checkpoints import go_back_to_last_step
from slipstream.training.memory import MemoryEstimate, largest_batch, step_bytes
from slipstream.training.module import epoch_batches, total_steps
from slipstream.training.resuming import kept_in
from slipstream.training.sharding import ShardedTarget
from slipstream.training.together import SAVE_SECONDS, end_after


class RunSummary(L.Callback):
    """Says at the start what a run will be."""

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        tell_run(trainer, module)


def tell_run(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Print parameters, a memory estimate, steps, the supervised share and one sample with its
    mask, in the first process; of classifiers, whose training tells other things, nothing."""
    if not (trainer.is_global_zero and module.runs_target):
        return
    console, data, samples = Console(), module.data, module.data.samples["train"]
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total, count = sum(p.numel() for p in module.parameters()), sharers(trainer)
    shared = f", its layers over {count} processes" if count > 1 else ""
    batches = len(data.train_dataloader())
    steps = total_steps(trainer, batches)
    console.print(
        f"parameters: {trained:,} trained of {total:,} ({100 * trained / total:.2f} %)\n"
        f"memory estimate: {memory_estimate(trainer, module)}{shared}\n"
        f"steps: {steps:,}, with {epoch_batches(trainer, batches):,} batches an epoch\n"
        f"data: {len(samples):,} training samples, "
        f"{100 * data.supervised_share:.1f} % of their tokens supervised"
    )
    if steps < 2 * module.warmup_steps:
        console.print(
            f"note: {steps} steps are few; raise trainer.max_epochs or max_steps, "
            "or lower trainer.accumulate_grad_batches"
        )
    console.print("first sample, supervised tokens in green:")
    console.print(_masked(samples[0], data.tokenizer))


def memory_estimate(trainer: L.Trainer, module: L.LightningModule) -> MemoryEstimate:
    """Of a run's largest batch, in each process."""
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    weights, count = module.beside + sum(p.nbytes for p in module.parameters()), sharers(trainer)
    if count > 1:
        layers = sum(p.nbytes for p in module.target.family.layers.parameters())
        weights += layers // count - layers
    mixed = "mixed" in str(trainer.precision)
    with set_to(ALONE, True):
        loader = module.data.train_dataloader()
        batch = largest_batch(loader, loader.made_for or trainer.world_size)
        step = step_bytes(module.empty_step, batch, mixed, trainer.strategy.root_device.type)
    step += trained if trainer.world_size > 1 else 0  # gradients on their way to others
    return MemoryEstimate(weights, 2 * trained, max(step, module.validation_bytes()))


def sharers(trainer: L.Trainer) -> int:
    """How many processes the layers of the frozen target are split over."""
    return trainer.world_size if isinstance(trainer.strategy, ShardedTarget) else 1


def _masked(sample: Sample, tokenizer) -> Text:
    """The sample's text, its supervised parts green."""
    text, done = Text(), 0
    for start, stop in sample.supervised:
        text.append(tokenizer.decode(sample.ids[done:start]), style="dim")
        text.append(tokenizer.decode(sample.ids[start:stop]), style="green")
        done = stop
    return text


class SaveWhenInterrupted(L.Callback):
    """Keeps what `resume=auto` goes on from: on any signal or exception (but bad input) it saves a
    checkpoint, which says that nothing was begun since the last optimiser step.

    The first Ctrl-C waits for the end of the batch, as Lightning does on SIGTERM: an optimiser step
    that is broken off cannot be resumed. A second one does not wait. With several processes none
    waits, for each would end at a batch of its own. They tell one another of SIGTERM, and of the
    signal by which SLURM requeues a job, only at the end of a batch: Lightning's own handlers would
    talk to the other processes, and save, wherever they are called.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self.interrupted = self.stepping = self.terminated = self.requeued = False

    def setup(self, trainer: L.Trainer, *_, **__) -> None:
        connector = trainer._signal_connector
        self.requeue = connector._slurm_sigusr_handler_fn
        connector._slurm_sigusr_handler_fn = self._requeue
        if trainer.world_size > 1:
            connector._sigterm_notifier_fn = self._terminate

    def _requeue(self, *_) -> None:
        self.requeued = True

    def _terminate(self, *_) -> None:
        self.terminated = self.terminated or end_after(SAVE_SECONDS, self.path.parent.parent)

    def _answer_signals(self, trainer: L.Trainer) -> None:
        """Do what any of the processes was asked for, in all of them."""
        any_process = partial(trainer.strategy.reduce_boolean_decision, all=False)
        in_slurm = isinstance(trainer._accelerator_connector.cluster_environment, SLURMEnvironment)
        if in_slurm and any_process(self.requeued):
            self.requeued = False
            self.requeue("requeue", None)
        if trainer.world_size > 1 and any_process(bool(self.terminated)):
            if self.terminated:
                self.terminated.cancel()
            trainer._signal_connector.received_sigterm = True  # and Lightning ends the run

    def on_load_checkpoint(self, trainer: L.Trainer, _, checkpoint: dict) -> None:
        for callback in trainer.checkpoint_callbacks:
            if state := checkpoint["callbacks"].get(callback.state_key):
                kept_in(Path(callback.dirpath), state)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.global_step and trainer.is_global_zero:  # of the run that was here before
            folder = self.path.parent
            before = *folder.glob("*.ckpt"), *folder.parent.glob("hpc_ckpt_*.ckpt")
            for path in filter(Path.is_file, (*before, folder / "finished.json")):
                path.unlink()
        # Lightning forgets the place in the data where an epoch had ended.
        loop = trainer.fit_loop
        if states := loop._combined_loader_states_to_load:
            loop._combined_loader._load_state_dicts(states)
            loop._combined_loader_states_to_load = []
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._wait)  # Lightning's teardown takes it back

    def _wait(self, *_) -> None:
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def on_train_batch_start(self, *_) -> None:
        if self.interrupted:
            raise KeyboardInterrupt

    on_train_end = on_train_batch_start

    def on_validation_batch_start(self, trainer: L.Trainer, *_) -> None:
        """The validation after the last step would not be repeated: its end is waited for."""
        if self.interrupted and trainer.global_step < trainer.estimated_stepping_batches:
            raise KeyboardInterrupt

    def on_before_optimizer_step(self, *_) -> None:
        self.stepping = True

    def on_train_batch_end(self, trainer: L.Trainer, *_) -> None:
        self.stepping = False
        self._answer_signals(trainer)

    def on_exception(self, trainer: L.Trainer, _, exception: BaseException) -> None:
        # A step that was broken off has changed some weights: the state before it is on the disk.
        if trainer.global_step and not self.stepping and not isinstance(exception, InputError):
            with suppress(OSError):
                self._save(trainer, exception)
        told = isinstance(exception, InputError | KeyboardInterrupt | SIGTERMException)
        if trainer.global_step and not told:
            print(f"interrupted; {how_to_go_on(self.path.parent.parent)}")

    def _save(self, trainer: L.Trainer, exception: BaseException) -> None:
        """Not with Lightning's barrier, which waits for processes without this exception."""
        if trainer.world_size == 1 or isinstance(exception, SIGTERMException):
            return trainer.save_checkpoint(self.path, weights_only=False)
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        trainer.strategy.save_checkpoint(state, self.path)

    def on_save_checkpoint(self, trainer: L.Trainer, _, checkpoint: dict) -> None:
        go_back_to_last_step(trainer, checkpoint)


class StopWhenNotFinite(L.Callback):
    """Stops before an optimiser step that NaN or infinity would spoil the weights with.

    One question to the device for each optimiser step, after its backward pass: of the losses of
    its batches, summed, and the norm of its gradients.
    """

    def __init__(self) -> None:
        self.loss: torch.Tensor | float = 0.0

    def on_before_backward(self, trainer: L.Trainer, _, loss: torch.Tensor) -> None:
        self.loss = self.loss + loss.detach()

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, _) -> None:
        losses, self.loss = self.loss, 0.0
        gradients = [each.grad for each in module.parameters() if each.grad is not None]
        # In float16 Lightning scales losses, and leaves out steps whose gradients overflow.
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            gradients = []
        norm = torch.nn.utils.get_total_norm(gradients).to(losses.device)
        finite = torch.stack([losses, norm]).isfinite().tolist()
        if not all(finite):
            name = "gradient" if finite[0] else "loss"
            raise InputError(
                f"training: the {name} of step {trainer.global_step + 1} is NaN or infinite; "
                "give a smaller training.learning_rate, or check the data and the target"
            )


class Progress(TQDMProgressBar):
    """A bar over all steps of the run (not one per epoch), with the time that is left."""

    def __init__(self, refresh_rate: Amount = 5):
        super().__init__(refresh_rate=refresh_rate)
        self.shown = 0.0  # when it was, which slow steps do not wait for `refresh_rate` for

    def on_train_start(self, trainer: L.Trainer, *_) -> None:
        super().on_train_start()
        bar = self.train_progress_bar
        bar.reset(total=int(trainer.estimated_stepping_batches))
        bar.initial = bar.n = trainer.global_step
        bar.set_description("training")

    def on_train_epoch_start(self, *_) -> None:
        """The bar goes on over epochs."""

    def on_exception(self, *_) -> None:
        """Ends the bar's line, before what is printed next."""
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_) -> None:
        bar, done, now = self.train_progress_bar, trainer.global_step, time.monotonic()
        if self._should_update(done, bar.total) or (self.is_enabled and now > self.shown + 1):
            self.shown = now
            bar.update(done - bar.n)
            bar.set_postfix(self.get_metrics(trainer, module))

    def get_metrics(self, trainer: L.Trainer, module: L.LightningModule) -> dict:
        return {k: v for k, v in super().get_metrics(trainer, module).items() if k != "v_num"}

    def init_validation_tqdm(self):
        bar = super().init_validation_tqdm()
        bar.disable = True
        return bar
