"""Pipeline parallelism of Hugging Face models: `split_model` makes a rank's part of a model, `forward_stage` runs it."""

from toolkit.pipeline_parallel.part import StageInfo, StagePart, stage_info
from toolkit.pipeline_parallel.split import split_model
from toolkit.pipeline_parallel.stage import forward_stage, hidden_dtype, hidden_shape

__all__ = ["StageInfo", "StagePart", "forward_stage", "hidden_dtype", "hidden_shape", "split_model", "stage_info"]
