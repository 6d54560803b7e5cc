"""Obstacles in torch: parts of plain runs' errors. Another error fails a test, and an error that is gone the sweep."""

from collections.abc import Iterable

from offload_variants import Outcome

NO_SECOND = "no second derivative"  # by torch's database
_FLASH = "_scaled_dot_product_flash_attention_for_cpu_backward is not implemented"
_POOL = "avg_pool3d_out_frame"
_IN_MODE = "inside an empty dispatch mode"
# Under autocast torch multiplies in bfloat16, and only empty matrices pass backward; see the documentation.
_OUT = "functions with out=... arguments don't support automatic differentiation"  # in second derivatives
# From torch 2.15 on, a kernel without second derivative computes the first sample of attention.
_SDPA = "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward"
_PINV = ("to have the same dtype, but got: c10::BFloat16", "autocast")

OPERATOR_OBSTACLES: dict[str, tuple[str, ...]] = {
    "as_strided.partial_views": ("setStorage: sizes",),  # reaches beyond its input, which has its own memory here
    "i0": ('"i1_backward" not implemented',),
    "linalg.eigh": ("(input_is_complex == grad_is_complex)",),  # second derivatives raise inside any dispatch mode
    "linalg.pinv": (*_PINV, _IN_MODE),
    "linalg.pinv.hermitian": (*_PINV, _IN_MODE),
    "linalg.pinv.singular": ("linalg.pinv(BFloat16",),
    "masked.prod": (_IN_MODE,),  # zeros of the other sign in second derivatives
    # Inside a mode ctc_loss's mean saves two tensors more, and checkpointing finds fewer when it recomputes outside.
    "nn.functional.ctc_loss": ("_ctc_loss_backward is not implemented", _IN_MODE),
    "nn.functional.linear_cross_entropy.chunked_none": (_OUT,),
    "nn.functional.rrelu": ("other bits under torch's checkpointing",),  # checkpointing stops before the noise is drawn
    "nn.functional.scaled_dot_product_attention": (_SDPA,),
    "sparse.sampled_addmm": ("is_coalesced expected sparse coordinate tensor", "_to_sparse does not support automatic"),
    "special.i0e": ('"i1e_backward" not implemented',),
    "view_as_real": ("view_as_real doesn't work on unresolved conjugated tensors",),
}

_LSTM = "could not create a primitive descriptor for the LSTM forward"
# Errors that depend on oneDNN's kernels for the CPU or on torch's version, and may be absent.
NOT_EVERYWHERE = (_LSTM, _SDPA)

MODULE_OBSTACLES: dict[str, tuple[str, ...]] = {
    "nn.AvgPool3d": (_POOL,),
    "nn.CTCLoss": ("ctc_loss_cpu", "_ctc_loss_backward is not implemented", _IN_MODE),
    "nn.LPPool3d": (_POOL,),
    "nn.LSTM": (_LSTM,),
    "nn.LinearCrossEntropyLoss": (_OUT,),
    "nn.LocalResponseNorm": (_POOL,),
    "nn.MultiLabelMarginLoss": (
        "multilabel_margin_loss_forward_out_frame",
        "multilabel_margin_loss_backward is not implemented",
    ),
    "nn.MultiMarginLoss": ("multi_margin_loss_cpu_kernel", "multi_margin_loss_backward is not implemented"),
    "nn.Transformer": (_FLASH,),
    "nn.TransformerDecoderLayer": (_FLASH,),
    "nn.TransformerEncoder": (_FLASH,),
    "nn.TransformerEncoderLayer": (_FLASH,),
}

_CSR_BFLOAT16 = '"addmm_out_sparse_csr_impl_mkl" not implemented'

LAYOUT_OBSTACLES: dict[str, tuple[str, ...]] = {
    "COO operand": ("expected scalar type Float but found BFloat16",),
    "COO operand with gradient": ("to have the same dtype, but got: c10::BFloat16",),
    "COO sum": ("_sparse_sum_backward is not implemented",),
    "COO softmax": ("_sparse_softmax_backward_data is not implemented",),
    "CSR operand": (_CSR_BFLOAT16,),
    "CSR with gradient": (_CSR_BFLOAT16, "is_coalesced expected sparse coordinate tensor layout"),
    "CSC operand": (_CSR_BFLOAT16,),
    "nested strided": ("NestedTensorImpl doesn't support sizes",),
    "nested jagged": ("'_nested_from_padded_tensor' is not differentiable", "have different metadata"),
    "oneDNN linear": ("arguments from the 'MkldnnCPU' backend", "mkldnn_linear_backward is not implemented"),
    "oneDNN": ("'aten::empty_strided' with arguments from the 'MkldnnCPU' backend",),
}


def faults_of(outcomes: Iterable[Outcome], known: tuple[str, ...], *, is_whole: bool) -> list[str]:
    """Return the failures and obstacles that are not known and, if all samples ran, known obstacles that are gone."""
    outcomes = list(outcomes)
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    faults = [failure for failure in failures if not any(part in failure for part in known)]
    found = [text for outcome in outcomes for text in outcome.obstacles.items()]
    for setting, text in found:
        if not any(part in text for part in (NO_SECOND, *known)):
            faults.append(f"the plain run cannot do this, {setting}: {text}")
    if is_whole:
        said = [*failures, *(text for _, text in found)]
        required = [part for part in known if part not in NOT_EVERYWHERE]
        gone = [part for part in required if not any(part in text for text in said)]
        faults += [f"no longer an obstacle: {part}" for part in gone]
    return faults
