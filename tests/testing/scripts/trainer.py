"""The Trainer of Hugging Face, with a tiny Llama and a data set in memory."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class WrongTrainer(Trainer):
    """A loss of its own: a mean over the tokens of each process."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss
        return (loss, outputs) if return_outputs else loss


def main():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        attention_dropout=0.1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    data = []
    for row in range(64):
        tokens = torch.randint(64, (12,))
        labels = tokens.clone()
        labels[: row % 7] = -100
        data.append(
            {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
        )
    arguments = TrainingArguments(
        output_dir="/tmp/trainer_of_certify",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        warmup_steps=2,
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=True,
    )
    trainer_class = WrongTrainer if "--bug" in sys.argv else Trainer
    trainer = trainer_class(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    trainer.save_model("/nowhere/model")


if __name__ == "__main__":
    main()
