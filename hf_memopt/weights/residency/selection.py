"""The weights of a model that stream, those that stay, and the modules that visit them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from hf_memopt.autograd_state import is_plain
from hf_memopt.weights.homes.packed_weights import memory_ranges, stored_tensors
from hf_memopt.weights.residency.guards import StreamedParameter
from hf_memopt.weights.residency.resident_set import Visit

# The smallest weights stay, up to this share of all: their copies would cost more time than their memory is worth.
_SMALL_SHARE = 0.01
# torch's own attention, which takes another path where a weight inside is of an unknown class, as one that is away.
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class Selection:
    """The parameters that stream, under each of their names, and the tensors that stay.

    Attributes:
        streamed: parameters, frozen unless those that train stream too.
        others: parameters that stay, and buffers.
        resident: by reason, the parameters that would stream otherwise, by name.
    """

    streamed: tuple[StreamedParameter, ...]
    others: tuple[Tensor, ...]
    resident: dict[str, dict[str, nn.Parameter]]

    @property
    def resident_bytes(self) -> dict[str, int]:
        return {reason: sum(each.nbytes for each in named.values()) for reason, named in self.resident.items()}


def select(model: nn.Module, trained: bool = False) -> Selection:
    """Return the parameters that stream, the frozen ones or all; a ValueError where there are none, or one cannot.

    Those cannot that are sharded, sparse, on the meta device, or made in inference mode.
    """
    frozen: dict[nn.Parameter, int] = {}
    for name, parameter in model.named_parameters():
        if trained or not parameter.requires_grad:
            if parameter.is_inference():
                raise ValueError(
                    f"weight {name!r} was made in torch.inference_mode(), and autograd cannot save it; load the "
                    "model outside of that mode"
                )
            frozen[parameter] = sum(
                {inner.data_ptr(): inner.nbytes for inner in stored_tensors(name, parameter)}.values()
            )
    if trained and not any(each.requires_grad for each in model.parameters()):
        raise ValueError("trained=True: model has no weights that train; unfreeze some, or leave trained out")
    if not any(frozen.values()):
        raise ValueError("model has no frozen weights that could stream; freeze its base with requires_grad_(False)")
    staying = why_they_stay(model, trained)
    room = int(_SMALL_SHARE * sum(frozen.values()))
    for parameter, num_bytes in sorted(frozen.items(), key=lambda each: each[1]):
        room -= num_bytes
        if room < 0:
            break
        staying.setdefault(parameter, "small")
    streamed = tuple(
        StreamedParameter(f"{name}.{attribute}".lstrip("."), owner, attribute, parameter)
        for name, owner in model.named_modules(remove_duplicate=False)
        for attribute, parameter in owner._parameters.items()
        if parameter is not None and parameter in frozen and parameter not in staying
    )
    names = {each.parameter for each in streamed}
    others = [*(each for each in model.parameters() if each not in names), *model.buffers()]
    resident: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter in staying:
            resident.setdefault(staying[parameter], {})[name] = parameter
    return Selection(streamed, tuple(others), resident)


def why_they_stay(model: nn.Module, trained: bool = False) -> dict[Tensor, str]:
    """Return the parameters whose bytes belong to others too, or are written, each with the reason in words."""
    frozen: set[Tensor] = {each for each in model.parameters() if trained or not each.requires_grad}
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    others: list[tuple[str, list[Tensor]]] = [
        ("written by its module (max_norm)", [each.weight for each in tables if each.max_norm is not None]),
        ("memory of a trained weight", [each for each in model.parameters() if each not in frozen]),
        ("memory of a buffer", list(model.buffers())),
        ("memory of an attribute", [each for each in _attributes(model) if each not in frozen]),
    ]
    why = dict.fromkeys(frozen, "")
    for reason, tensors in others:
        why |= {each: reason for each in tensors if not why.get(each)}
    found: dict[Tensor, str] = {}
    for group in memory_ranges([each for each in why if is_plain(each) and each.numel()]):
        reasons = [why[each] for each in group.tensors if why[each]]
        found |= {each: reasons[0] for each in group.tensors if reasons and each in frozen}
    return found


def _attributes(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules have as plain attributes, or in lists and dictionaries of theirs."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers"):
                inside = (
                    value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
                )
                yield from (each for each in inside if isinstance(each, Tensor))


def visits_of(model: nn.Module, slices_of: Mapping[int, tuple[int, ...]]) -> dict[nn.Module, Visit]:
    """Return by module the storages that its call visits: its own, and of a region those of all modules inside.

    Rows of embeddings are looked up at home.
    """
    found: dict[nn.Module, Visit] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        is_region = reads_as_a_whole(module)
        read: Iterable[nn.Parameter] = module.parameters(recurse=is_region)
        if isinstance(module, nn.Embedding):
            read = ()
        elif isinstance(module, nn.TransformerEncoder):
            read = module.layers[0].parameters()
        visit = tuple(dict.fromkeys(number for each in read for number in slices_of.get(id(each), ())))
        if visit:
            found[module] = visit
        if not is_region or isinstance(module, _ATTENTION):  # whose parts may be called alone
            waiting.extend(module.children())
    return found


def reads_as_a_whole(module: nn.Module) -> bool:
    """Return whether code of a module may read the weights of modules inside, other than by calling them.

    A compiled region calls no module. PEFT's layers read the weights of their base, as DoRA does, but for plain LoRA
    of a module: that of a parameter (`target_parameters`) has a parametrization read it.
    """
    if calls_no_modules(module):
        return True
    if not isinstance(getattr(module, "base_layer", None), nn.Module):
        return False
    is_lora_of_module = hasattr(module, "lora_A") and not hasattr(module, "parameter_name")
    return not is_lora_of_module or bool(getattr(module, "lora_variant", None))


def calls_no_modules(module: nn.Module) -> bool:
    """Return whether a module reads weights in a way that other classes of theirs would change, or break."""
    return is_compiled(module) or isinstance(module, _ATTENTION)


def is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
