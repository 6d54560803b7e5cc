"""Trains with ORPO as a file says, like TRL's scripts for its other trainers, none of which is for ORPO.

`accelerate launch -m hf_memopt.integrations.transformers.train_orpo --config orpo.yaml`, whose fields are those of
ORPOConfig, ModelConfig and ScriptArguments.
"""

from typing import Any


def main(script: Any, arguments: Any, about: Any) -> None:
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import get_peft_config, get_quantization_config
    from trl.experimental.orpo import ORPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(about.model_name_or_path, revision=about.model_revision)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        about.model_name_or_path,
        revision=about.model_revision,
        attn_implementation=about.attn_implementation,
        dtype=about.dtype,
        quantization_config=get_quantization_config(about),
    )
    dataset = load_dataset(script.dataset_name, name=script.dataset_config)
    trainer = ORPOTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset[script.dataset_train_split],
        processing_class=tokenizer,
        peft_config=get_peft_config(about),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model(arguments.output_dir)


if __name__ == "__main__":
    from trl import ModelConfig, ScriptArguments, TrlParser
    from trl.experimental.orpo import ORPOConfig

    parser = TrlParser((ScriptArguments, ORPOConfig, ModelConfig))
    main(*parser.parse_args_and_config(fail_with_unknown_args=False)[:3])
