"""LoRA on a base that does not fit: its frozen weights stay in their safetensors file and visit the device.

python recipes/by_feature/streamed_base.py    # needs the extra peft
python recipes/by_feature/streamed_base.py --model Qwen/Qwen3-0.6B
"""

import argparse
import tempfile
from contextlib import nullcontext

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from hf_memopt import StreamedWeights  # hf_memopt

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_STEPS, LENGTH = 20, 128


def write_toy(folder: str) -> None:
    """Write a model whose tokens are bytes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "head_dim": 64}
    config = Qwen3Config(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def train(name: str, tokens: torch.Tensor, streams: bool) -> list[torch.Tensor]:
    """Return the adapters' weights."""
    # In the file's own dtype transformers maps the weights, which takes no memory.
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype="auto", attn_implementation="sdpa", trust_remote_code=False
    )
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    base = None
    if streams:
        base = StreamedWeights(model, home="file", device=device)  # hf_memopt: in place of model.to(device)
    else:
        model.to(device)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    for step in range(NUM_STEPS):
        batch = tokens[[step % len(tokens)]].to(device)
        with base.stream() if base else nullcontext():  # hf_memopt: around the forward pass and the loss
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()  # the weights come back for it by themselves
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1:2}  loss {loss.item():.4f}")
    if base:
        print(base.report())  # hf_memopt: the most that was on the device, bytes read, and the time waited for them
    return [parameter.detach() for parameter in adapters]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="hub id or folder of a causal language model (default: a toy)")
    model = parser.parse_args().model
    with open(__file__, "rb") as file:
        text = file.read()  # to learn by heart
    if model:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        tokens = torch.tensor(tokenizer(text.decode()).input_ids)
        train(model, tokens.unfold(0, LENGTH, LENGTH), streams=True)
        return
    tokens = torch.tensor(list(text)).unfold(0, LENGTH, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        write_toy(folder)
        plain, streamed = (train(folder, tokens, streams) for streams in (False, True))
        equal = all(map(torch.equal, plain, streamed))
        print(f"Adapters equal to those on a base in memory: {equal}")


if __name__ == "__main__":
    main()
