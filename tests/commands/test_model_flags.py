"""Flags of transformers models: the choices of the library, and words that say the same again."""

import argparse

from hf_memopt.commands import model_flags


def test_the_choices_are_those_of_the_library() -> None:
    from hf_memopt.jobs.transformers_models import model_building, model_options, model_update

    known = {
        **model_options.CHOICES,
        "checkpointing": model_building.CHECKPOINTING,
        "offload": model_update.OFFLOAD,
    }
    choices = model_flags.MODEL_CHOICES | model_flags.ACTIVATION_CHOICES
    assert {name: values for name, (values, _) in choices.items()} == known


def test_what_was_given_can_be_said_again() -> None:
    parser = argparse.ArgumentParser()
    model_flags.add_to(parser)
    words = ["--seq-len", "32", "--lora-rank", "2", "--max-grad-norm", "none", "--dtype", "bfloat16", "--use-dora"]
    again = model_flags.given(parser.parse_args(words))
    assert sorted(again) == sorted(words)
    assert parser.parse_args(again) == parser.parse_args(words)
    assert model_flags.given(parser.parse_args([])) == []
