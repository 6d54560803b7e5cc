"""Trains with ORPO as a file says, like TRL's scripts for its other trainers, none of which is for ORPO.

`accelerate launch -m hf_memopt.integrations.train_orpo --config orpo.yaml`, whose fields are those of
ORPOConfig, ModelConfig and ScriptArguments.
"""

import sys
from typing import Any

from hf_memopt.command_line import one_line_errors


def main(script: Any, arguments: Any, about: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import get_peft_config, get_quantization_config
    from trl.experimental.orpo import ORPOTrainer

    from hf_memopt.datasets_by_name import dataset_by_name
    from hf_memopt.planning.models.hub_code import check_model

    check_model(about.model_name_or_path, about.model_revision)
    tokenizer = AutoTokenizer.from_pretrained(
        about.model_name_or_path, revision=about.model_revision, trust_remote_code=False
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        about.model_name_or_path,
        revision=about.model_revision,
        attn_implementation=about.attn_implementation,
        dtype=about.dtype,
        quantization_config=get_quantization_config(about),
        trust_remote_code=False,
    )
    trainer = ORPOTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset_by_name(
            script.dataset_name, script.dataset_train_split, script.dataset_config, field="dataset_name"
        ),
        processing_class=tokenizer,
        peft_config=get_peft_config(about),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model(arguments.output_dir)


if __name__ == "__main__":
    from trl import ModelConfig, ScriptArguments, TrlParser
    from trl.experimental.orpo import ORPOConfig

    parser = TrlParser((ScriptArguments, ORPOConfig, ModelConfig))
    sys.exit(one_line_errors("train_orpo", lambda given: main(*parser.parse_args_and_config(given, False, False)[:3])))
