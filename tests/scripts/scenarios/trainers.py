"""transformers' Trainer, whose log is recorded."""

import tempfile

import torch
from tiny import TIMES, batch, case, chosen, llama, norms
from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

NAMES = ("input_ids", "attention_mask", "labels")


def trained(kind=Trainer, evaluated=(), **changes):
    settings = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1,
                "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}  # fmt: skip
    rows = [dict(zip(NAMES, row, strict=True)) for step in range(4) for row in zip(*batch(step), strict=True)]
    trainer = kind(
        model=llama(),
        args=TrainingArguments(output_dir=tempfile.mkdtemp(), **{**settings, **changes}),
        train_dataset=rows,
        eval_dataset=rows[:4],
        compute_metrics=lambda found: {"mean": float(found.predictions[0].mean())},
    )
    trainer.train()
    recorded = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
    judged = trainer.evaluate() if evaluated else {}
    return [*recorded, [judged[name] for name in evaluated], norms(trainer.model)]


@case(expect="packed")
def trainer_plain():
    """The model's own loss."""
    return trained()


@case
def trainer_label_smoothing():
    """The Trainer smooths labels by its own means, from the model's logits."""
    batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return trained(max_steps=3, label_smoothing_factor=0.1, **batches)


@case
def trainer_compute_loss():
    """A compute_loss of the script's own that reads all logits, and an evaluation."""

    class Sharper(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return trained(Sharper, evaluated=("eval_loss", "eval_mean"))


def of_one_width(rows):
    """Rows as one batch, padded to the longest of them, as a tokenizer's collator makes it."""
    ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
    if labels[0].dim():
        labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    else:
        labels = torch.stack(labels)
    return {"input_ids": padded, "attention_mask": mask, "labels": labels}


def evaluated_and_predicted(model, label):
    """A Trainer that evaluates within training and behind it, and then predicts: all that it returns is recorded."""
    rows = [
        {"input_ids": row, "labels": label(row)}
        for step in range(10)
        for ids, mask, _ in [batch(step, length=10 + step % 4)]
        for row in (row[real.bool()] for row, real in zip(ids, mask, strict=True))
    ]
    settings = {"max_steps": 6 * TIMES, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
                "learning_rate": 1e-2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "report_to": [],
                "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}  # fmt: skip
    arguments = TrainingArguments(output_dir=tempfile.mkdtemp(), **settings)
    trainer = Trainer(model, arguments, of_one_width, train_dataset=rows, eval_dataset=rows[:18])
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    history = [[entry[name] for name in names if name in entry] for entry in trainer.state.log_history]
    history.append([trainer.evaluate()["eval_loss"], trainer.evaluate(rows[18:])["eval_loss"]])
    for asked in (rows[:18], rows[10:30]):
        found = trainer.predict(asked)
        predictions = torch.from_numpy(found.predictions).double()
        size = predictions.pow(2)
        history.append([found.metrics["test_loss"], size.mean().item(), *size.flatten(1).sum(1).tolist()])
        history.append([float(each) for each in predictions.shape])
    return [*history, norms(trainer.model)]


@case
def trainer_predicts_tokens():
    """Logits of each position, which `predict` returns at pads, too: those calls run padded, the others packed."""
    return evaluated_and_predicted(llama(), lambda row: row)


@case(default=True, expect="packed")
def trainer_predicts_rows():
    """Logits of each row, which no pad has a part in."""
    return evaluated_and_predicted(llama(LlamaForSequenceClassification, num_labels=3), lambda row: row.sum() % 3)


torch.manual_seed(0)
history = chosen()()
