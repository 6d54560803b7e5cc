"""Pairs of functions that make the same training step, one with a memory switch, compared by `hf_memopt.verify`.

    python -m benchmarks.exactness.pairs save_on_cpu --dropout 0.1

They are of switches that are no setting of a script.
"""

import argparse
import copy
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.exactness.tiny import WIDTH, blocks, llama, padded, samples, texts, tokenizer
from hf_memopt import SelectiveCheckpoint, verify

Step = Callable[[], Any]
Pair = tuple[Step, Step]
LossOfHead = Callable[[nn.Module, Tensor, Tensor], Tensor]
NUM_SHARDS = 4
# Of one length, so that all shards of a batch have as many labels.
EVEN = [torch.arange(2, 35) + row for row in range(4)]


def training(parameters: Iterable[Tensor], loss: Callable[[], Tensor]) -> Step:
    """Return a step of SGD, whose updates are in proportion to gradients: AdamW's first ones amplify their rounding."""
    optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def of_one_model(model: nn.Module, plain: Callable[[], Tensor], switched: Callable[[], Tensor]) -> Pair:
    parameters = [each for each in model.parameters() if each.requires_grad]
    return training(parameters, plain), training(parameters, switched)


def of_two_models(model: nn.Module, switched: nn.Module, loss: Callable[[Any], Tensor]) -> Pair:
    return training(model.parameters(), lambda: loss(model)), training(switched.parameters(), lambda: loss(switched))


def save_on_cpu(dropout: float) -> Pair:
    model, batch = llama(dropout), padded(samples()[:4])

    def switched() -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(**batch).loss

    return of_one_model(model, lambda: model(**batch).loss, switched)


def checkpointed_blocks(dropout: float, run: Callable[[nn.Module, Tensor], Tensor]) -> Pair:
    model, batch = blocks(dropout), torch.randn(8, 16, WIDTH)

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            first, *others = self.layers
            return functools.reduce(lambda hidden, block: run(block, hidden), others, first(x))

    whole = Switched()
    return of_one_model(model, lambda: model(batch).square().mean(), lambda: whole(batch).square().mean())


def torch_checkpoint(dropout: float, **options: Any) -> Pair:
    return checkpointed_blocks(dropout, lambda block, x: checkpoint(block, x, **options))


def kept_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def fully_sharded(dropout: float, offload: bool) -> Pair:
    """One process: the hooks, copies and dtypes of FSDP2, without its exchange between ranks."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model, batch = blocks(dropout), torch.randn(8, 16, WIDTH)
    sharded = copy.deepcopy(model)
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for module in (*sharded, sharded):
        fully_shard(module, mesh=mesh, offload_policy=policy)
    return of_two_models(model, sharded, lambda each: each(batch).square().mean())


def trl_fused_head(dropout: float, lora: bool) -> Pair:
    from peft import LoraConfig, get_peft_model
    from trl.trainer.utils import add_fused_lm_head

    model, batch = llama(dropout), padded(samples()[:4])
    add_fused_lm_head(model)
    whole = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")) if lora else model
    return of_one_model(whole, lambda: whole(**batch).loss, lambda: whole(**batch, fused_lm_head=True).loss)


def deepspeed_tiled_mlp(dropout: float) -> Pair:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    def forward(mlp: Any, x: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    def in_tiles(mlp: nn.Module, x: Tensor) -> Tensor:
        return TiledMLP.apply(forward, mlp, x, NUM_SHARDS, list(mlp.parameters()))

    model, batch = llama(dropout), padded(samples()[:4])
    tiled = copy.deepcopy(model)
    for layer in tiled.model.layers:
        layer.mlp.forward = functools.partial(in_tiles, layer.mlp)
    return of_two_models(model, tiled, lambda each: each(**batch).loss)


class WithLoss(nn.Module):
    """A decoder and a loss of its last hidden states, its head and the labels that follow."""

    def __init__(self, model: Any, loss: LossOfHead) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.loss(self.model.lm_head, hidden[:, :-1], labels[:, 1:])


def cross_entropy(head: nn.Module, hidden: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(head(hidden).flatten(0, -2), labels.flatten(), reduction=reduction)


def of_two_losses(dropout: float, tiled: LossOfHead, sequences: list[Tensor], scale: float) -> Pair:
    plain, batch = WithLoss(llama(dropout), cross_entropy), padded(sequences)
    switched = WithLoss(plain.model, tiled)
    return of_one_model(plain, lambda: plain(**batch) * scale, lambda: switched(**batch) * scale)


def deepspeed_tiled_loss(dropout: float, reduction: str = "mean", scale: float = 1.0, uneven: bool = False) -> Pair:
    """With "sum", the result is divided by the number of labels, as the docstring of TiledFusedLogitsLoss advises."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    def tiled(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        loss_of = functools.partial(cross_entropy, reduction=reduction)
        weights = list(head.parameters())
        loss = TiledFusedLogitsLoss.apply(loss_of, head, hidden, labels, None, NUM_SHARDS, weights, reduction)
        return loss / (labels >= 0).sum() if reduction == "sum" else loss

    return of_two_losses(dropout, tiled, samples()[:4] if uneven else EVEN, scale)


