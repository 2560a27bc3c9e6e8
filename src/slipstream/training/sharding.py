"""Training beside a frozen target that does not fit one device.

Each process holds a part of every layer's weights, and gathers a layer when its rows come by; all
must run the layers equally often. What is trained is whole in every process, and its gradients are
averaged, as in data-parallel training: so checkpoints and speculator folders are whole files, too.
"""

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import fully_shard

from slipstream.core.errors import InputError
from slipstream.targets.quantized import kind_of
from slipstream.training.speculator import SpeculatorTraining


class ShardedTarget(DDPStrategy):
    """Data-parallel training of a speculator beside a target that FSDP2 splits over the processes.

    Load the target on the CPU (`target.device=cpu`): no device need hold it whole. Raises
    `InputError` for trainings that change the target.
    """

    def model_to_device(self) -> None:
        module = self.lightning_module
        if not isinstance(module, SpeculatorTraining) or module.shared:
            raise InputError(
                "trainer.strategy: only a target that training does not change can be split; use "
                "speculator=streaming or speculator=medusa, or trainer.strategy=ddp"
            )
        if kind_of(module.target.model) == "int8":
            raise InputError(
                "trainer.strategy: 8-bit weights cannot be split; give target.quantization=nf4, or "
                "trainer.strategy=ddp"
            )
        mesh = torch.distributed.init_device_mesh(self.root_device.type, (self.world_size,))
        # Embedding and head stay whole: processes call the head for as many slices as they have.
        for layer in module.target.family.layers:
            # Each is called by itself, and would stay whole afterwards, as roots do.
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        held = *module.frozen.named_parameters(), *module.frozen.named_buffers()
        # These are no whole tensors, and not to be sent from the first process to the others.
        module._ddp_params_and_buffers_to_ignore = [f"frozen.{name}" for name, _ in held]
        super().model_to_device()
