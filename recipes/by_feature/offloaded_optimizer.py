"""All weights learn, and AdamW's state, twice their size, stays in a file and visits the device in each update.

python recipes/by_feature/offloaded_optimizer.py    # with clipping, accumulation and a schedule
python recipes/by_feature/offloaded_optimizer.py --model Qwen/Qwen3-0.6B --disk /mnt/nvme
"""

import argparse

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, get_scheduler

from hf_memopt import OffloadedOptimizer  # hf_memopt

NUM_UPDATES, LENGTH = 10, 64


def make_model(name: str | None) -> torch.nn.Module:
    """Return a model; without a name a toy, whose tokens are bytes."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes))


def train(model: torch.nn.Module, tokens: torch.Tensor, moves_state: bool, disk: str | None) -> list[torch.Tensor]:
    """Return the model's weights."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    away = None
    if moves_state:
        # hf_memopt: of any optimizer, before accelerate prepares it; home="host" is host memory
        optimizer = away = OffloadedOptimizer(optimizer, home="file", disk=disk)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=NUM_UPDATES)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for step in range(2 * NUM_UPDATES):
        batch = tokens[[step % len(tokens)]].to(accelerator.device)
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 4 == 3:
            print(f"update {(step + 1) // 2:2}  loss {loss.item():.4f}")
    if away:
        print(away.report())  # hf_memopt: bytes moved, time waited for them, and the wear of the disk in a day
    return [parameter.detach() for parameter in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="hub id or folder of a causal language model (default: a toy)")
    parser.add_argument("--disk", help="folder on a local disk for the state (default: that for temporary files)")
    given = parser.parse_args()
    with open(__file__, "rb") as file:
        text = file.read()  # to learn by heart
    if given.model:
        tokenizer = AutoTokenizer.from_pretrained(given.model, trust_remote_code=False)
        tokens = torch.tensor(tokenizer(text.decode()).input_ids).unfold(0, LENGTH, LENGTH)
        train(make_model(given.model), tokens, True, given.disk)
        return
    tokens = torch.tensor(list(text)).unfold(0, LENGTH, LENGTH)
    plain, ours = (train(make_model(None), tokens, moves_state, given.disk) for moves_state in (False, True))
    print(f"Weights equal to those with the state on the device: {all(map(torch.equal, plain, ours))}")


if __name__ == "__main__":
    main()
