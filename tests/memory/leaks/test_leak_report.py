import gc

import torch
from leaky_steps import ACTIVATION_BYTES, garbage_cycle, growing_outputs, kept_loss, toy, toy_step

from hf_memopt.memory.leaks.detect import detect_leaks


def test_sizes_are_exact() -> None:
    report = detect_leaks(growing_outputs())
    assert report.bytes_per_step == ACTIVATION_BYTES
    (culprit,) = report.culprits
    assert (culprit.count, culprit.bytes, culprit.dtype) == (40, 40 * ACTIVATION_BYTES, torch.float32)
    assert (report.first_step, report.last_step) == (11, 50)


def test_nodes_of_a_kept_graph_are_counted() -> None:
    (culprit,) = detect_leaks(kept_loss()).culprits
    loss = toy_step(*toy())
    nodes, stack = set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [following for following, _ in node.next_functions]
    assert culprit.graph_nodes == len(nodes) > 5


def test_garbage_that_waits_for_the_collector_is_told_apart() -> None:
    gc.disable()
    report = detect_leaks(garbage_cycle())
    assert report.bytes_freed_by_gc == 40 * ACTIVATION_BYTES
    assert "gc.collect() freed" in str(report)
    assert detect_leaks(growing_outputs()).bytes_freed_by_gc == 0
