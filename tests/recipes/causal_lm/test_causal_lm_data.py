import pytest
from late_imports import LateModule

from hf_memopt.recipes.causal_lm.options import parse

causal_lm_data = LateModule("hf_memopt.recipes.causal_lm.data")
datasets = LateModule("datasets")


@pytest.mark.e2e
def test_the_default_corpus_is_pythons_documentation() -> None:
    documents = list(causal_lm_data.python_documentation())
    assert sum(map(len, documents)) > 1_000_000
    assert any("is used for conditional execution" in text for text in documents)  # the language reference
    assert any("Base16, Base32, Base64" in text for text in documents)  # a docstring


def test_blocks_hold_the_text_in_order_and_none_twice() -> None:
    texts = datasets.Dataset.from_dict({"text": ["one two three " * 20, "four five six " * 20]})
    options = parse("", ["--block_size=8", "--held_out=0.2", "--vocab_size=300"])
    tokenizer = causal_lm_data.make_tokenizer(options.model, texts)
    blocks = causal_lm_data.pack(texts, tokenizer, options.data, seed=0)
    stream = [token for text in texts["text"] for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    expected = [tuple(stream[start : start + 8]) for start in range(0, len(stream) - 7, 8)]
    found = [tuple(row) for split in ("train", "test") for row in blocks[split]["input_ids"]]
    assert sorted(found) == sorted(expected)
    assert len(blocks["test"]) == round(0.2 * len(expected))
