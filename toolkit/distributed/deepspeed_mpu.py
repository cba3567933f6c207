"""The model-parallel unit (mpu) that DeepSpeed expects, based on our groups.

Source:
    deepspeed utils/groups.py, utils/bwc.py, runtime/engine.py: exactly the methods that they call. It must not have
    `initialize_sequence_parallel`, by which groups.py recognizes Megatron's own unit.
"""

from __future__ import annotations

import torch.distributed as dist

from toolkit.distributed.world import World


class ModelParallelUnit:
    """The groups of one rank under DeepSpeed's names.

    DeepSpeed's model-parallel rank numbers the ranks with different parameters: tensor ranks and stages, the tensor
    ranks of one stage consecutively. It names the files of a checkpoint by it (`mp_rank_XX`).

    Args:
        world: Process groups and place of this rank.

    Collectives:
        With both tensor ranks and stages, all ranks of the world join the combined groups.
    """

    def __init__(self, world: World) -> None:
        grid = world.grid
        self._world, self._model = world, grid.group_of(world.rank, "model")
        self._tp_group = world.group("tp")
        self._model_group = self._tp_group if grid.pp == 1 else world.group("model")

    def get_data_parallel_rank(self) -> int:
        return self._world.coordinate.dp

    def get_data_parallel_world_size(self) -> int:
        return self._world.grid.dp

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._world.dp_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self._world.grid.group_of(self._world.rank, "dp"))

    def get_model_parallel_rank(self) -> int:
        return self._model.index(self._world.rank)

    def get_model_parallel_world_size(self) -> int:
        return len(self._model)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model_group

    def get_tensor_model_parallel_rank(self) -> int:
        return self._world.coordinate.tp

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._world.grid.tp

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tp_group

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._world.grid.pp
