"""Ten models of recent years in torch, of their usual sizes; needs transformers and diffusers."""

from __future__ import annotations

from typing import Any


def _only(module: Any, *names: str) -> Any:
    """Return the module with its inputs by place, under these names, and one output."""
    import torch

    class Only(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *given: Any) -> Any:
            made = self.module(**dict(zip(names, given))) if names else self.module(*given)
            return made if isinstance(made, torch.Tensor) else made[0]

    return Only()


def vit() -> Any:
    """ViT-B/16."""
    from transformers import ViTConfig, ViTForImageClassification

    return _only(ViTForImageClassification(ViTConfig(num_labels=1000)))


def convnext() -> Any:
    """ConvNeXt-T."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return _only(ConvNextForImageClassification(ConvNextConfig(num_labels=1000)))


def efficientnet() -> Any:
    """EfficientNet-B0, with weights that keep the size of activations.

    Its last pooling has windows as large as the image, not larger, which OpenVINO refuses.
    """
    import torch
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    made = EfficientNetForImageClassification(
        EfficientNetConfig(
            width_coefficient=1.0,
            depth_coefficient=1.0,
            image_size=224,
            hidden_dim=1280,
            num_labels=1000,
        )
    )
    for part in made.modules():
        if isinstance(part, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(part.weight)
    made.efficientnet.pooler = torch.nn.AdaptiveAvgPool2d(1)
    return _only(made)


def swin() -> Any:
    """Swin-T."""
    from transformers import SwinConfig, SwinForImageClassification

    return _only(SwinForImageClassification(SwinConfig(num_labels=1000)))


def gpt2() -> Any:
    """GPT-2 of 124 million parameters, without a cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _only(GPT2LMHeadModel(GPT2Config(use_cache=False)))


def llama() -> Any:
    """A Llama of 12 layers, 768 wide, with four heads of keys and values, without a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        use_cache=False,
    )
    return _only(LlamaForCausalLM(config))


def t5() -> Any:
    """T5-small, encoder and decoder, without a cache."""
    from transformers import T5Config, T5ForConditionalGeneration

    made = T5ForConditionalGeneration(T5Config(use_cache=False))
    return _only(made, "input_ids", "decoder_input_ids")


def whisper() -> Any:
    """The encoder of Whisper-tiny, for 30 s of sound."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return _only(
        WhisperEncoder(
            WhisperConfig(
                d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536
            )
        )
    )


def unet() -> Any:
    """A step of a diffusion model with a context: a UNet of 64 to 256 channels."""
    from diffusers import UNet2DConditionModel

    made = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(64, 128, 256, 256),
        cross_attention_dim=256,
        attention_head_dim=8,
    )
    return _only(made, "sample", "timestep", "encoder_hidden_states")


def wav2vec2() -> Any:
    """wav2vec 2.0 with its head for CTC, for 1 s of sound."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return _only(Wav2Vec2ForCTC(Wav2Vec2Config()))
