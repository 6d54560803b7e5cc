"""Text for `train_causal_lm.py`: where it comes from, its tokenizer, and how it is packed into blocks.

The default corpus is the documentation in every Python installation: the language reference behind `help()` and the
standard library's docstrings, about 2 MB, read at run time from the interpreter that runs this. It is under the PSF
License Agreement (https://docs.python.org/3/license.html), and the same for every run on one installation.
"""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase

from hf_memopt.datasets_by_name import dataset_by_name
from hf_memopt.recipes.causal_lm.options import DataOptions, ModelOptions
from hf_memopt.recipes.common.flags import explained

# Tests and applications, and modules that some distributions install separately.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "distutils"}
_LEFT_OUT |= {"site-packages", "dist-packages"}


def read_texts(options: DataOptions) -> Dataset:
    """Return the corpus, one document per row in the column `text`."""
    if options.text_file and options.dataset:
        raise ValueError(f"text_file={options.text_file} and dataset={options.dataset!r} exclude each other; pass one")
    if options.dataset:
        found, column = dataset_by_name(options.dataset, options.split, options.dataset_config), options.text_column
        if column not in found.column_names:
            raise ValueError(f"text_column={column!r} is not in {options.dataset!r}; choose from {found.column_names}")
        return found.select_columns(column).rename_column(column, "text")
    documents = []
    for name in options.text_file:
        with explained(f"text_file={name!r} cannot be read as UTF-8 text"):
            documents.append(Path(name).read_text(encoding="utf-8"))
    documents = documents or list(python_documentation())
    return Dataset.from_dict({"text": documents})


def describe_corpus(options: DataOptions) -> str:
    if options.dataset:
        return f"dataset {options.dataset}"
    return ", ".join(options.text_file) or "Python's documentation (PSF licence), from this interpreter"


def python_documentation() -> Iterator[str]:
    """Yield a document per topic of the language reference and per module, in a fixed order, in about three seconds."""
    yield from (text for _, text in sorted(topics.items()))
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        if not _LEFT_OUT & set(file.relative_to(library).parts):
            docstrings = "\n\n".join(_docstrings(file.read_bytes()))
            if docstrings:
                yield docstrings


def _docstrings(source: bytes) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # old escapes in other people's strings
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from filter(None, [ast.get_docstring(node)])


def make_tokenizer(options: ModelOptions, texts: Dataset) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was named, the model's, or one trained on the texts."""
    name = options.tokenizer or options.model
    if name is None:
        # Byte-level BPE with one special token. The same texts give the same tokenizer.
        return GPT2Tokenizer().train_new_from_iterator(texts["text"], options.vocab_size, show_progress=False)
    with explained(f"tokenizer={name!r} cannot be loaded; pass a hub id or folder"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer={name!r} has no end-of-sequence token to put between documents; set its eos_token")
    return tokenizer


def pack(texts: Dataset, tokenizer: PreTrainedTokenizerBase, options: DataOptions, seed: int) -> DatasetDict:
    """Return tokens in blocks, split into `train` and `test`; each row has `input_ids`, `(block_size,)`.

    The end-of-sequence token is between documents. A rest that does not fill the last block of a thousand documents is
    left out. Held-out blocks may come from the same documents as others.
    """
    size = options.block_size

    def into_blocks(rows: dict[str, list[str]]) -> dict[str, Any]:
        documents = tokenizer(rows["text"], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = list(chain.from_iterable([*ids, tokenizer.eos_token_id] for ids in documents))
        return {"input_ids": [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size)]}

    blocks = texts.map(into_blocks, batched=True, remove_columns=texts.column_names, desc="Tokens")
    num_held_out = round(options.held_out * len(blocks))
    if not 0 < num_held_out < len(blocks):
        raise ValueError(
            f"block_size={size}: the text gives {len(blocks)} blocks and held_out={options.held_out} would set "
            f"{num_held_out} of them aside; use more text, shorter blocks or another share"
        )
    return blocks.train_test_split(test_size=num_held_out, seed=seed)
