"""Pipeline parallelism: `tk.pipeline`.

For Hugging Face models `split_model` makes a rank's part of a model and `forward_stage` runs it. For modules of the user's
own, `split_sequential` cuts an `nn.Sequential` into stages, and `PipelineRunner` runs them by any of the schedules.
"""

from toolkit.pipeline_parallel.part import StageInfo, stage_info
from toolkit.pipeline_parallel.runner import PipelineRunner
from toolkit.pipeline_parallel.sequential import split_sequential
from toolkit.pipeline_parallel.split import split_model
from toolkit.pipeline_parallel.stage import forward_stage, hidden_dtype, hidden_shape
from toolkit.pipeline_schedule import StageSpec

__all__ = [
    "PipelineRunner",
    "StageInfo",
    "StageSpec",
    "forward_stage",
    "hidden_dtype",
    "hidden_shape",
    "split_model",
    "split_sequential",
    "stage_info",
]
