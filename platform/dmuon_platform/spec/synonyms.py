"""What other programs call the keys of a job file."""

from collections.abc import Mapping

_OF_KEYS: Mapping[str, str] = {
    "name": "run_name job_name",
    "storage": "output_dir out_dir save_dir work_dir checkpoint_dir",
    "model.path": "model_name_or_path pretrained pretrained_model checkpoint_path init_from",
    "model.vocab_size": "vocab n_vocab num_embeddings",
    "model.hidden_size": "d_model n_embd hidden_dim embed_dim dim model_dim",
    "model.intermediate_size": "d_ff ffn_dim ffn_hidden_size mlp_dim n_inner",
    "model.num_hidden_layers": "n_layer n_layers num_layers depth",
    "model.num_attention_heads": "n_head n_heads num_heads",
    "model.num_key_value_heads": "n_kv_head n_kv_heads num_kv_heads",
    "data.source": "dataset_path data_path data_dir train_file train_data",
    "data.text_field": "text_column text_key content_field",
    "data.tokenizer": "tokenizer_path tokenizer_file tokenizer_name",
    "data.sequence_length": "seq_len seq_length block_size context_length context_size max_length "
    "max_seq_len max_seq_length",
    "data.validation_fraction": "val_fraction val_split validation_split test_size",
    "mesh.replicate": "dp_replicate data_parallel_replicate_degree replicas",
    "mesh.shard": "dp_shard data_parallel_shard_degree fsdp_size",
    "optimizer.algorithm": "optimizer_name optimizer_type",
    "optimizer.lr": "learning_rate muon_lr max_lr base_lr peak_lr",
    "optimizer.momentum": "muon_momentum mu",
    "optimizer.weight_decay": "wd muon_weight_decay",
    "optimizer.ns_steps": "newton_schulz_steps backend_steps num_ns_steps",
    "optimizer.adamw_lr": "adam_lr adam_learning_rate embed_lr",
    "optimizer.adamw_betas": "betas beta1 beta2 adam_betas adam_beta1 adam_beta2",
    "optimizer.adamw_eps": "eps epsilon adam_eps adam_epsilon",
    "optimizer.adamw_weight_decay": "adam_weight_decay adam_wd",
    "schedule.kind": "lr_scheduler lr_scheduler_type lr_schedule",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps warmup_ratio",
    "schedule.decay_steps": "cooldown cooldown_steps lr_decay_iters warmdown_iters",
    "schedule.min_ratio": "min_lr min_lr_ratio final_lr_ratio",
    "train.steps": "max_steps num_steps iterations max_iters num_iterations total_steps "
    "train_steps epochs num_epochs num_train_epochs max_epochs",
    "train.tokens": "max_tokens num_tokens total_tokens",
    "train.global_batch_size": "batch_size total_batch_size train_batch_size bs",
    "train.micro_batch_size": "per_device_train_batch_size device_batch_size local_batch_size "
    "mini_batch_size gradient_accumulation_steps grad_accum accumulation_steps",
    "train.precision": "dtype mixed_precision bf16 fp16 amp",
    "train.compile": "torch_compile",
    "train.activation_checkpointing": "gradient_checkpointing grad_checkpointing",
    "train.clip_grad_norm": "grad_clip gradient_clip max_grad_norm max_norm clip_grad",
    "train.seed": "random_seed manual_seed",
    "evaluation.every": "eval_every eval_steps eval_interval eval_freq val_every",
    "evaluation.sequences": "eval_batches eval_iters eval_samples",
    "checkpoint.every": "save_every save_steps save_interval checkpoint_every checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit max_to_keep keep_latest_k",
    "resources.workers": "num_workers world_size nproc_per_node num_processes n_gpus num_gpus",
    "resources.gpus_per_worker": "gpus use_gpu",
    "resources.address": "ray_address",
    "faults.max_failures": "max_restarts max_retries",
    "faults.timeout_s": "timeout nccl_timeout",
    "tracking.uri": "tracking_uri mlflow_uri mlflow_tracking_uri",
    "tracking.experiment": "experiment_name project wandb_project",
    "tracking.log_every": "logging_steps log_interval log_freq",
    "export.registered_model": "registered_model_name hub_model_id",
}
"""By key of a job file: the usual names of the same thing, or of what takes its place here."""

SYNONYMS: Mapping[str, str] = {
    name: key for key, names in _OF_KEYS.items() for name in names.split()
}
"""By name, without its section: the key that stands for it here."""
