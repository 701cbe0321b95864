"""Feed-forward parts and mixtures of experts, as a script writes them."""

from __future__ import annotations

# The lines of `__init__`, and those of `forward`, which takes and returns `x` (rows, positions, DIM).
BANK = (
    "self.router = nn.Linear(DIM, EXPERTS)\n"
    "self.up = nn.Parameter(torch.randn(EXPERTS, DIM, WIDE) * 0.2)\n"
    "self.down = nn.Parameter(torch.randn(EXPERTS, WIDE, DIM) * 0.2)"
)
FEED = {
    "gelu": (
        "self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)",
        "return self.down(F.gelu(self.up(x)))",
    ),
    "gated": (
        "self.up, self.gate = nn.Linear(DIM, WIDE, bias=False), nn.Linear(DIM, WIDE, bias=False)\n"
        "self.down = nn.Linear(WIDE, DIM, bias=False)",
        "return self.down(F.silu(self.gate(x)) * self.up(x))",
    ),
    "relu squared": (
        "self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)",
        "return self.down(F.relu(self.up(x)) ** 2)",
    ),
    "all experts": (
        BANK,
        "weights = self.router(x).softmax(-1)\n"
        'y = F.gelu(torch.einsum("bsd,edw->bsew", x, self.up.to(x.dtype)))\n'
        'return torch.einsum("bsew,ewd,bse->bsd", y, self.down.to(y.dtype), weights.to(y.dtype))',
    ),
    "experts, chosen": (
        BANK,
        "scores, chosen = self.router(x).softmax(-1).topk(2, dim=-1)\n"
        "weights = torch.zeros(*x.shape[:-1], EXPERTS, dtype=scores.dtype).scatter(-1, chosen, scores)\n"
        'y = F.silu(torch.einsum("bsd,edw->bsew", x, self.up.to(x.dtype)))\n'
        'return torch.einsum("bsew,ewd,bse->bsd", y, self.down.to(y.dtype), weights.to(y.dtype))',
    ),
    "experts, sorted": (
        "self.router = nn.Linear(DIM, EXPERTS, bias=False)\n"
        "self.up = nn.Parameter(torch.randn(EXPERTS, DIM, WIDE) * 0.2)\n"
        "self.down = nn.Parameter(torch.randn(EXPERTS, WIDE, DIM) * 0.2)",
        "flat = x.reshape(-1, DIM)\n"
        "scores, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)\n"
        "entries, order = chosen.reshape(-1).sort(stable=True)\n"
        "of_tokens = flat[order // 2]\n"
        "hidden = F.silu(torch.bmm(of_tokens[:, None], self.up[entries].to(flat.dtype)))\n"
        "found = torch.bmm(hidden, self.down[entries].to(hidden.dtype))[:, 0] * scores.reshape(-1)[order][:, None]\n"
        "back = torch.empty_like(order)\n"
        "back[order] = torch.arange(order.shape[0])\n"
        "return found[back].view(-1, 2, DIM).sum(1).view(x.shape).to(x.dtype)",
    ),
    "experts in a loop": (
        "self.router = nn.Linear(DIM, EXPERTS)\n"
        "self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))",
        "flat = x.reshape(-1, DIM)\n"
        "scores, chosen = self.router(flat).softmax(-1).topk(1, dim=-1)\n"
        "y = torch.zeros_like(flat)\n"
        "for number, expert in enumerate(self.experts):\n"
        "    tokens, place = torch.where(chosen == number)\n"
        "    y.index_add_(0, tokens, (expert(flat[tokens]) * scores[tokens, place, None]).to(y.dtype))\n"
        "return y.view(x.shape)",
    ),
    "none": ("self.nothing = nn.Identity()", "return torch.zeros_like(x)"),
    "experts of limited room": (
        BANK,
        "flat = x.reshape(-1, DIM)\n"
        "score, chosen = self.router(flat).softmax(-1).max(-1)\n"
        "one_hot = F.one_hot(chosen, EXPERTS)\n"
        "place = (one_hot.cumsum(0) * one_hot).sum(-1)  # in the queue of its expert, where pads stand too\n"
        "score = score * (place <= flat.shape[0] // 3)\n"
        'y = F.gelu(torch.einsum("td,edw->tew", flat, self.up.to(x.dtype)))\n'
        "weights = one_hot.to(y.dtype) * score[:, None].to(y.dtype)\n"
        'y = torch.einsum("tew,ewd,te->td", y, self.down.to(y.dtype), weights)\n'
        "return y.view(x.shape)",
    ),
    "experts choose tokens": (
        BANK,
        "flat = x.reshape(-1, DIM)\n"
        "scores, chosen = self.router(flat).softmax(-1).t().topk(flat.shape[0] // 3 + 1, dim=-1)\n"
        "y = torch.bmm(F.gelu(torch.bmm(flat[chosen], self.up.to(x.dtype))), self.down.to(x.dtype))\n"
        "y = torch.zeros_like(flat).index_add(0, chosen.flatten(), (y * scores[..., None]).flatten(0, 1).to(x.dtype))\n"
        "return y.view(x.shape)",
    ),
    "experts choose in each row": (
        BANK,
        "scores, chosen = self.router(x).softmax(-1).transpose(1, 2).topk(2, dim=-1)  # rows, experts, 2\n"
        "rows = torch.arange(x.shape[0])[:, None, None]\n"
        'y = F.gelu(torch.einsum("bekd,edw->bekw", x[rows, chosen], self.up.to(x.dtype)))\n'
        'y = torch.einsum("bekw,ewd->bekd", y, self.down.to(y.dtype)) * scores[..., None]\n'
        "place = chosen.flatten(1)[..., None].expand(-1, -1, DIM)\n"
        "return torch.zeros_like(x).scatter_add(1, place, y.flatten(1, 2).to(x.dtype))",
    ),
    "experts chosen by noise": (
        BANK,
        "asked = self.router(x)\n"
        "if self.training:\n"
        "    asked = asked + torch.randn_like(asked)\n"
        "scores, chosen = asked.softmax(-1).topk(2, dim=-1)\n"
        "weights = torch.zeros_like(asked, dtype=scores.dtype).scatter(-1, chosen, scores)\n"
        'y = F.silu(torch.einsum("bsd,edw->bsew", x, self.up.to(x.dtype)))\n'
        'return torch.einsum("bsew,ewd,bse->bsd", y, self.down.to(y.dtype), weights.to(y.dtype))',
    ),
}
