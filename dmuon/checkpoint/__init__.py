"""Checkpoints: whole tensors, written in parallel as safetensors, committed by a manifest.

What a folder holds::

    model-00001-of-00004.safetensors ... model.safetensors.index.json   a Hugging Face checkpoint
    optim-00001-of-00004.safetensors ...   momentum_buffer/<name>, exp_avg/<name>, exp_avg_sq/<name>
    manifest.json                          written last; without it a folder is no checkpoint
    .saving                                there from the first file until the manifest is

Read it in this order: `facts`, `manifest`, `tensor_file`, `assignment`, `source`, `unfinished`.
None of them communicates.
"""
