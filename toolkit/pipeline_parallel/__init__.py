"""Pipeline parallelism of Hugging Face models: `split_model` makes a rank's part of a model, `forward_stage` runs it."""

from toolkit.pipeline_parallel.part import StageInfo, stage_info
from toolkit.pipeline_parallel.split import split_model
from toolkit.pipeline_parallel.stage import forward_stage, hidden_dtype, hidden_shape
from toolkit.pipeline_schedule import StageSpec

__all__ = ["StageInfo", "StageSpec", "forward_stage", "hidden_dtype", "hidden_shape", "split_model", "stage_info"]
