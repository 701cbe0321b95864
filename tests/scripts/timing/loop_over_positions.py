"""A tagger whose forward goes through positions one by one, so that Dynamo's trace is for one length."""

import torch
from torch import nn
from transformers import BertConfig, BertModel


class Tagger(nn.Module):
    def __init__(self, tags=4):
        super().__init__()
        self.out, self.transitions = nn.Linear(32, tags), nn.Parameter(torch.randn(tags, tags) * 0.1)
        self.bert = BertModel(
            BertConfig(
                vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def forward(self, ids, mask, tags):
        scores = self.out(self.bert(ids, attention_mask=mask).last_hidden_state)
        state, score = scores[:, 0], scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for place in range(1, scores.shape[1]):
            reached = torch.logsumexp(state[:, :, None] + self.transitions[None] + scores[:, place, None], 1)
            state = torch.where(mask[:, place, None] > 0, reached, state)
            own = scores[:, place].gather(1, tags[:, place : place + 1])[:, 0]
            score = score + (self.transitions[tags[:, place - 1], tags[:, place]] + own) * mask[:, place]
        return (torch.logsumexp(state, 1) - score).mean()


torch.manual_seed(0)
model = Tagger().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
generator = torch.Generator().manual_seed(1)
while True:
    lengths = torch.randint(4, 25, (4,), generator=generator)
    mask = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()
    ids = torch.randint(3, 96, mask.shape, generator=generator)
    model(ids, mask, ids % 4).backward()
    optimizer.step()
    optimizer.zero_grad()
