"""The ZeRO-3 section of DeepSpeed files that people copy from transformers' documentation."""

ZERO_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
ON_CPU = {"device": "cpu", "pin_memory": True}
BOTH_OFFLOADS = {"offload_optimizer": ON_CPU, "offload_param": ON_CPU}
