#!/usr/bin/env bash
nproc=4
NPROC_PER_NODE=$nproc swift pt \
  --model /models/Qwen2.5-14B --use_hf true \
  --train_type lora --quant_method bnb --quant_bits 4 --bnb_4bit_quant_type nf4 \
  --target_regex '.*\.(q_proj|v_proj)' --use_rslora true --init_weights gaussian \
  --dataset corpus.jsonl --streaming true --max_steps 2000 \
  --bf16 true --max_length 4096 --packing true --attn_impl flash_attention_2 \
  --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{"min_lr": 1e-5}' \
  --learning_rate 1e-4 --zero_hpz_partition_size 4 --sequence_parallel_size 2
