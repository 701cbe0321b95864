"""Lightning, with one line more: `python examples/hosts/lightning_module.py [RANKS]`."""

import deepytorch  # the one line

import sys
from typing import Any

import lightning
import torch
from text import padded_batches, small_llama


class Module(lightning.LightningModule):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_llama()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of one batch."""
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    rows: Any = list(padded_batches(20))
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=lambda batch: batch[0])
    strategy = "ddp" if ranks > 1 else "auto"
    lightning.Trainer(devices=ranks, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False).fit(
        Module(), loader
    )
    print(deepytorch.report())
