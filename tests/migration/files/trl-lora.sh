#!/usr/bin/env bash
export OMP_NUM_THREADS=8
LR=2e-4
accelerate launch --config_file accelerate-fsdp.yaml --num_processes 4 \
  trl/scripts/sft.py \
  --model_name_or_path Qwen/Qwen2-0.5B \
  --dataset_name data/train.jsonl \
  --learning_rate $LR \
  --num_train_epochs 3 \
  --per_device_train_batch_size 2 \
  --gradient_accumulation_steps 8 \
  --eval_strategy no \
  --use_peft \
  --load_in_4bit \
  --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj k_proj v_proj \
  --lora_modules_to_save lm_head \
  --completion_only_loss True \
  --max_steps 500 \
  --resume_from_checkpoint out/checkpoint-100 \
  --output_dir out/lora