def deepspeed_tiled_compute(dropout: float, scale: float = 1.0) -> Pair:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    def tiled(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        return sequence_tiled_compute(
            functools.partial(cross_entropy, head),
            seqlen=hidden.shape[1],
            shards=NUM_SHARDS,
            kwargs_to_shard={"hidden": hidden, "labels": labels},
            kwargs_to_pass={},
            grad_requiring_tensor_key="hidden",
            compute_params=list(head.parameters()),
            output_unshard_dimension=0,
        )

    return of_two_losses(dropout, tiled, EVEN, scale)


def sentence_cached_loss(dropout: float) -> Pair:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel

    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        masks = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        torch.manual_seed(0)
        config = BertConfig(vocab_size=256, **sizes, **masks)
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        model = SentenceTransformer(modules=[Transformer(folder), Pooling(WIDTH)], device="cpu").train()
    columns = [model.preprocess(texts()[:8]), model.preprocess(texts()[8:])]
    plain = losses.MultipleNegativesRankingLoss(model)
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)

    def loss(of: nn.Module) -> Tensor:
        return of([dict(column) for column in columns], None)

    return of_one_model(model, lambda: loss(plain), lambda: loss(cached))


def diffusers_unet(dropout: float, switch: Callable[[Any], None]) -> Pair:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        dropout=dropout,
    ).train()
    images, prompts, times = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 32), torch.tensor([3, 7])
    switched = copy.deepcopy(model)
    switch(switched)
    return of_two_models(model, switched, lambda each: (each(images, times, prompts).sample - images).square().mean())


PAIRS: dict[str, Callable[[float], Pair]] = {
    "save_on_cpu": save_on_cpu,
    "checkpoint": functools.partial(torch_checkpoint, use_reentrant=False),
    "checkpoint-reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "checkpoint-other-masks": functools.partial(torch_checkpoint, use_reentrant=False, preserve_rng_state=False),
    "checkpoint-reentrant-other-masks": functools.partial(
        torch_checkpoint, use_reentrant=True, preserve_rng_state=False
    ),
    "selective": functools.partial(
        torch_checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, kept_products),
    ),
    "our-selective": functools.partial(checkpointed_blocks, run=SelectiveCheckpoint("heavy_ops")),
    "fsdp2": functools.partial(fully_sharded, offload=False),
    "fsdp2-offload": functools.partial(fully_sharded, offload=True),
    "fused-head": functools.partial(trl_fused_head, lora=False),
    "fused-head-lora": functools.partial(trl_fused_head, lora=True),
    "tiled-mlp": deepspeed_tiled_mlp,
    "tiled-loss": deepspeed_tiled_loss,
    "tiled-loss-halved": functools.partial(deepspeed_tiled_loss, scale=0.5),
    "tiled-loss-sum": functools.partial(deepspeed_tiled_loss, reduction="sum"),
    "tiled-loss-uneven": functools.partial(deepspeed_tiled_loss, uneven=True),
    "tiled-compute": deepspeed_tiled_compute,
    "tiled-compute-halved": functools.partial(deepspeed_tiled_compute, scale=0.5),
    "cached-loss": sentence_cached_loss,
    "unet-checkpointing": functools.partial(diffusers_unet, switch=lambda unet: unet.enable_gradient_checkpointing()),
    "unet-attention-slicing": functools.partial(diffusers_unet, switch=lambda unet: unet.set_attention_slice("max")),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", choices=PAIRS)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answer there as JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.manual_seed(0)
    report = verify(*PAIRS[options.pair](options.dropout))
    print(report)
    if options.json:
        options.json.write_text(json.dumps(report.to_dict()))


if __name__ == "__main__":
    main()
