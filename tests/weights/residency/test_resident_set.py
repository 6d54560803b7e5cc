import torch
from torch import nn

from hf_memopt.transfer import SyncCopier
from hf_memopt.weights.base import StreamedWeights


def test_weights_fetched_ahead_are_brought_once() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False).requires_grad_(False) for _ in range(4)))
    streamed = StreamedWeights(model, home="host", copier=SyncCopier())
    x = torch.ones(2, 16, requires_grad=True)
    brought = []
    for _ in range(3):
        before = streamed.report().bytes_to_device
        with streamed.stream():
            loss = model(x).sum()
        loss.backward()
        brought.append(streamed.report().bytes_to_device - before)
    # The last layer's visit in forward lasts until that in backward, once it is known that this one comes next.
    assert brought == [8 * 1024, 7 * 1024, 7 * 1024]
    assert streamed.report().peak_device_bytes == 2 * 1024
