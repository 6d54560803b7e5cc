"""Tiny models whose `build()` gives the same weights and batch, without downloads; seed each run, as dropout is on."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_memopt import ActivationOffloader

BATCH, TOKENS, VOCABULARY = 2, 12, 96


@dataclass(frozen=True)
class Workload:
    """A module in training mode and its loss on one fixed batch."""

    module: nn.Module
    loss: Callable[[], Tensor]

    def checkpoint(self) -> None:
        """Switch the model's own activation checkpointing on, non-reentrant."""
        if isinstance(self.module, transformers.PreTrainedModel):
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.module.enable_gradient_checkpointing()


@dataclass(frozen=True)
class Architecture:
    """A named way of making a workload; `family` is such as `decoder` or `moe`."""

    name: str
    family: str
    make: Callable[[], Workload]
    can_checkpoint: bool = True

    def build(self) -> Workload:
        """Return the same module and batch at every call, and leave the global random state as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            workload = self.make()
            perturb(workload.module)
        workload.module.train()
        return workload


ARCHITECTURES: dict[str, Architecture] = {}


def perturb(module: nn.Module) -> None:
    """Move every parameter: layers that start as zeros would have equal gradients of zero, whatever happens to them."""
    for parameter in module.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))


def register(architecture: Architecture) -> None:
    assert architecture.name not in ARCHITECTURES
    ARCHITECTURES[architecture.name] = architecture


def made_by(make: Callable[[], Workload], family: str, can_checkpoint: bool = True) -> None:
    """Register under the function's name."""
    register(Architecture(make.__name__, family, make, can_checkpoint))


def make_model(class_name: str, **settings: Any) -> nn.Module:
    """Return a transformers model with random weights."""
    with warnings.catch_warnings():
        # transformers 5.5 scripts three functions of DeBERTa when that file is imported.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**settings))


def with_own_loss(class_name: str, inputs: dict[str, Any], **settings: Any) -> Workload:
    """Let a transformers model compute its loss from `inputs` itself."""
    model = make_model(class_name, **settings)
    return Workload(model, lambda: model(**inputs).loss)


def to_random_target(output: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return the squared distance to a target that depends on the output's shape alone."""

    def loss() -> Tensor:
        value = output()
        target = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), device="cpu")
        return nn.functional.mse_loss(value.float(), target.to(value.device))

    return loss


def token_ids(num_tokens: int = TOKENS) -> Tensor:
    """Return random tokens but the vocabulary's first five, `(BATCH, num_tokens)`."""
    return torch.randint(5, VOCABULARY, (BATCH, num_tokens))


# ---------------------------------------------------------------------------------------------------- text

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "output_router_logits": True}
HALVES = {"attention_heads": 4, "ffn_dim": 48, "layers": 2}
ENCODER_DECODER = {"d_model": 32} | {f"{half}_{k}": v for half in ("encoder", "decoder") for k, v in HALVES.items()}
SPECIAL_TOKENS = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep", "decoder_start")}


def language_model(name: str, family: str, class_name: str, *, can_checkpoint: bool = True, **settings: Any) -> None:
    """Register a transformers model that predicts its input tokens."""

    def make() -> Workload:
        ids = token_ids()
        return with_own_loss(class_name, {"input_ids": ids, "labels": ids}, **{"vocab_size": VOCABULARY, **settings})

    register(Architecture(name, family, make, can_checkpoint))


language_model("llama", "decoder", "LlamaForCausalLM", **GROUPED)
language_model("qwen3", "decoder", "Qwen3ForCausalLM", **GROUPED, tie_word_embeddings=True)
language_model("gemma2", "decoder", "Gemma2ForCausalLM", **GROUPED, sliding_window=4, attention_dropout=0.1)
language_model("phi", "decoder", "PhiForCausalLM", **SMALL, resid_pdrop=0.1, embd_pdrop=0.1)
language_model("gpt_neox", "decoder", "GPTNeoXForCausalLM", **SMALL, hidden_dropout=0.1)
# Its logits pass 1 MiB.
language_model("gpt2", "decoder", "GPT2LMHeadModel", vocab_size=16000, n_embd=32, n_layer=2, n_head=4, n_positions=32)
OPT = {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 32}
language_model("opt", "decoder", "OPTForCausalLM", hidden_size=32, word_embed_proj_dim=32, **OPT)

