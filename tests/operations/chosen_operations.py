"""The operators and modules that the default suite runs, the same in every process."""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path

# Another seed runs another tenth: HF_MEMOPT_SEED=7 make test.
SEED = int(os.environ.get("HF_MEMOPT_SEED", "0"))
_ONE_OF = 10

# torch's database takes many seconds to import, too long for collecting tests, so its names are listed here.
_FOLDER = Path(__file__).parent
OPERATORS = (_FOLDER / "operators.txt").read_text().split()
MODULES = (_FOLDER / "modules.txt").read_text().split()
# Names that torch 2.11 or torch 2.15 does not list.
NOT_IN_EACH_TORCH = {
    *("aminmax", "cholesky", "linalg.matrix_sqrth", "linalg.polar", "narrow_copy", "native_group_norm", "nextafter"),
    *("nn.LinearCrossEntropyLoss", "nn.functional.linear_cross_entropy", "nn.functional.linear_cross_entropy.chunked"),
    *("nn.functional.linear_cross_entropy.chunked_none", "qr", "special.bessel_j0", "special.bessel_j1"),
    *("special.bessel_y0", "special.bessel_y1", "special.modified_bessel_i0", "special.modified_bessel_i1"),
    *("special.modified_bessel_k0", "special.modified_bessel_k1"),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
}

# Names that were once wrong.
ALWAYS_OPERATORS = [
    *("corrcoef", "cov", "istft", "linalg.lstsq", "linalg.lstsq.grad_oriented", "linalg.pinv", "nanquantile"),
    *("nn.functional.bilinear", "nn.functional.rrelu", "pinverse", "quantile", "to_sparse"),
    *("unsafe_chunk", "unsafe_split"),
]
ALWAYS_MODULES = ["nn.GRU", "nn.GRUCell", "nn.LSTM", "nn.LSTMCell", "nn.Bilinear"]


def chosen(names: Sequence[str], always: Sequence[str]) -> list[str]:
    """Return a tenth of the names, by seed, and the names that always run."""
    tenth = {name for name in names if zlib.crc32(f"{SEED} {name}".encode()) % _ONE_OF == 0}
    return sorted(tenth | set(always))
