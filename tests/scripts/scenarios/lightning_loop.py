"""A Lightning module whose training step reads all logits beside the model's own loss."""

import logging
import warnings

import lightning
import torch
from tiny import batch, llama, norms

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
history = []


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = llama()

    def training_step(self, inputs, index):
        ids, mask, labels = inputs
        outputs = self.model(input_ids=ids, attention_mask=mask, labels=labels)
        loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
        history.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
module = Module()
trainer = lightning.Trainer(
    max_steps=4,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, torch.utils.data.DataLoader([batch(step) for step in range(4)], batch_size=None))
history.append(norms(module))