language_model("bert", "encoder", "BertForMaskedLM", **SMALL)
language_model("albert", "encoder", "AlbertForMaskedLM", can_checkpoint=False, **SMALL, embedding_size=16)
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
language_model("deberta", "encoder", "DebertaV2ForMaskedLM", **SMALL, **DEBERTA)
MODERN = {**SPECIAL_TOKENS, "mlp_dropout": 0.1, "local_attention": 4}
language_model("modernbert", "encoder", "ModernBertForMaskedLM", **SMALL, **MODERN)

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
language_model("t5", "encoder-decoder", "T5ForConditionalGeneration", **T5)
language_model("bart", "encoder-decoder", "BartForConditionalGeneration", **ENCODER_DECODER)

language_model("mixtral", "moe", "MixtralForCausalLM", **EXPERTS, num_local_experts=4)
language_model("qwen3_moe", "moe", "Qwen3MoeForCausalLM", **EXPERTS, num_experts=4, moe_intermediate_size=24)

MAMBA = {"hidden_size": 32, "num_hidden_layers": 2}
language_model("mamba", "state-space", "MambaForCausalLM", **MAMBA, state_size=4, time_step_rank=4)
MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4}
language_model("mamba2", "state-space", "Mamba2ForCausalLM", **MAMBA, **MAMBA2)
GRIFFIN = {"block_types": ("recurrent", "attention"), "attention_window_size": 8}
language_model("recurrent_gemma", "state-space", "RecurrentGemmaForCausalLM", **SMALL, **GRIFFIN)


# --------------------------------------------------------------------------------------------------- vision


def classifier(
    name: str, class_name: str, *, can_checkpoint: bool = True, num_pixels: int = 32, **settings: Any
) -> None:
    """Register a transformers model that tells 4 classes of square images apart."""

    def make() -> Workload:
        inputs = {"pixel_values": torch.randn(BATCH, 3, num_pixels, num_pixels), "labels": torch.arange(BATCH)}
        return with_own_loss(class_name, inputs, num_labels=4, **settings)

    register(Architecture(name, "vision", make, can_checkpoint))


