"""Architectures of the transformers library beyond the plain decoder, against one process."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from one_process import Batch, Training, assert_equals_one_process
from torch import nn

from dmuon.selection import is_hidden_matrix, select

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs the hf extra")

VOCAB = 41
# Initial weights of 0.2: with 0.02 attention is flat, and gradients of queries drown in rounding
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DECODER = {
    **WIDTHS,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def text(step: int) -> Batch:
    rows = torch.randint(1, VOCAB - 1, (8, 12), generator=generator(step))
    return {"input_ids": rows, "labels": rows}


def pictures(step: int) -> Batch:
    pixels = torch.randn(8, 3, 16, 16, generator=generator(step))
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (8,), generator=generator(step))}


def sound(step: int) -> Batch:
    return {
        "input_features": torch.randn(8, 8, 20, generator=generator(step)),
        "labels": text(step)["labels"],
    }


def pictures_in_text(step: int) -> Batch:
    rows = text(step)["input_ids"]
    rows[:, :4] = VOCAB - 1  # where the four patches of the picture go
    return {
        "input_ids": rows,
        "labels": rows,
        "pixel_values": pictures(step)["pixel_values"],
    }


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**DECODER, **EXPERTS, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen2_moe() -> nn.Module:
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 4}
    return transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(**DECODER, **EXPERTS, **sizes)
    )


def qwen3_moe() -> nn.Module:
    sizes = {"moe_intermediate_size": 16, "head_dim": 8, "num_experts": 4}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**DECODER, **EXPERTS, **sizes)
    )


def gpt_oss() -> nn.Module:
    sizes = {"num_local_experts": 4, "head_dim": 8, "sliding_window": 8}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**DECODER, **EXPERTS, **sizes))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        **WIDTHS,
        **NO_DROPOUT,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=5,
        initializer_range=0.2,
    )
    return transformers.ViTForImageClassification(config)


def bert(tied: bool = True) -> nn.Module:
    config = transformers.BertConfig(
        **WIDTHS,
        **NO_DROPOUT,
        vocab_size=VOCAB,
        num_attention_heads=4,
        max_position_embeddings=16,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCAB,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def whisper(tied: bool = True) -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        init_std=0.2,
        tie_word_embeddings=tied,
    )
    return transformers.WhisperForConditionalGeneration(config)


def mamba() -> nn.Module:
    config = transformers.MambaConfig(
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        time_step_rank=4,
        initializer_range=0.2,
        use_cache=False,
    )
    return transformers.MambaForCausalLM(config)


def llava() -> nn.Module:
    eye = transformers.CLIPVisionConfig(
        **WIDTHS, num_attention_heads=4, image_size=16, patch_size=8, initializer_factor=5.0
    )
    config = transformers.LlavaConfig(
        vision_config=eye,
        text_config=transformers.LlamaConfig(**DECODER),
        image_token_id=VOCAB - 1,
        image_seq_length=4,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return transformers.LlavaForConditionalGeneration(config)


def repeated(model: Any) -> Iterable[nn.Module]:
    """Every element of every outermost list of layers, as a user would pick them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(
            part.isdigit() for part in name.split(".")
        ):
            yield from module


Make = Callable[[], nn.Module]

BATCHES: dict[Make, Callable[[int], Batch]] = {
    mixtral: text,
    qwen2_moe: text,
    qwen3_moe: text,
    gpt_oss: text,
    vit: pictures,
    bert: text,
    t5: text,
    whisper: sound,
    mamba: text,
    llava: pictures_in_text,
}


@pytest.mark.parametrize(("shape", "reshard"), [((2,), True), ((2, 2), False)], ids=str)
@pytest.mark.parametrize("make", BATCHES)
def test_training_equals_one_process(make: Make, shape: tuple[int, ...], reshard: bool) -> None:
    training = Training(make, BATCHES[make], repeated)
    assert_equals_one_process(training, shape, reshard)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (mixtral, "lm_head.weight"),
        (vit, "classifier.weight"),
        (vit, "vit.embeddings.patch_embeddings.projection.weight"),
        (t5, "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        (bert, "bert.embeddings.token_type_embeddings.weight"),
        (lambda: bert(tied=False), "cls.predictions.decoder.weight"),
        (lambda: whisper(tied=False), "proj_out.weight"),
        (gpt_oss, "model.layers.0.mlp.experts.down_proj_bias"),
        (mamba, "backbone.layers.0.mixer.A_log"),
    ],
)
def test_the_default_choice_leaves_to_adamw_what_is_no_hidden_matrix(make: Make, name: str) -> None:
    model = make()
    param = dict(model.named_parameters())[name]
    chosen = {each.param for each in select(model, is_hidden_matrix)}
    assert chosen
    assert param not in chosen
