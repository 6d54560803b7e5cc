"""Tests of operators on the fake device: the CPU's bits, the stream's order, the GPU's rules about arguments."""

import copy
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fake_cuda import device
from fake_cuda.launch import environment


class Decoder(nn.Module):
    """A small transformer: embedding, norm, attention, a gated feed-forward layer and a tied head."""

    def __init__(self, fused_attention: bool) -> None:
        super().__init__()
        self.fused_attention = fused_attention
        self.embedding, self.norm = nn.Embedding(100, 64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        if self.fused_attention:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.ones(q.shape[-2], q.shape[-2], device=q.device, dtype=torch.bool).tril()
            attended = (q @ k.mT / 4).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)) * torch.sigmoid(x.sum(-1, keepdim=True)))
        return x @ self.embedding.weight.T


def loss_and_gradients(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def equal(on_gpu: list[Tensor], on_cpu: list[Tensor]) -> bool:
    return all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu, on_cpu, strict=True))


@pytest.mark.parametrize("fused_attention", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_has_the_cpus_bits(fused_attention: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(fused_attention).to(dtype), torch.randint(100, (2, 40))
    want = loss_and_gradients(copy.deepcopy(model), tokens)
    got = loss_and_gradients(model.cuda(), tokens.cuda())
    assert all(torch.isfinite(gradient).all() for gradient in got)
    assert equal(got, want)


def test_a_convolutional_network_has_the_cpus_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 8)
    )
    images = torch.randn(4, 3, 16, 16)

    def gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
        model(images).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    want = gradients(copy.deepcopy(model), images)
    assert equal(gradients(model.cuda(), images.cuda()), want)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_have_the_cpus_bits(optimizer: Callable[..., torch.optim.Optimizer], foreach: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(10, 10) for _ in range(3)]

    def trained(place: str) -> list[Tensor]:
        parameters = [nn.Parameter(weight.to(place, copy=True)) for weight in weights]
        steps = optimizer(parameters, lr=0.1, foreach=foreach)
        for _ in range(3):
            sum(parameter.square().sum() for parameter in parameters).backward()
            steps.step()
            steps.zero_grad()
        return [parameter.detach() for parameter in parameters]

    assert equal(trained("cuda"), trained("cpu"))


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": lambda x: x.T[::2].exp(),
    "cast": lambda x: x.to(torch.float16).to(torch.float64),
    "copy into a view": lambda x: x.clone().T.copy_(x),
    "type promotion": lambda x: x.half() * 2.5 + torch.tensor(1.0, dtype=torch.float64),
    "integer division": lambda x: (x * 10).long() // 3,
    "index": lambda x: x[torch.tensor([3, 1])],
    "mask": lambda x: x[x > 0],
    "index_put": lambda x: x.clone().index_put_((torch.tensor([1, 1], device=x.device),), x[:2], accumulate=True),
    "sort": lambda x: x.sort(dim=1).values,
    "top values": lambda x: x.topk(3).indices,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "complex": lambda x: torch.fft.irfft(torch.fft.rfft(x).conj()),
    "linear algebra": lambda x: torch.linalg.inv(x + 10 * torch.eye(10, device=x.device)),
    "cat": lambda x: torch.cat([x, x.T]),
    "cumulative sum": lambda x: x.cumsum(0),
    "unique": lambda x: x.round().unique(),
    "out": lambda x: torch.mul(x, x, out=torch.empty(10, 10, device=x.device)),
    "arange": lambda x: torch.arange(0, 7, 0.5, device=x.device) + torch.linspace(0, 1, 14, device=x.device),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "norm": lambda x: torch.stack(torch._foreach_norm([x, x.T])),
}


@pytest.mark.parametrize("case", CASES)
def test_operators_have_the_cpus_bits(case: str) -> None:
    x = torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
    on_gpu = CASES[case](x.cuda())
    want = CASES[case](x)
    assert on_gpu.is_cuda
    assert on_gpu.dtype == want.dtype
    assert torch.equal(on_gpu.cpu(), want)


def test_kernels_run_without_the_host() -> None:
    x = torch.ones(8, device="cuda")
    with device.settings(kernel_s=0.01), device.no_synchronization():
        for _ in range(20):
            x = F.silu(x @ torch.diag(x))
        assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_random_numbers_follow_from_the_generator() -> None:
    def draw() -> Tensor:
        return torch.cat([torch.randn(4, device="cuda"), F.dropout(torch.ones(4, device="cuda"))])

    torch.cuda.manual_seed(1)
    state = torch.cuda.get_rng_state()
    first, second = draw(), draw()
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)


def test_errors_about_arguments_come_at_the_call() -> None:
    x = torch.zeros(3, 4, device="cuda")
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.zeros(3, 4)


def test_autocast_with_a_scaler() -> None:
    model, scaler = nn.Linear(8, 8).cuda(), torch.amp.GradScaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cuda", torch.float16):
        out = model(torch.ones(2, 8, device="cuda"))
    assert out.dtype == torch.float16
    scaler.scale(out.float().square().mean()).backward()
    before = model.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(("capability", "kernel"), [("75", "efficient"), ("80", "flash"), ("90", "cudnn")])
def test_torch_chooses_attention_by_the_compute_capability(capability: str, kernel: str) -> None:
    program = (
        "import torch; q = torch.empty(1, 4, 64, 64, dtype=torch.float16, device='cuda');"
        "print(torch.cuda.get_device_capability(), torch._fused_sdp_choice(q, q, q))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(capability=capability),
        capture_output=True,
        text=True,
        check=True,
    )
    choice = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}[kernel]
    assert found.stdout.strip() == f"({capability[0]}, {capability[1]}) {choice}", found.stderr


def test_grouped_attention_with_dropout_is_that_of_repeated_keys() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 8, 16, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))

    def run(repeats: int) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (query, key, value)]
        keys, values = (each.repeat_interleave(repeats, 1) for each in leaves[1:])
        torch.manual_seed(1)
        output = F.scaled_dot_product_attention(leaves[0], keys, values, dropout_p=0.5, enable_gqa=repeats == 1)
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    for grouped, repeated in zip(run(1), run(2), strict=True):
        torch.testing.assert_close(grouped, repeated)  # sums over a group may be rounded half-way
