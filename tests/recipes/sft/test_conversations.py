from pathlib import Path
from typing import Any

import pytest
from late_imports import LateModule

conversations = LateModule("hf_memopt.recipes.sft.model")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tiny")
    conversations.write_tiny_model(folder, 0)
    return AutoTokenizer.from_pretrained(folder)


def test_only_the_assistants_words_are_marked_and_its_end_is_among_them(tokenizer: Any) -> None:
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    (row,) = conversations.make_conversations(1, 0)
    tokens = tokenizer.apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    words = tokenizer.convert_ids_to_tokens(tokens["input_ids"])
    marked = [word for word, mask in zip(words, tokens["assistant_masks"], strict=True) if mask]
    answers = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
    assert " ".join(marked) == f"{answers[0]} <eos> {answers[1]} <eos>"
    assert is_chat_template_stop_token_trained(tokenizer)


def test_answers_are_right_and_in_the_vocabulary(tokenizer: Any) -> None:
    for row in conversations.make_conversations(200, 3):
        question, answer, _, following = (turn["content"].split() for turn in row["messages"])
        assert int(question[2]) + int(question[4]) == int(answer[4])
        assert int(following[0]) == int(following[2]) + 1
        assert {*question, *answer, *following} <= tokenizer.get_vocab().keys()


def test_a_seed_gives_the_same_again(tmp_path: Path) -> None:
    assert conversations.make_conversations(9, 1).to_list() == conversations.make_conversations(9, 1).to_list()
    assert conversations.make_conversations(9, 1).to_list() != conversations.make_conversations(9, 2).to_list()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        conversations.write_tiny_model(tmp_path / name, seed)
    first, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == same
    assert first != other