PATCHES = {**SMALL, "image_size": 32, "patch_size": 8}
classifier("vit", "ViTForImageClassification", **PATCHES, hidden_dropout_prob=0.1)
classifier("dinov2", "Dinov2ForImageClassification", **PATCHES, drop_path_rate=0.1)
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
classifier("swin", "SwinForImageClassification", **SWIN, hidden_dropout_prob=0.1)
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "patch_size": 2, "drop_path_rate": 0.2}
classifier("convnext", "ConvNextForImageClassification", can_checkpoint=False, **CONVNEXT)
# Its first feature maps have 1 MiB each.
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
classifier("resnet", "ResNetForImageClassification", can_checkpoint=False, num_pixels=256, **RESNET)
SEGFORMER = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
SEGFORMER |= {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
classifier("segformer", "SegformerForImageClassification", can_checkpoint=False, **SEGFORMER)


def clip() -> Workload:
    text = {**SMALL, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": VOCABULARY - 1}
    inputs = {"input_ids": token_ids(), "pixel_values": torch.randn(BATCH, 3, 32, 32), "return_loss": True}
    return with_own_loss("CLIPModel", inputs, text_config=text, vision_config=PATCHES, projection_dim=16)


made_by(clip, "vision")


# ---------------------------------------------------------------------------------------------------- audio

# Without SpecAugment: it draws its masks from numpy.
AUDIO = {"layerdrop": 0.2, "apply_spec_augment": False, "num_feat_extract_layers": 2, "conv_dim": (16, 16)}
AUDIO |= {"conv_stride": (5, 2), "conv_kernel": (10, 3), "vocab_size": VOCABULARY}
AUDIO |= {**SMALL, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}


def wav2vec2() -> Workload:
    inputs = {"input_values": torch.randn(BATCH, 400), "labels": token_ids(4)}
    return with_own_loss("Wav2Vec2ForCTC", inputs, **AUDIO, ctc_loss_reduction="mean")


def hubert() -> Workload:
    model, sound = make_model("HubertModel", **AUDIO), torch.randn(BATCH, 400)
    return Workload(model, to_random_target(lambda: model(sound).last_hidden_state))


def whisper() -> Workload:
    inputs = {"input_features": torch.randn(BATCH, 8, 32), "labels": token_ids()}
    sizes = {"vocab_size": VOCABULARY, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    settings = {**ENCODER_DECODER, **sizes, **SPECIAL_TOKENS, "dropout": 0.1, "encoder_layerdrop": 0.3}
    return with_own_loss("WhisperForConditionalGeneration", inputs, **settings)


made_by(wav2vec2, "audio")
made_by(hubert, "audio")
made_by(whisper, "audio")


# ------------------------------------------------------------------------------------------------ diffusion

UNET = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "dropout": 0.1}


def unet2d() -> Workload:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    unet = UNet2DModel(**UNET, **blocks, sample_size=16, attention_head_dim=8)
    noisy, time = torch.randn(BATCH, 3, 16, 16), torch.tensor([3, 700])
    return Workload(unet, to_random_target(lambda: unet(noisy, time).sample))


def unet2d_condition() -> Workload:
    from diffusers import UNet2DConditionModel

    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    sizes = {"sample_size": 8, "cross_attention_dim": 16, "attention_head_dim": 4}
    unet = UNet2DConditionModel(**UNET, **sizes, down_block_types=down, up_block_types=up)
    noisy, time, text = torch.randn(BATCH, 4, 8, 8), torch.tensor([3, 700]), torch.randn(BATCH, 5, 16)
    return Workload(unet, to_random_target(lambda: unet(noisy, time, text).sample))


def autoencoder_kl() -> Workload:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(**blocks, block_out_channels=(8, 16), norm_num_groups=4, latent_channels=2)
    images = torch.randn(BATCH, 3, 16, 16)
    return Workload(vae, to_random_target(lambda: vae(images, sample_posterior=True).sample))


def dit() -> Workload:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "in_channels": 4}
    model = DiTTransformer2DModel(**sizes, out_channels=8, num_embeds_ada_norm=10, dropout=0.1)
    noisy, time, label = torch.randn(BATCH, 4, 8, 8), torch.tensor([3, 700]), torch.tensor([1, 7])
    return Workload(model, to_random_target(lambda: model(noisy, time, label).sample))


made_by(unet2d, "diffusion")
made_by(unet2d_condition, "diffusion")
made_by(autoencoder_kl, "diffusion")
made_by(dit, "diffusion")


# ------------------------------------------------------------------------------------------ neural operators


def fno() -> Workload:
    """Make a workload of which some saved tensors pass 1 MiB."""
    from neuralop.models import FNO

    model = FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2)
    fields = torch.randn(BATCH, 1, 96, 96)
    return Workload(model, to_random_target(lambda: model(fields)))


made_by(fno, "operator", can_checkpoint=False)


# ---------------------------------------------------------------------------------------------- gradients

Gradients = list[Tensor | None]


def loss_of(workload: Workload, autocast: bool = False, offloader: ActivationOffloader | None = None) -> Tensor:
    torch.manual_seed(7)  # the plain run's dropout, layer drop and posterior samples
    context = nullcontext() if offloader is None else offloader.offload_context(workload.module)
    device_type = next(workload.module.parameters()).device.type
    with context, torch.autocast(device_type, torch.bfloat16, enabled=autocast):
        return workload.loss()


def gradients(workload: Workload, autocast: bool = False, offloader: ActivationOffloader | None = None) -> Gradients:
    loss_of(workload, autocast, offloader).backward()
    found = [parameter.grad for parameter in workload.module.parameters()]
    workload.module.zero_grad()
    return found


def equal(first: Gradients, second: Gradients) -> bool:
    """Compare; None, for a dropped layer or a missing input, equals None alone."""
    pairs = zip(first, second, strict=True)
    return all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in pairs)
