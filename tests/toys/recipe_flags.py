"""Flags of each recipe's smallest models that do everything."""

from pathlib import Path

from lgt_toys import TINY as LGT_MODEL

ROOT = Path(__file__).parents[2]

# With accumulation ten updates take 40 batches, and an epoch has 27, so that a window crosses its end.
CAUSAL_LM = (
    f"--text_file={ROOT / 'LICENSE'}",
    "--vocab_size=300",
    "--block_size=32",
    "--per_device_batch_size=8",
    "--max_steps=10",
    "--warmup_steps=2",
    "--eval_every=5",
    "--log_every=5",
    "--offload_threshold_mb=0.02",
    "--config_overrides=hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,"
    "num_key_value_heads=1,head_dim=16,max_position_embeddings=64,tie_word_embeddings=true,attention_dropout=0.1",
)

NEURAL_OPERATOR = (
    "--num_train=24",
    "--num_test=4",
    "--test_resolutions",
    "16",
    "32",
    "--solve_resolution=0",
    "--modes=6",
    "--hidden_channels=6",
    "--num_layers=4",
    "--batch_size=8",
    "--epochs=4",
    "--eval_every=2",
    "--offload_threshold_mb=0.01",
)

FLUXFLOW = (
    "--channels",
    "8",
    "8",
    "--discriminator_channels=4",
    "--discriminator_layers=1",
    "--resolution=16",
    "--num_drawn=12",
    "--lpips_weight=0",
    "--batch_size=4",
    "--log_every=1",
    "--offload=off",
)

# 36 latents to train on: 9 batches of 4, and with windows of 2 a last one of 1.
LGT = (
    *(f"--{name}={value}" for name, value in LGT_MODEL.items()),
    "--training.batch_size=4",
    "--training.accumulation_steps=2",
    "--training.num_epochs=2",
    "--training.learning_rate=0.003",
    "--training.label_drop_prob=0.3",
    "--training.log_every=1",
    "--inference.num_steps=2",
    "--inference.num_panels=2",
    "--offload.offload_threshold_mb=0.001",
    "--offload.cpu_copies",
)
