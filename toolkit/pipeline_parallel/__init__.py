"""Pipeline parallelism of Hugging Face models: `cut_model` takes a rank's part out of a model, `run_stage` runs it."""

from toolkit.pipeline_parallel.part import StageInfo, StagePart, stage_info
from toolkit.pipeline_parallel.split import cut_model
from toolkit.pipeline_parallel.stage import hidden_dtype, hidden_shape, run_stage

__all__ = ["StageInfo", "StagePart", "cut_model", "hidden_dtype", "hidden_shape", "run_stage", "stage_info"]
